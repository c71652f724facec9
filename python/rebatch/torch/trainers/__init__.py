"""Trainers that clip and update by themselves: their passes, update and evaluation."""
