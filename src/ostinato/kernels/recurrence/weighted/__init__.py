"""Non-linear recurrences with recurrent weights: ``h[t] = f(h[t-1], x[t] + W h[t-1])``.

=================  =======================================================================
``definition.py``  the definition, step by step in PyTorch operations
``operator.py``    the recurrence as a differentiable operator
``layer.py``       the arguments and the interface of its two executors
``rows.py``        the layout that all steps are computed in: time-major, longest first
``stepwise.py``    a matrix product and a generated loop or kernel for every step
``persistent.py``  on a GPU, all steps in one launch that keeps the weights on the chip
``cell.py``        prints a trace as the cell of these persistent kernels
=================  =======================================================================
"""
