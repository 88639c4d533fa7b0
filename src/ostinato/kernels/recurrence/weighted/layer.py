"""What those who compute a recurrence with recurrent weights are given."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ostinato.kernels.persistent.sequences import Sequences
from ostinato.kernels.recurrence.symbolic.trace import Trace


class Layer(NamedTuple):
    """A recurrence over rows, but for the rows, (rows, N * D): its N arguments that are sequences, side by side.

    Attributes:
        trace: the function's, whose first arguments are sequences.
        weight_hh: (G * D, D), whose products with the state before a step are added to the first G arguments.
        parameters: the arguments per channel, (P, D).
        initial: the states before the first steps, (sequences, D); None for zeros.
        sequences: of the rows.
    """

    trace: Trace
    weight_hh: Tensor
    parameters: Tensor
    initial: Sequence[Tensor] | None
    sequences: Sequences

    @property
    def width(self) -> int:
        """D, the channels of a state and of each argument."""
        return self.weight_hh.shape[1]

    @property
    def with_products(self) -> int:
        """G * D, the columns of the rows to which products are added: the first."""
        return self.weight_hh.shape[0]


class Executor(Protocol):
    """``stepwise.py``, and on a GPU ``persistent.py``."""

    def forward(self, layer: Layer, rows: Tensor, /) -> tuple[list[Tensor], list[Tensor]]:
        """The states after every step, (rows, D), and after the last, (sequences, D).

        ``rows`` are the arguments, without products.
        """

    def backward(
        self,
        layer: Layer,
        rows: Tensor,
        before: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        grads_last: Sequence[Tensor | None],
        /,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Gradients of the rows, of the parameters, (P, D), widened, and of the initial states.

        ``rows`` are the arguments with the products added, ``before`` the states before each step, (rows, D), and
        ``grads`` and ``grads_last`` the gradients of what the forward returned, None for zeros.
        """
