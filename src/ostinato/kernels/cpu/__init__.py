"""What kernels on CPUs share:

=================  ==================================================================
``compiler.py``    how Numba compiles loops
``intrinsics.py``  what these are written with: arguments, tasks, accesses to memory
``elementary.py``  their elementary functions
``transpose.py``   copies of tensors whose steps, not channels, are contiguous
``threads.py``     the threads that run them
``memory.py``      memory for their results
=================  ==================================================================
"""
