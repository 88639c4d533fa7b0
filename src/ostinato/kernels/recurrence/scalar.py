"""Nodes of a graph under construction that are written as formulas: ``x * sigmoid(-x)``."""

import functools
from collections.abc import Callable

from ostinato.kernels.recurrence.graph import Builder


class Unsupported(Exception):
    """Raised for an operation without a scalar form."""


class Scalar:
    """A node; with a number beside it, that is a constant of the graph."""

    def __init__(self, builder: Builder, place: int) -> None:
        self.builder = builder
        self.place = place

    def operand_of(self, name: str) -> "Scalar | None":
        """x, if this is ``name(x)``."""
        node = self.builder.node(self.place)
        return Scalar(self.builder, node.operands[0]) if node.name == name else None

    def __add__(self, other: "Operand") -> "Scalar":
        return operation("add", self, other)

    def __radd__(self, other: "Operand") -> "Scalar":
        return operation("add", other, self)

    def __sub__(self, other: "Operand") -> "Scalar":
        return operation("sub", self, other)

    def __rsub__(self, other: "Operand") -> "Scalar":
        return operation("sub", other, self)

    def __mul__(self, other: "Operand") -> "Scalar":
        return operation("mul", self, other)

    def __rmul__(self, other: "Operand") -> "Scalar":
        return operation("mul", other, self)

    def __truediv__(self, other: "Operand") -> "Scalar":
        return operation("div", self, other)

    def __rtruediv__(self, other: "Operand") -> "Scalar":
        return operation("div", other, self)

    def __neg__(self) -> "Scalar":
        return operation("neg", self)

    def __abs__(self) -> "Scalar":
        return operation("abs", self)

    def __round__(self) -> "Scalar":
        return operation("round", self)

    def __lt__(self, other: "Operand") -> "Scalar":
        return operation("lt", self, other)

    def __le__(self, other: "Operand") -> "Scalar":
        return operation("le", self, other)

    def __gt__(self, other: "Operand") -> "Scalar":
        return operation("gt", self, other)

    def __ge__(self, other: "Operand") -> "Scalar":
        return operation("ge", self, other)

    def __eq__(self, other: "Operand") -> "Scalar":  # type: ignore[override]
        return operation("eq", self, other)

    def __ne__(self, other: "Operand") -> "Scalar":  # type: ignore[override]
        return operation("ne", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __and__(self, other: "Operand") -> "Scalar":
        return operation("and", self, other)

    def __or__(self, other: "Operand") -> "Scalar":
        return operation("or", self, other)

    def __invert__(self) -> "Scalar":
        return operation("not", self)


Operand = Scalar | float  # at least one of an operation's is no number
Operation = Callable[..., Scalar]


def operation(name: str, *operands: Operand) -> Scalar:
    """One of the graph's ``OPERATIONS``."""
    if any(isinstance(x, complex) for x in operands):
        raise Unsupported("with a complex number")
    builder = next(x.builder for x in operands if isinstance(x, Scalar))
    places = (x.place if isinstance(x, Scalar) else builder.constant(x) for x in operands)
    return Scalar(builder, builder.add(name, *places))


def _named(name: str) -> Operation:
    return functools.partial(operation, name)


atan2 = _named("atan2")
cos = _named("cos")
erf = _named("erf")
exp = _named("exp")
expm1 = _named("expm1")
fmod = _named("fmod")
log = _named("log")
log1p = _named("log1p")
maximum = _named("maximum")
minimum = _named("minimum")
reciprocal = _named("reciprocal")
sigmoid = _named("sigmoid")
sign = _named("sign")
sin = _named("sin")
sqrt = _named("sqrt")
tanh = _named("tanh")
tanh_slope = _named("tanh_slope")
trunc = _named("trunc")
where = _named("where")
