"""RNN, GRU and LSTM on the CPU, by loops that Numba compiles.

=====================  =======================================================
``plan.py``            by which loops a layer runs, or why torch's kernels run
``passes.py``          both passes of a layer, which call the loops over time
``loops.py``           the loops over time
``cells.py``           the update of one unit of one sequence, forward and backward
``products.py``        products of dense weights with states
``pruned.py``          products of pruned weights with states
``entries.py``         the sparse format in which these read pruned weights
``barrier.py``         the barrier between threads that share a layer's units
``step.py``            one step
``step_loop.py``       the loop of one step
``step_matrices.py``   the formats in which that loop reads weights
``step_gradients.py``  the gradients of one step
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
