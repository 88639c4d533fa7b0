"""Non-linear recurrences with recurrent weights: ``h[t] = f(h[t-1], x[t] + W h[t-1])``.

=================  =======================================================================
``definition.py``  what is computed, one step after the other in PyTorch operations
``operator.py``    it as a differentiable operator
``layer.py``       what those who compute it are given
``rows.py``        the layout that all steps are computed in: time-major, longest first
``stepwise.py``    a matrix product and a generated loop or kernel for every step
``persistent.py``  on a GPU, all steps in one launch that keeps the weights on the chip
``cell.py``        a trace as the cell of that
=================  =======================================================================
"""
