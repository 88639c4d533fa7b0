"""What kernels on CPUs share:

=================  ==================================================================
``compiler.py``    how Numba compiles loops
``intrinsics.py``  what these are written with: arguments, tasks, accesses to memory
``elementary.py``  their elementary functions
``memory.py``      memory for their results
``threads.py``     the threads that run them
``transpose.py``   copies of tensors whose steps, not channels, are contiguous
=================  ==================================================================
"""
