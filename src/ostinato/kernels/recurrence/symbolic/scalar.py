"""Nodes of a graph under construction with arithmetic operators, to write formulas such as ``x * sigmoid(-x)``."""

import functools
from collections.abc import Callable

from ostinato.kernels.recurrence.symbolic.builder import Builder


class Unsupported(Exception):
    """Raised for an operation without a scalar form."""


def _unary(name: str) -> "Callable[[Scalar], Scalar]":
    return lambda self: operation(name, self)


def _binary(name: str) -> "Callable[[Scalar, Operand], Scalar]":
    return lambda self, other: operation(name, self, other)


def _reflected(name: str) -> "Callable[[Scalar, Operand], Scalar]":
    return lambda self, other: operation(name, other, self)


class Scalar:
    """A node; numbers that it is combined with become constants of the graph."""

    def __init__(self, builder: Builder, index: int) -> None:
        self.builder = builder
        self.index = index

    def operand_of(self, name: str) -> "Scalar | None":
        """x if this node is ``name(x)``, else None."""
        node = self.builder.node(self.index)
        return Scalar(self.builder, node.operands[0]) if node.name == name else None

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _binary("div"), _reflected("div")
    __neg__, __abs__, __round__, __invert__ = _unary("neg"), _unary("abs"), _unary("round"), _unary("not")
    __lt__, __le__, __gt__, __ge__ = _binary("lt"), _binary("le"), _binary("gt"), _binary("ge")
    __eq__, __ne__ = _binary("eq"), _binary("ne")  # type: ignore[assignment]
    __and__, __or__ = _binary("and"), _binary("or")


Operand = Scalar | float  # at least one operand of an operation is a Scalar


def operation(name: str, *operands: Operand) -> Scalar:
    """Add one of the graph's ``OPERATIONS``."""
    if any(isinstance(x, complex) for x in operands):
        raise Unsupported("with a complex number")
    builder = next(x.builder for x in operands if isinstance(x, Scalar))
    indices = (x.index if isinstance(x, Scalar) else builder.constant(x) for x in operands)
    return Scalar(builder, builder.add(name, *indices))


def named(name: str) -> Callable[..., Scalar]:
    """An operation of this name as a function of its operands."""
    return functools.partial(operation, name)


atan2 = named("atan2")
cos = named("cos")
erf = named("erf")
exp = named("exp")
expm1 = named("expm1")
fmod = named("fmod")
log1p = named("log1p")
maximum = named("maximum")
minimum = named("minimum")
reciprocal = named("reciprocal")
sigmoid = named("sigmoid")
sin = named("sin")
sqrt = named("sqrt")
tanh = named("tanh")
tanh_slope = named("tanh_slope")
trunc = named("trunc")
where = named("where")
