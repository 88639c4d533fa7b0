"""Recurrences that are not linear in their one or two states, ``h[t] = f(h[t-1], x[t])``.

=================  ======================================================================
``operator.py``    a recurrence as a differentiable operator
``cell.py``        a trace as the Cell of ``steps.cu``
``cuda.py``        launches of that: in chunks of time by Newton's method, or step by step
``loop.py``        a trace as a loop over time on a CPU
``cpu.py``         such loops, compiled and called
``sequential.py``  the definition, step by step in PyTorch operations
``linearised.py``  derivatives of any order, as linear scans
=================  ======================================================================
"""
