"""What kernels on CPUs share:

=================  ==================================================================
``loops.py``       loops: how Numba compiles them, and how they access memory
``elementary.py``  their elementary functions
``transpose.py``   copies of tensors whose steps, not channels, are contiguous
``threads.py``     the threads that run them
``memory.py``      memory for their results
=================  ==================================================================
"""
