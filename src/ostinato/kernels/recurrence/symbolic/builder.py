"""Graphs of scalar operations under construction, simplified as nodes are added.

Common subexpressions are shared, constants folded, and trivial operations left over from differentiation (times 1,
plus 0, double negation) removed.  In derivatives a product with zero, or with a branch that is zero, is zero; in the
function itself it is not, as zero times infinity or NaN is NaN.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeGuard

import torch

from ostinato.kernels.recurrence.symbolic.graph import LOGICAL, OPERATIONS, Graph, Node, Number

_OF_LOGICAL = frozenset(("and", "or", "not"))
_SYMMETRIC = frozenset(("add", "mul", "minimum", "maximum", "hypot", "eq", "ne", "and", "or"))


_SMALLEST, _LARGEST = 2.0**-126, 2.0**126  # the range of powers of two that are, as their inverses, normal in float32


def _is_power_of_two(x: Number | None) -> TypeGuard[Number]:
    """Whether x is a power of two, so that dividing by x equals multiplying by 1 / x to the last bit."""
    return x is not None and abs(math.frexp(x)[0]) == 0.5 and _SMALLEST <= abs(x) <= _LARGEST


class Builder:
    """A graph under construction; methods that add a node return its index, or that of an equal node that exists.

    `differentiating` is set while derivatives are added, in which zero means that there is no dependence.
    """

    def __init__(self) -> None:
        self.differentiating = False
        self._nodes: list[Node] = []
        self._indices: dict[str, int] = {}

    def graph(self, outputs: Sequence[int]) -> Graph:
        """The subgraph that computes these nodes."""
        needed = set()
        stack = list(outputs)
        while stack:
            i = stack.pop()
            if i not in needed:
                needed.add(i)
                stack.extend(self._nodes[i].operands)
        renumbered = {i: k for k, i in enumerate(sorted(needed))}
        nodes = (self._nodes[i] for i in sorted(needed))
        return Graph(
            tuple(node._replace(operands=tuple(renumbered[i] for i in node.operands)) for node in nodes),
            tuple(renumbered[i] for i in outputs),
        )

    def repeated(self, graph: Graph, constants: Mapping[int, Number] = MappingProxyType({})) -> list[int]:
        """Add all nodes of a graph, with some inputs fixed to numbers; returns the indices of its results."""
        indices: list[int] = []
        for node in graph.nodes:
            fixed = node.name == "input" and int(node.value) in constants
            indices.append(self.constant(constants[int(node.value)]) if fixed else self.repeat(node, indices))
        return [indices[i] for i in graph.outputs]

    def repeat(self, node: Node, indices: Sequence[int]) -> int:
        """Add a node of another graph, whose earlier nodes have these `indices` here."""
        if node.name == "constant":
            return self.constant(node.value)
        if node.name == "input":
            return self.input(int(node.value))
        return self.add(node.name, *(indices[i] for i in node.operands))

    def input(self, k: int) -> int:
        return self._index_of(Node("input", (), k))

    def constant(self, value: Number) -> int:
        return self._index_of(Node("constant", (), value if isinstance(value, bool) else float(value)))

    def add(self, name: str, *operands: int) -> int:
        """Add an operation of :data:`OPERATIONS`, folded if it is constant, else simplified."""
        if name in _OF_LOGICAL or name == "where":
            count = 1 if name == "where" else len(operands)
            tests = (i if self.is_logical(i) else self.add("ne", i, self.constant(0.0)) for i in operands[:count])
            operands = *tests, *map(self.number, operands[count:])
        else:
            operands = tuple(map(self.number, operands))
        if name in _SYMMETRIC:  # constants last
            operands = tuple(sorted(operands, key=lambda i: (self._nodes[i].name == "constant", i)))
        values = [self.value(i) for i in operands]
        if None not in values:
            return self._fold(name, values)
        simpler = self._simplified(name, operands, values)
        return self._index_of(Node(name, operands)) if simpler is None else simpler

    def node(self, i: int) -> Node:
        return self._nodes[i]

    def value(self, i: int) -> Number | None:
        """The value of a node, if it is a constant."""
        return self._nodes[i].value if self._nodes[i].name == "constant" else None

    def is_logical(self, i: int) -> bool:
        node = self._nodes[i]
        return node.name in LOGICAL or (node.name == "constant" and isinstance(node.value, bool))

    def number(self, i: int) -> int:
        """The node itself, or, if its result is Boolean, a node with the number 1 or 0."""
        return self.add("where", i, self.constant(1.0), self.constant(0.0)) if self.is_logical(i) else i

    def _index_of(self, node: Node) -> int:
        key = repr(node)  # distinguishes True from 1.0, and equates NaNs
        if key not in self._indices:
            self._indices[key] = len(self._nodes)
            self._nodes.append(node)
        return self._indices[key]

    def _fold(self, name: str, values: Sequence[Number | None]) -> int:
        dtypes = [torch.bool if isinstance(x, bool) else torch.float64 for x in values]
        tensors = [torch.tensor(x, dtype=dtype, device="cpu") for x, dtype in zip(values, dtypes, strict=True)]
        return self.constant(OPERATIONS[name](*tensors).item())

    def _operand_of(self, name: str, i: int) -> int | None:
        """The first operand of node `i` if that is an operation of this name, else None."""
        return self._nodes[i].operands[0] if self._nodes[i].name == name else None

    def _simplified(self, name: str, operands: tuple[int, ...], values: list[Number | None]) -> int | None:
        """A simpler node that computes the same, or None.

        There is a method for each operation with simplifications: it takes the operands, then their values, None
        unless constant.
        """
        rule = getattr(self, f"_simplified_{name}", None)
        return None if rule is None else rule(*operands, *values)

    def _simplified_add(self, x: int, y: int, _: Number | None, constant: Number | None) -> int | None:
        if constant == 0:
            return x
        for one, other in ((x, y), (y, x)):
            if (negated := self._operand_of("neg", one)) is not None:
                return self.add("sub", other, negated)
        if self._nodes[x].name == self._nodes[y].name == "where":  # the derivatives of the two branches of one `where`
            (test, x_true, x_false), (other_test, y_true, y_false) = self._nodes[x].operands, self._nodes[y].operands
            if test == other_test and self.value(x_false) == 0 and self.value(y_true) == 0:
                return self.add("where", test, x_true, y_false)
            if test == other_test and self.value(x_true) == 0 and self.value(y_false) == 0:
                return self.add("where", test, y_true, x_false)
        return self._factored("add", x, y)

    def _simplified_sub(self, x: int, y: int, minuend: Number | None, constant: Number | None) -> int | None:
        if constant is not None:
            return self.add("add", x, self.constant(-constant))
        if minuend == 0:
            return self.add("neg", y)
        if (negated := self._operand_of("neg", y)) is not None:
            return self.add("add", x, negated)
        return self._factored("sub", x, y)

    def _factored(self, name: str, x: int, y: int) -> int | None:
        """In derivatives, factor a sum or difference of two products with a common factor, which rounds less."""
        if self.differentiating and self._nodes[x].name == self._nodes[y].name == "mul":
            factors, others = self._nodes[x].operands, self._nodes[y].operands
            for i in range(2):
                if factors[i] in others:
                    rest = others[1 - others.index(factors[i])]
                    return self.add("mul", self.add(name, factors[1 - i], rest), factors[i])
        return None

    def _simplified_neg(self, x: int, _: Number | None) -> int | None:
        node = self._nodes[x]
        if node.name == "neg":
            return node.operands[0]
        if node.name == "sub":
            return self.add("sub", *reversed(node.operands))
        if node.name == "mul" and (factor := self.value(node.operands[1])) is not None:
            return self.add("mul", node.operands[0], self.constant(-factor))
        return self._within_branch(x, lambda branch: self.add("neg", branch))

    def _simplified_mul(self, x: int, y: int, _: Number | None, constant: Number | None) -> int | None:
        if constant is not None:
            if constant == 0 and self.differentiating:
                return y
            if constant == 1:
                return x
            if constant == -1:
                return self.add("neg", x)
            node = self._nodes[x]
            factor = self.value(node.operands[1]) if node.name == "mul" else None
            if factor is not None and _SMALLEST <= abs(factor * constant) <= _LARGEST:
                return self.add("mul", node.operands[0], self.constant(factor * constant))
            if node.name == "neg":
                return self.add("mul", node.operands[0], self.constant(-constant))
        for one, other in ((x, y), (y, x)):
            if constant is None and (negated := self._operand_of("neg", one)) is not None:
                return self.add("neg", self.add("mul", negated, other))
            chosen = self._within_branch(one, functools.partial(self.add, "mul", other))
            if chosen is not None:
                return chosen
        return None

    def _simplified_div(self, x: int, y: int, numerator: Number | None, constant: Number | None) -> int | None:
        if numerator == 0 and self.differentiating:
            return x
        if numerator == 1:
            return self.add("reciprocal", y)
        if _is_power_of_two(constant):
            return self.add("mul", x, self.constant(1 / constant))
        node = self._nodes[y]
        if node.name == "mul" and _is_power_of_two(factor := self.value(node.operands[1])):
            return self.add("mul", self.add("div", x, node.operands[0]), self.constant(1 / factor))
        if node.name == "sqrt":
            return self.add("mul", x, self.add("rsqrt", node.operands[0]))
        if (inverse := self._inverse_of_one_plus_exp(y)) is not None:
            return self.add("mul", x, inverse)
        return self._within_branch(x, lambda branch: self.add("div", branch, y))

    def _simplified_reciprocal(self, x: int, _: Number | None) -> int | None:
        inner = self._operand_of("sqrt", x)
        return self._inverse_of_one_plus_exp(x) if inner is None else self.add("rsqrt", inner)

    def _inverse_of_one_plus_exp(self, x: int) -> int | None:
        """In derivatives, such as logaddexp's, 1 / (exp(y) + 1) as sigmoid(-y), whose own derivatives are finite."""
        if self.differentiating and self._nodes[x].name == "add":
            term, constant = self._nodes[x].operands
            for name, rate in (("exp", 1.0), ("exp2", math.log(2))):
                if self.value(constant) == 1 and (exponent := self._operand_of(name, term)) is not None:
                    return self.add("sigmoid", self.add("mul", exponent, self.constant(-rate)))
        return None

    def _simplified_where(
        self, test: int, x: int, y: int, chosen: Number | None, _: Number | None, __: Number | None
    ) -> int | None:
        if chosen is not None:
            return x if chosen else y
        if x == y:
            return x
        if (opposite := self._operand_of("not", test)) is not None:
            return self.add("where", opposite, y, x)
        return None

    def _simplified_not(self, x: int, _: Number | None) -> int | None:
        return self._operand_of("not", x)

    def _simplified_pow(self, x: int, y: int, base: Number | None, exponent: Number | None) -> int | None:
        if base == 1:
            return x
        if base is not None and base > 0:
            fraction, power = math.frexp(base)
            if fraction == 0.5:  # a power of two, for which exp2 is exact if its argument is an integer
                return self.add("exp2", self.add("mul", y, self.constant(power - 1)))
            return self.add("exp", self.add("mul", y, self.constant(math.log(base))))
        if exponent in (0, 1):
            return x if exponent else self.constant(1.0)
        if exponent in (0.5, -0.5):
            return self.add("sqrt" if exponent > 0 else "rsqrt", x)
        if exponent in (-1, -2):
            return self.add("reciprocal", x if exponent == -1 else self.add("mul", x, x))
        if exponent in (2, 3, 4):
            square = self.add("mul", x, x)
            return square if exponent == 2 else self.add("mul", square, x if exponent == 3 else square)
        return None

    def _within_branch(self, x: int, change: Callable[[int], int]) -> int | None:
        """In derivatives, if x is a ``where`` with a zero branch, apply an operation to its other branch alone.

        ``change`` adds the operation, a negation, product or quotient, all of which leave zero as it is.
        """
        node = self._nodes[x]
        if node.name == "where" and self.differentiating:
            test, yes, no = node.operands
            if self.value(no) == 0:
                return self.add("where", test, change(yes), no)
            if self.value(yes) == 0:
                return self.add("where", test, yes, change(no))
        return None
