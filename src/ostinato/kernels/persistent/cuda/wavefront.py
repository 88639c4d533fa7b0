"""How stacked layers share an NVIDIA GPU: how many of them run at once, and in how many chunks of the steps."""

import functools
import math

from torch import Tensor

from ostinato.kernels.persistent.cuda.plan import plan_sizes, step_microseconds
from ostinato.kernels.persistent.plan import GATES, Call, Plan

MOST_CHUNKS, LEAST_STEPS = 16, 8  # of a call, and of a chunk
# Microseconds that a pass takes for a chunk beside its steps on an H200: fixed, and per megabyte of the weights of
# all layers at once, with which its input is multiplied.
PER_CHUNK, PER_MEGABYTE = 11.0, 1.0
# Microseconds of the host to launch a layer's chunk, without and with gradients: twice that of a quiet one,
# as what is gained if launches keep ahead is less than what is lost if they do not.
HOST = {False: 180.0, True: 600.0}
WORTH = 1.15  # times as fast, by these estimates, layers must be at once: sums are in another order then


def layers_at_once(call: Call, layers: int, mask_hh: Tensor | None, block: tuple[int, int] | None, tf32: bool) -> int:
    """How many of so many stacked layers are fastest at the same time, 1 if that is one after the other.

    ``call`` is that of one layer alone; all are as pruned as ``mask_hh``, in blocks of that shape.
    """

    def of_wavefront(size: int) -> float:
        together = call._replace(at_once=size)
        plan = plan_sizes(together, mask_hh, block, tf32)
        return _microseconds(together, plan, chunks(together, plan))

    def of_all(size: int) -> float:
        wavefronts, others = divmod(layers, size)
        return wavefronts * of_wavefront(size) + (of_wavefront(others) if others else 0.0)

    best = min(range(1, layers + 1), key=of_all)
    return best if WORTH * of_all(best) <= of_all(1) else 1


@functools.lru_cache(4096)  # calls that cannot be prepared for ask each time
def chunks(call: Call, plan: Plan) -> int:
    """In how many chunks of the steps layers, as many as ``call.at_once``, are fastest at once."""
    most = min(call.length // LEAST_STEPS, MOST_CHUNKS) if call.at_once > 1 else 1
    return min(range(1, max(most, 1) + 1), key=lambda count: _microseconds(call, plan, count))


def _microseconds(call: Call, plan: Plan, count: int) -> float:
    """The estimated time of all layers in so many chunks: the GPU's, or the host's if that is longer."""
    if not plan.has_kernel:
        return math.inf
    passes, layers = 1 + call.training, call.at_once
    megabytes = layers * GATES[call.cell] * call.hidden_size**2 * call.dtype.itemsize / 1e6
    chunk = call.length / count * step_microseconds(plan, call) + passes * (PER_CHUNK + PER_MEGABYTE * megabytes)
    host = 0.0 if call.captured else layers * count * HOST[call.training]
    return max((layers + count - 1) * chunk, host)
