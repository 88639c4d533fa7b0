"""The kernels by family, `scan`, `recurrence` and `persistent`, and what every family uses:

======================  ==================================================================
``dispatch.py``         differentiable operators
``several.py``          several calls of one, at the same time
``vmap.py``             how ``torch.vmap`` batches their calls
``eager.py``            which calls may bypass their registration, and functions prepared for them
``derived.py``          what is computed from a tensor, until it changes
``export.py``           programs that run without this library
``matmul/``             products of matrices
``cuda/``               what kernels on NVIDIA GPUs share
``cpu/``                what those on CPUs do
``cache.py``            what was compiled, on disk
======================  ==================================================================
"""
