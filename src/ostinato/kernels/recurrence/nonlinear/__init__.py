"""Recurrences that are not linear in their states, ``h[t] = f(h[t-1], x[t])``.

=================  ======================================================================
``operator.py``    a recurrence as a differentiable operator
``cell.py``        prints a trace as the struct ``Cell`` that ``steps.cu`` calls
``cuda.py``        launches ``steps.cu``: in chunks of time by Newton's method, or step by step
``loop.py``        prints a trace as a loop over time for CPUs
``cpu.py``         compiles and calls these loops
``sequential.py``  the definition, step by step in PyTorch operations
``linearised.py``  derivatives of any order, computed by linear scans
=================  ======================================================================
"""
