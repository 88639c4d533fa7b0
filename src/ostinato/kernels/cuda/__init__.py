"""What kernels on NVIDIA GPUs share:

=================  ===============================================================
``nvrtc.py``       compiling, loading and launching kernels
``streams.py``     concurrent kernels on several streams
``workspaces.py``  the workspace of cuBLAS
``numeric.cuh``    storage and compute types, math functions
``barriers.cuh``   barriers in shared memory and in clusters, asynchronous copies
``gemv.cuh``       matrix-vector products
``row_sums.cuh``   sums over the rows of a matrix
=================  ===============================================================
"""
