"""Recurrences written as PyTorch functions: traced, differentiated, and printed as kernels."""
