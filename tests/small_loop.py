"""A loop that compiles quickly: a factor that is compiled in, times the result of a function of another file."""

import numpy as np

from ostinato.kernels.cpu.compiler import compiled_loop, inline
from ostinato.kernels.cpu.elementary import sigmoids
from ostinato.kernels.cpu.intrinsics import structure_at

_WORK = np.dtype([("x", np.float64), ("y", np.float64)])


@inline
def half(x):
    return sigmoids(x)[0]


def result(factor, half=half):
    """Return half the factor, by a loop that is compiled or loaded at each call."""

    def loop(address):
        work = structure_at(address, _WORK)
        work.y = factor * half(work.x)

    work = np.zeros(1, _WORK)
    compiled_loop(loop).ctypes(work.ctypes.data)
    return work["y"].item()
