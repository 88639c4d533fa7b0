r"""An LSTM with projections, computed as one without.

With :math:`m_t = o_t \odot \tanh(c_t)` and :math:`h_t = W_{hr} m_t`, the gates add
:math:`W_{hh} h_{t-1} = (W_{hh} W_{hr}) m_{t-1}`.  So m is the hidden state of an LSTM whose recurrent weights are that
product, and all h follow from all m in one product after the loop.
"""

from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.matmul.gemm import linear
from ostinato.kernels.persistent.arguments import Arguments
from ostinato.kernels.persistent.reference import previous


def without_projection(call: Arguments, weight_hr: Tensor) -> Arguments:
    """The operator's arguments for m, from those of a layer and direction whose h is projected by ``weight_hr``."""
    x, weight_ih, weight_hh, h0 = call.x, call.weight_ih, call.weight_hh, call.h0
    if h0 is not None:  # no m need project to it, so the first step has it as further inputs, and the others zeros
        first = previous(x.new_zeros(len(x), h0.shape[1]), h0, call.sequences)
        x, weight_ih = torch.cat([x, first], 1), torch.cat([weight_ih, weight_hh], 1)
    return call._replace(x=x, weight_ih=weight_ih, weight_hh=linear(weight_hh, weight_hr.T), h0=None)


def project(results: Any, weight_hr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output, h_n and c_n of the layer with projections, from the operator's results for m."""
    output, last, c_n, *_ = results
    return linear(output, weight_hr), linear(last, weight_hr), c_n
