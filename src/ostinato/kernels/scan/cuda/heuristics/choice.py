"""The choice of a scan's algorithm and the shape of its tiles, by rules in order of precedence.

Each rule in ``narrow.py``, ``streaming.py`` and ``chained.py`` returns a geometry where it applies, else None.
"""

import functools
from collections.abc import Callable

from ostinato.kernels.scan.cuda.heuristics.chained import (
    interleave,
    interleave_evenly,
    keep_in_step,
    look_back,
    look_back_in_pairs,
    look_back_unless_longest,
    staying,
)
from ostinato.kernels.scan.cuda.heuristics.criteria import FILLED, FULL, LINEAR, Criteria
from ostinato.kernels.scan.cuda.heuristics.geometry import Geometry
from ostinato.kernels.scan.cuda.heuristics.narrow import chain_narrow, narrow_leaves_processors_idle, stream_narrow
from ostinato.kernels.scan.cuda.heuristics.streaming import (
    stream,
    stream_alone,
    stream_few_steps,
    stream_halves,
    stream_in_clusters,
)


@functools.lru_cache(maxsize=4096)
def choose_geometry(scan: Criteria) -> Geometry:
    """Choose the algorithm and the shape of its tiles: the geometry of the first rule that applies.

    A streaming block scans the tiles of its chain serially, about a microsecond each, even if the GPU is otherwise
    idle; a chained tile takes three, but all blocks work in parallel.  So streaming is chosen where the chains fill
    the GPU, and where sequences are short.
    """
    special_cases = stream_narrow, stream_few_steps, stream_in_clusters, stream_alone, stream_halves
    streaming = _first(scan, *special_cases, stream)
    if not _leaves_processors_idle(scan, streaming):
        return keep_in_step(scan, streaming) or streaming
    looking_back = look_back_unless_longest, look_back_in_pairs, look_back
    return _first(scan, staying, chain_narrow, interleave_evenly, *looking_back, interleave)


def _first(scan: Criteria, *rules: Callable[[Criteria], Geometry | None]) -> Geometry:
    """The geometry of the first rule that applies; the last one always does."""
    return next(geometry for rule in rules if (geometry := rule(scan)))


def _leaves_processors_idle(scan: Criteria, streaming: Geometry) -> bool:
    """Whether there are too few chains for all multiprocessors, and they are long enough to be shared by blocks."""
    processors = scan.device.processors
    if streaming.cluster > 1:
        return False
    if streaming.narrow:
        return narrow_leaves_processors_idle(scan, streaming)
    few = scan.sequences * scan.channels < 32 * processors and scan.steps > 8 * streaming.tile
    if few and scan.element in LINEAR and chain_narrow(scan):
        return True
    least = (FILLED if streaming.warps == 8 else FULL if scan.itemsize == 4 else 1) * processors
    return scan.chains(streaming) < least and scan.steps > 4 * streaming.tile
