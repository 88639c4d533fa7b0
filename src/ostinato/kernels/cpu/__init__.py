"""What all CPU kernels share.

=================  =========================================================================
``compiler.py``    compiles loops by Numba, and caches them on disk
``intrinsics.py``  what loops are written with: argument structures, tasks, memory accesses
``elementary.py``  elementary functions, such as exp
``memory.py``      an allocator for results
``threads.py``     the threads that run loops
``transpose.py``   transposed copies of tensors whose steps, not channels, are contiguous
=================  =========================================================================
"""
