"""What runs in the program of a fit, on the stand-in for CUDA."""
