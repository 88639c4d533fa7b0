"""Persistent kernels of RNN, GRU and LSTM: recurrent weights stay on chip, or in cache, for the whole sequence.

=================  ====================================================================================
``reference.py``   one layer and direction as a loop over time, which defines the kernels
``sequences.py``   which rows of a layer's tensors are which steps of which sequences
``plan.py``        what is asked of the kernels of a device, and what they answer
``interface.py``   what a device's package, ``cpu`` or ``cuda``, must provide, as types
``defaults.py``    what is provided in place of what a device does not have
``backends.py``    the kernels of a device, and how a layer runs there
``arguments.py``   what such a layer is: the operator's arguments, and what kernels are given of them
``results.py``     the results of the operator: which there are, of which shapes
``executor.py``    who computes a layer, and its forward
``backward.py``    its backward: through time, then the gradients of all inputs
``operators.py``   the layer as a differentiable operator
``directions.py``  both directions of a layer, beside each other
``stacks.py``      stacked layers: wavefronts of them, one after the other
``wavefront.py``   layers at the same time, each a chunk of the steps behind the one below
``modes.py``       function transforms, counters and autocast around its calls
``plain.py``       the same for exported programs
``masks.py``       the blocks of a pruned matrix
``cuda/``          the kernels of NVIDIA GPUs
``cpu/``           those of CPUs
=================  ====================================================================================
"""
