"""The kernels, in the order of their imports: each imports from those above it, and from ``ostinato.files``, alone.

================  ================================================================================
``cache.py``      what was compiled, on disk
``derived.py``    what is computed from a tensor, until it changes
``operators/``    functions of tensors as operators that PyTorch differentiates, batches, compiles
``cuda/``         what kernels on NVIDIA GPUs share: compilation by NVRTC, launches, arithmetic
``cpu/``          what kernels on CPUs share: compilation by Numba, threads, memory, arithmetic
``matmul/``       products of matrices
``scan/``         scans, by several backends
``persistent/``   RNN, GRU and LSTM, with the recurrent weights close to the processor
``recurrence/``   recurrences written as PyTorch functions
================  ================================================================================
"""
