"""rebatch's pool in front of PyTorch's CUDA allocator: install(), and the C++ that it compiles
and loads."""
