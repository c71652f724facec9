"""The largest micro-batch that fits on a named card, found on a machine without a GPU::

    python3 -m rebatch.fit --gpu "H100 80GB" -- python3 train.py

The program runs unchanged on a stand-in for CUDA, which has memory and no kernels (standin/), up to
its first Step (program/steps.py), or without one to its first pass (program/loops.py), or where its
size is an argument, to its first reading of that (program/sized.py). There sizes are tried on
PyTorch's own allocator, and the program ends.
"""
