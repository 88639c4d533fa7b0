"""RNN, GRU and LSTM: torch.nn's layers, dense or pruned, run and trained by persistent kernels where these fit.

===================  ==========================================================
``layers.py``        the layers: their contract, and who computes a call
``sequences.py``     whole sequences by persistent kernels
``steps.py``         one step at a time
``scripting.py``     whole sequences in TorchScript
``cells.py``         one step by torch's cells, which have gradients
``gradients.py``     those of one step by a kernel
``rows.py``          sequences as rows, whatever their layout
``weights.py``       the parameters, as they are at a call, and their masks
``torch_layers.py``  ``torch.nn``'s own forward
``exported.py``      loops of PyTorch in exported programs, where no kernel is
``conversion.py``    layers of ``torch.nn`` that become this library's
===================  ==========================================================
"""

from ostinato.recurrent.conversion import convert
from ostinato.recurrent.layers import GRU, LSTM, RNN

__all__ = ["RNN", "GRU", "LSTM", "convert"]
