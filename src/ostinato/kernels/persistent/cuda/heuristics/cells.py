"""The cells: where their structs are, and the sizes by which geometries are chosen; see ``cell.cuh``."""

from typing import NamedTuple


class Cell(NamedTuple):
    """The cell of a persistent kernel, as its struct ``Cell`` has it, for one hidden unit.

    Attributes:
        name: a key of ``CELLS``, or "generated".
        products: rows of the recurrent matrix.
        inputs: numbers that are given at each step.
        parameters: numbers that are the same at each step.
        states: the number of states, h and those beside it, which no other unit reads.
        outputs: states that the layer returns for each step.
        derivatives: numbers of a step that are kept until the gradients of its states arrive.
        gradients: numbers that the backward computes at each step.
        files: of the struct, in ``cells/``.
        code: or the struct itself, if it is printed from a user's recurrence.
    """

    name: str
    products: int
    inputs: int
    parameters: int
    states: int
    outputs: int
    derivatives: int
    gradients: int
    files: tuple[str, ...] = ()
    code: str = ""

    @property
    def beside(self) -> int:
        """The number of states beside h, and at least 1: see ``BESIDE_H`` in ``layout.cuh``."""
        return max(1, self.states - 1)

    @property
    def is_generated(self) -> bool:
        """Whether the struct is printed."""
        return bool(self.code)

    def exchanged(self, backward: bool) -> int:
        """The most numbers of a unit that threads pass to each other where they share work.

        These are the operands and results of ``gather.cu``, the derivatives and gradients of ``scatter.cu``, with the
        flags of resets and of ended sequences.
        """
        if backward:
            return self.derivatives + self.outputs + 2 + self.gradients
        return self.inputs + 1 + self.inputs + 1 + self.beside

    def registers(self, backward: bool) -> int:
        """Registers for a unit of one sequence, beyond those that the estimates count for its products."""
        if not self.is_generated:
            return 0
        if not backward:
            return self.inputs - self.products + self.parameters + 2 * max(0, self.states - 2)
        kept = self.derivatives + 2 * self.inputs + 2 * self.parameters + 4 * self.states
        return max(0, kept - 6 * self.products)


_RNN = Cell("rnn", products=1, inputs=1, parameters=0, states=1, outputs=1, derivatives=1, gradients=1)
_GRU = Cell("gru", products=3, inputs=3, parameters=0, states=1, outputs=1, derivatives=5, gradients=4)
_LSTM = Cell("lstm", products=4, inputs=4, parameters=0, states=2, outputs=1, derivatives=6, gradients=4)
CELLS = {
    "rnn_tanh": _RNN._replace(name="rnn_tanh", files=("rnn_tanh.cuh", "rnn.cuh")),
    "rnn_relu": _RNN._replace(name="rnn_relu", files=("rnn_relu.cuh", "rnn.cuh")),
    "gru": _GRU._replace(files=("gru.cuh",)),
    "lstm": _LSTM._replace(files=("lstm.cuh",)),
}
