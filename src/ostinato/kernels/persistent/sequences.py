"""The layout of a layer's rows: which row is which step of which sequence, and the order of the steps."""

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor


class Sequences(NamedTuple):
    """The sequences of a layer and direction, in time-major rows: all sequences at the first step, then at the second.

    Attributes:
        batch: the number of sequences.
        offsets: int32, (T + 1,), of packed sequences, sorted by length: the first row of each step.  Sequence b at step
            t is row offsets[t] + b if that is below offsets[t + 1].  A sequence that is shorter keeps its state in the
            steps that it lacks, so in reverse it starts at its own last step with the initial state.  None if every
            sequence has all steps.
        resets: bool, (rows,), True where, in the order of the recurrence, the state before that row's step is zero and
            no gradient flows across; None for nowhere.
        reverse: whether the recurrence runs from the last step to the first.
    """

    batch: int
    offsets: Tensor | None = None
    resets: Tensor | None = None
    reverse: bool = False

    def length(self, rows: Tensor) -> int:
        """The number of steps of the longest sequence."""
        return len(rows) // self.batch if self.offsets is None else len(self.offsets) - 1

    def steps(self, rows: Tensor) -> list[slice]:
        """The rows of each step, in the order of the recurrence."""
        bounds = range(0, len(rows) + 1, self.batch) if self.offsets is None else self.offsets.tolist()
        steps = [slice(begin, end) for begin, end in pairwise(bounds)]
        return steps[::-1] if self.reverse else steps

    def parts(self, sizes: list[int]) -> list["Sequences"]:
        """The same sequences in parts of so many rows; only if all sequences have all steps, and parts whole steps."""
        if self.resets is None:
            return [self] * len(sizes)
        return [self._replace(resets=resets) for resets in self.resets.split(sizes)]
