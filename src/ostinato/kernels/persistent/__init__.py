"""Persistent kernels of RNN, GRU and LSTM: recurrent weights stay on chip, or in cache, for the whole sequence.

=================  ====================================================================================
``reference.py``   one layer and direction as a loop over time, which defines the kernels
``sequences.py``   which rows of a layer's tensors are which steps of which sequences
``plan.py``        what is asked of the kernels of a device, and what they answer
``backends.py``    the kernels of a device, and how a layer runs there
``arguments.py``   what such a layer is: the operator's arguments, and what kernels are given of them
``operators.py``   the layer as a differentiable operator
``directions.py``  both directions of a layer, beside each other
``wavefront.py``   stacked layers, each a portion of the steps behind the one below
``modes.py``       function transforms, counters and autocast around its calls
``plain.py``       the same for exported programs
``masks.py``       the blocks of a pruned matrix
``cuda/``          the kernels of NVIDIA GPUs
``cpu/``           those of CPUs
=================  ====================================================================================

A device's package, ``cpu`` or ``cuda``, provides

- ``make_plan(call, mask_hh, block, tf32)``: the :class:`~ostinato.kernels.persistent.plan.Plan` of a call, given the
  mask of its recurrent weights, if any, the shape of the mask's blocks, and whether products may round to tf32;
- ``forward``, ``backward``, ``gradients_of_biases`` and ``previous``: those of ``reference.py``, the first two for a
  plan;
- ``keeps_gates(cell)``: whether ``forward`` leaves the gates' pre-activations for ``backward``;
- ``step_of(cell, dtype, hidden_size, input_size, batch, mask_ih, mask_hh, path)``: one step of a layer, without
  gradients, or None where no kernel is faster than torch's; and ``StepOfLayers(steps, x, state_shape, states)``, those
  of a stack, called with an input, its states and all weights in torch.nn's order, for the output and the next states;
- where layers can run at the same time, ``layers_at_once`` and ``portions``: how many of a stack do, and in how many
  portions of the steps; ``forward`` and ``backward`` then write into given parts of tensors;
- where it has it, ``small``: what computes the products of small layers together, in place of ``gemm.py``;
- where it has them, ``least_steps``, ``most_single_steps``, ``FrozenStep`` and ``gradients_of_step``: see
  ``backends.py``.
"""
