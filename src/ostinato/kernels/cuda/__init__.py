"""What kernels on NVIDIA GPUs share:

=================  ==================================================
``nvrtc.py``       kernels: compiled, loaded, launched
``streams.py``     kernels beside each other
``workspaces.py``  the memory in which cuBLAS works
``numeric.cuh``    numbers: their types, arithmetic, memory accesses
``barriers.cuh``   barriers
``gemv.cuh``       products of a matrix and a vector
``row_sums.cuh``   sums of rows
=================  ==================================================
"""
