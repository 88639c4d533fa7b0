"""An elementwise PyTorch function as graphs of scalar operations, which compute its values and its derivatives.

=====================  =======================================================
``tracer.py``          traces a function by running it on small tensors
``trace.py``           the trace: graphs of the function's values and derivatives
``aten.py``            PyTorch's operations as scalar operations
``scalar.py``          nodes of a graph with arithmetic operators, for formulas
``builder.py``         a graph under construction, simplified as nodes are added
``graph.py``           the graph, its dependence on its inputs, its evaluation
``print_cuda.py``      a graph as lines of CUDA C++
``print_cpu.py``       a graph as lines of Python, for Numba
``differentiable.py``  the function in PyTorch, with the trace's derivatives
=====================  =======================================================
"""
