"""Recurrences written as PyTorch functions: traced, differentiated, and printed as kernels.

========================  ===========================================================================
``graph.py``              scalar operations, simplified as they are added
``scalar.py``             nodes of a graph, written as formulas
``aten.py``               PyTorch's operations as scalar operations
``trace.py``              a function traced to graphs of its values and derivatives
``linear.py``             the graphs of a linear recurrence, as steps of a scan
``print_cuda.py``         a recurrence as a struct of CUDA C++, around which there are kernels
``print_cpu.py``          a linear one's steps as functions that the CPU's loops call
``print_loop.py``         those of others, with the loop around them
``cuda.py``, ``cpu.py``   the linear ones: launches of the scan's kernel, calls of the loops of ``cpu_loops.py``
``projected.py``          a layer's GEMM, gates and scan in one kernel, on Hopper GPUs
``torch_ops.py``          linear recurrences in PyTorch operations, with derivatives of any order
``linear_recurrence.py``  a linear recurrence as a differentiable operator
``layer_scan.py``         that of a layer, whose gates lie side by side; and its single steps
``nonlinear.py``          that of non-linear ones, by ``steps_cuda.py``, ``steps_cpu.py``
``arguments.py``          how those operators are given their tensors
``sequential.py``         the definition of a non-linear one, step by step in PyTorch operations
``linearised.py``         its derivatives of any order, as linear scans
``complex.py``            the complex linear scan, a recurrence of two states
``backends.py``           which of a device's modules computes a recurrence
========================  ===========================================================================

A device's modules provide, for checked and non-empty tensors that are on it,

- of linear recurrences, ``cpu.py`` and ``cuda.py``: ``scan`` and ``scan_backward`` for the operator
  ``linear_recurrence``, ``layer`` and ``layer_backward`` for ``layer_scan``, and ``Step``, one step of a layer with its
  matrix product;
- of others, ``steps_cpu.py`` and ``steps_cuda.py``: ``steps`` and ``steps_backward`` for ``nonlinear_recurrence``, and
  on a CPU ``Step``, one step of a recurrence alone.

The arguments are the operators', which a comment above each describes.
"""
