"""Persistent kernels of RNN, GRU and LSTM: recurrent weights stay on chip, or in cache, for the whole sequence.

Those of GPUs also run recurrences of the user's own with recurrent weights, ``recurrence/weighted/``.

In the order of their imports:

=================  ====================================================================================
``sequences.py``   which rows of a layer's tensors are which steps of which sequences
``plan.py``        what is asked of the kernels of a device, and what they answer
``arguments.py``   what such a layer is: the operator's arguments, and what kernels are given of them
``interface.py``   what a device's package, ``cpu`` or ``cuda``, must provide, as types
``defaults.py``    what is provided in place of what a device does not have
``reference.py``   one layer and direction as a loop over time, which defines the kernels
``masks.py``       the blocks of a pruned matrix
``cpu/``           the kernels of CPUs
``cuda/``          those of NVIDIA GPUs
``backends.py``    the kernels of a device, and how a layer runs there
``modes.py``       function transforms, counters and autocast around a layer's calls
``results.py``     the results of the operator: which there are, of which shapes
``executor.py``    who computes a layer, and its forward
``backward.py``    its backward: through time, then the gradients of all inputs
``plain.py``       the layer in PyTorch's own operators, for exported programs
``operators.py``   the layer as a differentiable operator
``directions.py``  both directions of a layer, beside each other
``wavefront.py``   stacked layers at the same time, each a chunk of the steps behind the one below
``stacks.py``      stacked layers: wavefronts of them, one after the other
=================  ====================================================================================
"""
