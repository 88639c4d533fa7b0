"""RNN, GRU and LSTM: torch.nn's layers, dense or pruned, run and trained by persistent kernels where these fit.

===================  ===========================================================================
``layers.py``        the layers: ``torch.nn``'s interface, and the choice of what computes a call
``sequences.py``     whole sequences by persistent kernels
``projections.py``   LSTMs with projections, as ones without
``steps.py``         single steps
``scripting.py``     whole sequences in TorchScript
``cells.py``         single steps by torch's cells, which are differentiable
``gradients.py``     gradients of single steps by kernels
``rows.py``          sequences of any layout as time-major rows, and back
``weights.py``       the parameters and masks at the time of a call
``torch_layers.py``  ``torch.nn``'s own forward
``exported.py``      loops over time in exported programs, where no kernel applies
``conversion.py``    converts a model's layers from ``torch.nn`` to this library
===================  ===========================================================================
"""

from ostinato.recurrent.conversion import convert
from ostinato.recurrent.layers import GRU, LSTM, RNN

__all__ = ["RNN", "GRU", "LSTM", "convert"]
