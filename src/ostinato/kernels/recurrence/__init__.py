"""Recurrences written as PyTorch functions: traced, differentiated, and printed as kernels.

================  ==========================================================================
``symbolic/``     a function as graphs of scalar operations: traced, simplified, printed
``linear/``       recurrences that are linear in the state, as scans; layers of such
``nonlinear/``    others, of one state or two, step by step or by Newton's method over time
``arguments.py``  how the operators of both are given their tensors
``complex.py``    the complex linear scan, a recurrence of two states
``backends.py``   which of a device's modules computes a recurrence
================  ==========================================================================

A device's modules provide, for checked and non-empty tensors that are on it,

- of linear recurrences, ``linear/cpu.py`` and ``linear/cuda.py``: ``scan`` and ``scan_backward`` for the operator
  ``linear_recurrence``, ``layer`` and ``layer_backward`` for ``layer_scan``, and ``Step``, one step of a layer with its
  matrix product;
- of others, ``nonlinear/cpu.py`` and ``nonlinear/cuda.py``: ``steps`` and ``steps_backward`` for
  ``nonlinear_recurrence``, and on a CPU ``Step``, one step of a recurrence alone.

The arguments are the operators', which a comment above each describes; bounds, resets and direction are one, an
:class:`~ostinato.kernels.scan.Order`; a layer's are one :class:`~ostinato.kernels.recurrence.arguments.LayerArguments`.
"""
