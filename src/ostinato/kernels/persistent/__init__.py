"""Persistent kernels of RNN, GRU and LSTM: recurrent weights stay on chip, or in cache, for the whole sequence.

The GPU's kernels also run user-defined recurrences with recurrent weights, ``recurrence/weighted/``.

In the order of their imports:

=================  ====================================================================================
``sequences.py``   which rows of a layer's tensors are which steps of which sequences
``plan.py``        a call of a layer, and the plan by which the kernels of a device run it
``arguments.py``   the arguments of the operator and of the kernels, and what they save
``interface.py``   what a device's package, ``cpu`` or ``cuda``, must provide, as types
``defaults.py``    substitutes for what a device does not provide
``reference.py``   one layer and direction as a loop over time: the specification of the kernels
``masks.py``       the block structure of a pruned matrix
``cpu/``           the kernels for CPUs
``cuda/``          the kernels for NVIDIA GPUs
``backends.py``    the choice of a device's kernels, and cached plans
``modes.py``       function transforms, FLOP counters and autocast around a layer's calls
``results.py``     the shapes and dtypes of the operator's results
``executor.py``    the forward pass of a layer, by the kernels that its plan chooses
``backward.py``    the backward pass: through time, then the gradients of all inputs
``plain.py``       the layer in PyTorch's own operators, for exported programs
``operators.py``   the layer as a differentiable operator
``directions.py``  both directions of a layer at the same time
``wavefront.py``   stacked layers at the same time, each a chunk of steps behind the one below
``stacks.py``      stacked layers as successive wavefronts
=================  ====================================================================================
"""
