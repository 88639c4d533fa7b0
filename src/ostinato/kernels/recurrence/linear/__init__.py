"""Linear recurrences, ``h[t] = a(x[t]) * h[t-1] + b(x[t])``: scans whose coefficients are computed as they are read.

================  ===========================================================================
``operator.py``   a recurrence as a differentiable operator
``layer.py``      that of a layer, whose gates lie side by side; and its single steps
``steps.py``      a trace as what is computed once for a channel, and once for a step
``element.py``    those steps as an Element of the scan's CUDA kernel
``cuda.py``       launches of that kernel, and of ``projected_step.cu``: one step with its product
``projected.py``  a layer's GEMM, gates and scan in one kernel, ``projected.cu``, on Hopper GPUs; its parts are
                  ``projected_tile.cuh``, ``projected_scan.cuh`` and ``hopper.cuh``
``cpu_step.py``   the steps as functions for the CPU's loops
``cpu_loops.py``  the loops over time around them
``cpu.py``        their calls
``torch_ops.py``  the same in PyTorch operations, with derivatives of any order
================  ===========================================================================
"""
