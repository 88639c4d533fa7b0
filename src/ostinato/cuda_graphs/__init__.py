"""CUDA graphs, which the host launches as a whole:

===============  ========================================================
``capture.py``   how a function is captured
``function.py``  a function in a graph, called as any other
``kept.py``      calls that repeat, and the memory that their graphs keep
``random.py``    random numbers of a call, drawn again
``calls.py``     calls of small layers, and their backward
``stacked.py``   those of layers of recurrences
===============  ========================================================
"""
