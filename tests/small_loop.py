"""A loop that compiles in a moment: a factor that is part of it, times what a function of another file returns."""

import numpy as np

from ostinato.kernels.cpu.compiler import compiled_loop, inline
from ostinato.kernels.cpu.elementary import sigmoids
from ostinato.kernels.cpu.intrinsics import structure_at

_WORK = np.dtype([("x", np.float64), ("y", np.float64)])


@inline
def half(x):
    return sigmoids(x)[0]


def result(factor, half=half):
    """Half the factor, by a loop that is compiled or loaded at each call."""

    def loop(address):
        work = structure_at(address, _WORK)
        work.y = factor * half(work.x)

    work = np.zeros(1, _WORK)
    compiled_loop(loop).ctypes(work.ctypes.data)
    return work["y"].item()
