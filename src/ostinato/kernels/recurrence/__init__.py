"""Recurrences written as PyTorch functions: traced, differentiated, and printed as kernels.

=================  ===========================================================================
``graph.py``       scalar operations, simplified as they are added
``aten.py``        what PyTorch's operations do to one element
``trace.py``       a function's graphs: its values and its derivatives
``linear.py``      those of a linear recurrence, as steps of a scan
``print_cuda.py``  steps as an Element of the scan's kernel, which ``cuda.py`` launches
``print_cpu.py``   steps as functions that the loops of ``cpu_loops.py`` call, ``cpu.py`` runs
``projected.py``   a layer's product, gates and scan in one kernel, on Hopper GPUs
``torch_ops.py``   the same in PyTorch operations, with derivatives of any order
``operators.py``   the differentiable operators of linear recurrences
``nonlinear.py``   that of the others, by ``steps_cuda.py`` and ``steps_cpu.py``
``complex.py``     the complex linear scan, a recurrence of two states
=================  ===========================================================================
"""
