"""RNN, GRU and LSTM on NVIDIA GPUs, by kernels that NVRTC compiles.

Recurrences with recurrent weights, ``kernels/recurrence/weighted``, launch the kernels of both passes with other cells.

=====================  ============================================================================================
``plan.py``            the launch geometries of a layer's passes, or why torch's kernels run
``passes.py``          both passes: ``forward.cu`` and ``backward.cu``; with two groups in turn
                          ``forward_ping_pong.cu`` and ``backward_ping_pong.cu``, within clusters ``gather.cu`` and
                          ``scatter.cu``, for wide batches ``forward_wide.cu`` and ``backward_wide.cu``
``states_before.py``   the state before each step, by ``states_before.cu``
``biases.py``          the gradients of biases, by ``biases.cu``
``heuristics/``        estimates: the fastest division of a layer among thread blocks, and the time that cuDNN takes
``small.py``           the matrix products of small layers in one launch
``wavefront.py``       how many stacked layers run at once
``launch.py``          compiles and launches the kernels of a geometry
``source.py``          the CUDA files of a geometry's kernels, and their preprocessor definitions
``packing.py``         pruned weights in the order in which the kernels read them
``step.py``            one step, by ``step.cu``
=====================  ============================================================================================

``source.py`` combines the files above that loop over time with these:

=================  ===========================================================================================
``cell.cuh``       the interface of a cell; those of RNN, GRU and LSTM are in ``cells/``
``layout.cuh``     what all kernels share: parameters, and the units and sequences of a block and of a thread
``exchange.cuh``   the exchange between blocks; within a cluster, ``cluster.cuh`` and, for its sums, ``split.cuh``
``matrix.cuh``     a block's part of the matrix; ``weights.cuh``, where its tiles are kept
``dense.cuh``      the product with states, which ``operand.cuh`` loads; ``scatter.cuh``, the same within clusters
``block.cuh``      like ``sparse.cuh``, the product of a pruned matrix with states, which ``state.cuh`` loads
``mma.cuh``        the products of tiles on tensor cores
``prepare.cuh``    the kernel that runs before the loop over time
``ping_pong.cuh``  two groups in turn
``wide.cuh``       wide batches, with ``wide_product.cuh`` and ``wide_loops.cuh`` in place of all but the first three
=================  ===========================================================================================
"""

from ostinato.kernels.persistent.cuda import small
from ostinato.kernels.persistent.cuda.biases import gradients_of_biases
from ostinato.kernels.persistent.cuda.launch import check
from ostinato.kernels.persistent.cuda.passes import backward, backward_both, forward, forward_both
from ostinato.kernels.persistent.cuda.plan import least_steps, make_plan
from ostinato.kernels.persistent.cuda.states_before import previous
from ostinato.kernels.persistent.cuda.step import StepOfLayers, step_of
from ostinato.kernels.persistent.cuda.wavefront import chunks, layers_at_once
from ostinato.kernels.persistent.defaults import most_single_steps
from ostinato.kernels.persistent.plan import keeps_gates

__all__ = [
    "make_plan",
    "least_steps",
    "keeps_gates",
    "forward",
    "forward_both",
    "backward",
    "backward_both",
    "gradients_of_biases",
    "previous",
    "small",
    "most_single_steps",
    "step_of",
    "StepOfLayers",
    "check",
    "layers_at_once",
    "chunks",
]
