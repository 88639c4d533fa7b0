"""Checks of arguments: an error names the argument, what it must be, and what came."""

from numbers import Real


def check_integers(**numbers: int) -> None:
    """Raise TypeError unless all are integers."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer; got {type(value).__name__}")


def check_sizes(**sizes: int) -> None:
    """Raise TypeError or ValueError unless all are positive integers."""
    check_integers(**sizes)
    for name, value in sizes.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive; got {value}")


def check_numbers(**numbers: float) -> None:
    """Raise TypeError unless all are real numbers."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number; got {type(value).__name__}")


def check_flags(**flags: bool) -> None:
    """Raise TypeError unless all are True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool; got {type(value).__name__}")
