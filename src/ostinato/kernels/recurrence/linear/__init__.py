"""Linear recurrences, ``h[t] = a(x[t]) * h[t-1] + b(x[t])``: scans that compute their coefficients from loaded inputs.

================  ===========================================================================
``operator.py``   a recurrence as a differentiable operator
``layer.py``      a layer, whose gates are concatenated, as an operator; its single steps
``steps.py``      splits a trace into what is computed once per channel and what at every step
``element.py``    prints these as an ``Element`` of the scan's CUDA kernel
``cuda.py``       launches that kernel, and ``projected_step.cu``: one step with its matrix product
``projected.py``  a layer's GEMM, gates and scan in one kernel, ``projected.cu``, on Hopper GPUs; its parts are
                  ``projected_tile.cuh``, ``projected_scan.cuh`` and ``hopper.cuh``
``cpu_step.py``   prints the steps as functions for the CPU's loops
``cpu_loops.py``  the loops over time that call these functions
``cpu.py``        calls the loops
``torch_ops.py``  the same in PyTorch operations, with derivatives of any order
================  ===========================================================================
"""
