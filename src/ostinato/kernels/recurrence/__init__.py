"""Recurrences written as PyTorch functions: traced, differentiated, and printed as kernels.

================  ==============================================================================
``symbolic/``     a function as graphs of scalar operations: traced, simplified, printed
``linear/``       recurrences that are linear in the state, computed as scans, and their layers
``nonlinear/``    other recurrences: step by step, or by Newton's method over time
``weighted/``     non-linear recurrences with a recurrent weight matrix, in persistent kernels
``arguments.py``  the arguments that the operators of these recurrences share
``complex.py``    the complex linear scan, a real recurrence of two states
``backends.py``   the interface that each device's kernels implement, and the choice between them
================  ==============================================================================
"""
