"""The contestants: Ostinato and its peers, one function each, which prepares a workload in its best configuration.

Each gets contiguous tensors in its own layout; transpositions are not timed.  One that cannot run here raises
:class:`Unavailable` with the reason; a failure is reported and does not stop the others.  There is a file for each
kind of workload; ``prepare`` has what several of them need.
"""

from ostinato.bench.peers import equation, layer, recurrent, scan
from ostinato.bench.peers.layer import CELL_LOOPS, FROM_HOST, TIME_LOOP
from ostinato.bench.peers.prepare import NOT_INSTALLED, Build
from ostinato.bench.peers.recurrent import PLANNED
from ostinato.bench.workloads import Workload

CONTESTANTS: dict[str, dict[str, Build]] = {
    **scan.CONTESTANTS,
    **equation.CONTESTANTS,
    **layer.CONTESTANTS,
    **recurrent.CONTESTANTS,
}
ON_REQUEST = {TIME_LOOP, FROM_HOST, *CELL_LOOPS.values(), *equation.LOOPS}  # only run where a workload names them

__all__ = [
    "contestants",
    "CONTESTANTS",
    "ON_REQUEST",
    "TIME_LOOP",
    "FROM_HOST",
    "CELL_LOOPS",
    "PLANNED",
    "NOT_INSTALLED",
    "Build",
]


def contestants(work: Workload) -> dict[str, Build]:
    """Return the contestants that the workload names, or all but those on request."""
    builds = CONTESTANTS[work.cell]
    names = work.who or [name for name in builds if name not in ON_REQUEST]
    return {name: builds[name] for name in names if name in builds}
