"""RNN, GRU and LSTM on the CPU, by loops that Numba compiles.

=====================  =======================================================
``plan.py``            by which loops a layer runs, or why torch's kernels run
``passes.py``          both passes of a layer: the calls of the loops
``loops.py``           the loops over time
``cells.py``           one unit of one sequence, forward and backward
``products.py``        products of dense weights with states
``pruned.py``          those of pruned weights
``entries.py``         pruned weights in the order in which those read them
``barrier.py``         the barrier between threads that divide a layer's units
``step.py``            one step
``step_loop.py``       its loop
``step_matrices.py``   which weights that loop reads, and in which order
``step_gradients.py``  its gradients
=====================  =======================================================
"""

from ostinato.kernels.persistent.cpu.passes import backward, forward
from ostinato.kernels.persistent.cpu.plan import least_steps, make_plan, most_single_steps
from ostinato.kernels.persistent.cpu.step import FrozenStep, StepOfLayers, step_of
from ostinato.kernels.persistent.cpu.step_gradients import gradients_of_step
from ostinato.kernels.persistent.defaults import small
from ostinato.kernels.persistent.plan import keeps_gates
from ostinato.kernels.persistent.reference import gradients_of_biases, previous

__all__ = [
    "make_plan",
    "least_steps",
    "keeps_gates",
    "forward",
    "backward",
    "gradients_of_biases",
    "previous",
    "small",
    "most_single_steps",
    "step_of",
    "StepOfLayers",
    "FrozenStep",
    "gradients_of_step",
]
