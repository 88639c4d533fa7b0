"""Persistent kernels of RNN, GRU and LSTM: recurrent weights stay on chip, or in cache, for the whole sequence.

===================  ====================================================================================
``reference.py``     one layer and direction as a loop over time, which defines the kernels
``plan.py``          what is asked of the kernels of a device, and what they answer
``backends.py``      the kernels of a device, and how a layer runs there
``operators.py``     the layer as a differentiable operator
``plain.py``         the same for exported programs
``masks.py``         the blocks of a pruned matrix
``cuda.py``          NVIDIA GPUs: both passes, by ``forward.cu`` and ``backward.cu``; of two groups in turn by
                     ``forward_turns.cu`` and ``backward_turns.cu``, within clusters by ``gather.cu`` and ``scatter.cu``
``cuda_plan.py``     their geometries, or why torch's kernels run
``cuda_launch.py``   the kernels of a geometry: compiled and launched
``geometry.py``      how a layer is divided among blocks of threads
``costs.py``         the estimated time of a step
``search.py``        the fastest geometry that fits
``packing.py``       pruned weights in the order in which those kernels read them
``cuda_step.py``     one step, by ``step.cu``
``cpu/``             CPUs
===================  ====================================================================================

A device's module, ``cpu`` or ``cuda.py``, provides

- ``make_plan(call, mask_hh, block, tf32)``: the :class:`~ostinato.kernels.persistent.plan.Plan` of a call, given the
  mask of its recurrent weights, if any, the shape of the mask's blocks, and whether products may round to tf32;
- ``forward``, ``backward``, ``gradients_of_biases`` and ``previous``: those of ``reference.py``, the first two for a
  plan;
- ``keeps_gates(cell)``: whether ``forward`` leaves the gates' pre-activations for ``backward``;
- ``step_of(cell, dtype, hidden_size, input_size, batch, mask_ih, mask_hh, path)``: one step of a layer, without
  gradients, or None where no kernel is faster than torch's; and ``StepOfLayers(steps, x, state_shape, states)``, those
  of a stack, called with an input, its states and all weights in torch.nn's order, for the output and the next states.
"""
