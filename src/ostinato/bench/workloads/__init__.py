"""The workloads: random inputs, minimal work, hardware limit, and float64 reference of what is computed.

=============  ===================================================================
``run``        what a contestant prepares for a workload
``scan``       scans, bound by the memory
``equation``   linear recurrences given by their equation, bound by the memory
``layer``      minGRU, minLSTM, ParaGRU, ParaLSTM and SLSTM, bound by a GEMM
``recurrent``  RNN, GRU and LSTM
=============  ===================================================================
"""

from ostinato.bench.workloads.equation import EQUATIONS, Equation
from ostinato.bench.workloads.layer import Layer, ParaLayer, SLSTMLayer
from ostinato.bench.workloads.recurrent import RECURRENT, RecurrentLayer, Training
from ostinato.bench.workloads.run import OURS, Run, Unavailable, name_of, short_name
from ostinato.bench.workloads.scan import Scan

Workload = Scan | Equation | Layer | RecurrentLayer  # and ParaLayer and SLSTMLayer, which are Layers

__all__ = [
    "Scan",
    "Equation",
    "EQUATIONS",
    "Layer",
    "ParaLayer",
    "SLSTMLayer",
    "RecurrentLayer",
    "RECURRENT",
    "Training",
    "Workload",
    "Run",
    "Unavailable",
    "OURS",
    "name_of",
    "short_name",
]
