"""A micro-batch's pass is captured once in a CUDA graph, proved, and replayed."""
