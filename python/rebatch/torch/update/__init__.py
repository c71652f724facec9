"""What comes after the passes of a batch: the update, by a Step or by the program."""
