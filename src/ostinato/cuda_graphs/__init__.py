"""CUDA graphs, each of which the host launches as a whole.

===============  ===================================================================
``capture.py``   captures a function
``function.py``  a captured function that is called with new inputs
``kept.py``      counts repeated calls, and bounds the memory of their graphs
``random.py``    draws the random numbers of an earlier call again
``calls.py``     calls of small layers, forward and backward
``stacked.py``   those of stacked layers of recurrences
===============  ===================================================================
"""
