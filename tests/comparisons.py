"""Comparisons of results: up to rounding, and bit by bit."""

import torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_close(got, expected, tolerance=None):
    """Assert equal shapes and dtypes, and values that are close relative to the largest element."""
    if expected is None:
        assert got is None
        return
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    # Inputs are of order 1: where all results are near 0 by cancellation, they are no scale for their own error.
    scale = expected.double().abs().amax().clamp(min=0.1) if expected.numel() else 1.0
    error = (got.double() - expected.double()).abs() / scale
    assert error.numel() == 0 or error.max() <= (TOLERANCE[got.dtype] if tolerance is None else tolerance)


def assert_all_close(got, expected, tolerance=None):
    """Assert the expected number of results, each close to the expected one."""
    for x, y in zip(got, expected, strict=True):
        assert_close(x, y, tolerance)


def same_bits(got, expected, equal_nan=False):
    """Whether both have the same number of results, which are pairwise None or equal in shape, dtype and value."""
    got, expected = [*got], [*expected]
    return len(got) == len(expected) and all(_are_equal(x, y, equal_nan) for x, y in zip(got, expected, strict=True))


def _are_equal(x, y, equal_nan):
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and x.dtype == y.dtype and torch.allclose(x, y, 0, 0, equal_nan)
