"""Recurrences written as PyTorch functions: traced, differentiated, and printed as kernels.

================  ==============================================================================
``symbolic/``     a function as graphs of scalar operations: traced, simplified, printed
``linear/``       recurrences that are linear in the state, as scans; layers of such
``nonlinear/``    others, of one state or two, step by step or by Newton's method over time
``weighted/``     those with products of a matrix with the state, in persistent kernels
``arguments.py``  how the operators of all are given their tensors
``complex.py``    the complex linear scan, a recurrence of two states
``backends.py``   what a device's modules provide, and which of them computes a recurrence
================  ==============================================================================
"""
