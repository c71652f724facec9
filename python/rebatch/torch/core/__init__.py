"""The training that a Step runs: its arguments, its batches, and what C calls in them."""
