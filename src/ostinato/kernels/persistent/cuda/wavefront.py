"""How stacked layers share an NVIDIA GPU: how many of them run at once, and into how many chunks steps are cut."""

import functools
import math

from torch import Tensor

from ostinato.kernels.persistent.cuda.plan import plan_sizes, step_microseconds
from ostinato.kernels.persistent.plan import GATES, Call, Plan

MOST_CHUNKS, LEAST_STEPS = 16, 8  # the most chunks of a call, the least steps of a chunk
# Microseconds that a pass takes for a chunk in addition to its steps on an H200: fixed, and per megabyte of the weights
# of all layers that run at once, by which the input is multiplied.
PER_CHUNK, PER_MEGABYTE = 11.0, 1.0
# Microseconds that the host takes to launch a layer's chunk, without and with gradients: twice those of an idle host,
# as launches that fall behind cost more than launches that keep ahead gain.
HOST = {False: 180.0, True: 600.0}
WORTH = 1.15  # the least estimated speedup for which layers run at once, as that changes the order of sums


def layers_at_once(call: Call, layers: int, mask_hh: Tensor | None, block: tuple[int, int] | None, tf32: bool) -> int:
    """The number of stacked layers, out of so many, that are fastest at the same time; 1 to run them one by one.

    ``call`` is that of a single layer; all are as pruned as ``mask_hh``, in blocks of that shape.
    """

    def wavefront_time(size: int) -> float:
        together = call._replace(at_once=size)
        plan = plan_sizes(together, mask_hh, block, tf32)
        return _microseconds(together, plan, chunks(together, plan))

    def total_time(size: int) -> float:
        wavefronts, others = divmod(layers, size)
        return wavefronts * wavefront_time(size) + (wavefront_time(others) if others else 0.0)

    best = min(range(1, layers + 1), key=total_time)
    return best if WORTH * total_time(best) <= total_time(1) else 1


@functools.lru_cache(4096)  # calls that cannot be prepared ask for it each time
def chunks(call: Call, plan: Plan) -> int:
    """The number of chunks of steps with which ``call.at_once`` layers are fastest at the same time."""
    most = min(call.length // LEAST_STEPS, MOST_CHUNKS) if call.at_once > 1 else 1
    return min(range(1, max(most, 1) + 1), key=lambda count: _microseconds(call, plan, count))


def _microseconds(call: Call, plan: Plan, count: int) -> float:
    """The estimated time of all layers with so many chunks: the GPU's, or the host's if that is longer."""
    if not plan.has_kernel:
        return math.inf
    passes, layers = 1 + call.training, call.at_once
    megabytes = layers * GATES[call.cell] * call.hidden_size**2 * call.dtype.itemsize / 1e6
    chunk = call.length / count * step_microseconds(plan, call) + passes * (PER_CHUNK + PER_MEGABYTE * megabytes)
    host = 0.0 if call.captured else layers * count * HOST[call.training]
    return max((layers + count - 1) * chunk, host)
