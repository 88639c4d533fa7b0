r"""Sequence parallelism: one sequence over several processes, each of which holds a contiguous shard of its steps.

A shard as a whole acts like one step: it takes the state that enters it to ``P * h + L``, where P is the product of
its coefficients and L its last state from zero.  So the processes all-gather (P, L), and each scans these for its
carry, the state that enters its shard, and for the last state of the sequence.

Gates forget.  If P underflows within the first steps of a shard,

    1. the shard is scanned from zero, so L is its last state, while the host waits to learn whether P underflows
    2. the processes exchange L, with P = 0
    3. the first steps are scanned again from the carry

and the exchange, with its host overhead, overlaps with the scan.  Otherwise P and L are computed first, the processes
exchange, and each scans its shard once.  Gradients take the same two paths in the opposite direction.

==================  ======================================================================
``scans.py``        scans and linear recurrences over a sharded sequence
``layers.py``       layers over a sharded sequence
``boundary.py``     the exchange between shards, forward and backward
``packed.py``       the same for packed sequences, only some of which cross a boundary
``steps.py``        what a kind of recurrence provides: the scan of a shard, its P and L
``kinds.py``        the kinds of recurrences
``collectives.py``  differentiable collectives
==================  ======================================================================
"""

from ostinato.distributed.layers import sequence_parallel
from ostinato.distributed.scans import linear_scan, log_linear_scan, run_recurrence

__all__ = ["linear_scan", "log_linear_scan", "run_recurrence", "sequence_parallel"]
