"""MinGRU and MinLSTM, layers and cells: gates do not depend on the previous state, so a layer is a scan over time."""

from ostinato.minimal.cells import MinGRUCell, MinLSTMCell
from ostinato.minimal.highway import HighwayMinGRU
from ostinato.minimal.layers import MinGRU, MinLSTM

__all__ = ["MinGRU", "MinGRUCell", "MinLSTM", "MinLSTMCell", "HighwayMinGRU"]
