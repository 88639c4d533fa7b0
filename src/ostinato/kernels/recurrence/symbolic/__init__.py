"""An elementwise PyTorch function as graphs of scalar operations, of its values and its derivatives.

=================  =======================================================
``tracer.py``      a function traced, as it runs on small tensors
``trace.py``       its trace: graphs of its values and derivatives
``aten.py``        PyTorch's operations as scalar operations
``scalar.py``      nodes of a graph, written as formulas
``builder.py``     a graph under construction, simplified as nodes are added
``graph.py``       the graph: scalar operations, and what it depends on
``print_cuda.py``  a graph as lines of CUDA C++
``print_cpu.py``   a graph as lines of Python, for Numba
=================  =======================================================
"""
