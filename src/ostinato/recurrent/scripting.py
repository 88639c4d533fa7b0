"""What ``torch.jit.script`` compiles of RNN, GRU and LSTM: calls of ``torch.nn``'s kernels, which need no library.

TorchScript supports neither a method of two argument types nor calls of another class's forward.  So the forward of a
tensor and that of a PackedSequence are two methods here, in its subset of Python, which Python itself never calls.
"""

import operator
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ostinato.kernels.operators.export import refuse_script
from ostinato.masks import mask_of
from ostinato.recurrent.weights import MaskedLayers, unmasked_weights

_VF: Any = torch._VF  # the annotations of torch._VF reject a module's list of weights


class _Scripted:
    """A method that only ``torch.jit.script`` sees, not ``torch.jit.trace``, on layers that it has prepared."""

    def __init__(self, method: Callable) -> None:
        self._method = torch.jit.export(method)

    def __get__(self, layer: Any, kind: type | None = None) -> Any:
        if layer is None:
            return self._method
        if not vars(layer).get("__overloads__") or sys._getframe(1).f_code.co_name == "module_has_exports":
            raise AttributeError(self._method.__name__)
        return MethodType(self._method, layer)


class ScriptedLayers(MaskedLayers):
    """Adds what ``torch.jit.script`` asks of a layer before it compiles the code."""

    __jit_unused_properties__ = [*nn.RNNBase.__jit_unused_properties__, "qconfig"]  # noqa: RUF012, as is torch.nn's

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the layer itself, as the returned module takes its place in the model.

        The scripted layer takes over the list of weights, but has no masks, so pruned weights that are not zero yet are
        zeroed.  A subclass's forward is compiled as it is.
        """
        forward: Any = self.forward
        is_own = getattr(forward, "__func__", None) is getattr(self._own_forward, "__func__", forward)
        names, weights = self._flat_weights_names, unmasked_weights(self)
        if not all(map(operator.is_, weights, map(self._parameters.get, names))):
            refuse_script(self, "with weights that are no parameters, but computed or put in their place")
        if is_own and (self._forward_hooks or self._forward_pre_hooks):
            refuse_script(self, "with hooks of its forward, nor torch.nn's")
        if not is_own and "super" in getattr(getattr(forward, "__code__", None), "co_names", ()):
            refuse_script(self, "with a forward that calls super(), which TorchScript lacks")
        if not all(map(operator.is_, weights, self._flat_weights)):
            self._init_flat_weights()
        for name, weight in zip(names, weights, strict=True):
            mask = mask_of(self, name)
            if mask is not None and weight[~mask].any():
                weight.detach().masked_fill_(~mask, 0.0)
        self.__overloads__ = {"forward": ["_scripted_of_tensor", "_scripted_of_packed"]} if is_own else {}
        return self


class OneState(nn.RNNBase):
    """Adds the scripted forward of layers with one state."""

    def _scripted_call(
        self, x: Tensor, batch: int, batch_sizes: Tensor | None, hx: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weights, bias, layers, bidirectional = self._flat_weights, self.bias, self.num_layers, self.bidirectional
        dropout, training, batch_first = self.dropout, self.training, self.batch_first
        h = x.new_zeros([layers * (2 if bidirectional else 1), batch, self.hidden_size]) if hx is None else hx
        self.check_forward_args(x, h, batch_sizes)
        if self.mode == "GRU":
            if batch_sizes is None:
                return _VF.gru(x, h, weights, bias, layers, dropout, training, bidirectional, batch_first)
            return _VF.gru(x, batch_sizes, h, weights, bias, layers, dropout, training, bidirectional)
        if self.mode == "RNN_TANH":
            if batch_sizes is None:
                return _VF.rnn_tanh(x, h, weights, bias, layers, dropout, training, bidirectional, batch_first)
            return _VF.rnn_tanh(x, batch_sizes, h, weights, bias, layers, dropout, training, bidirectional)
        if batch_sizes is None:
            return _VF.rnn_relu(x, h, weights, bias, layers, dropout, training, bidirectional, batch_first)
        return _VF.rnn_relu(x, batch_sizes, h, weights, bias, layers, dropout, training, bidirectional)

    @_Scripted
    def _scripted_of_tensor(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        batch_dim = 0 if self.batch_first else 1
        if input.dim() != 2:
            return self._scripted_call(input, input.size(batch_dim), None, hx)
        y, h = self._scripted_call(input.unsqueeze(batch_dim), 1, None, None if hx is None else hx.unsqueeze(1))
        return y.squeeze(batch_dim), h.squeeze(1)

    @_Scripted
    def _scripted_of_packed(self, input: PackedSequence, hx: Tensor | None = None) -> tuple[PackedSequence, Tensor]:
        x, batch_sizes, order, inverse = input
        if hx is not None and order is not None:
            hx = hx.index_select(1, order)
        y, h = self._scripted_call(x, int(batch_sizes[0]), batch_sizes, hx)
        return PackedSequence(y, batch_sizes, order, inverse), h if inverse is None else h.index_select(1, inverse)


class TwoStates(nn.LSTM):
    """Adds the scripted forward of layers with two states."""

    def _scripted_call(
        self, x: Tensor, batch: int, batch_sizes: Tensor | None, hx: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights, bias, layers, bidirectional = self._flat_weights, self.bias, self.num_layers, self.bidirectional
        dropout, training, batch_first = self.dropout, self.training, self.batch_first
        if hx is None:
            directions, size = 2 if bidirectional else 1, self.proj_size if self.proj_size > 0 else self.hidden_size
            h = x.new_zeros([layers * directions, batch, size])
            hx = (h, x.new_zeros([layers * directions, batch, self.hidden_size]))
        self.check_forward_args(x, hx, batch_sizes)
        if batch_sizes is None:
            return _VF.lstm(x, hx, weights, bias, layers, dropout, training, bidirectional, batch_first)
        return _VF.lstm(x, batch_sizes, hx, weights, bias, layers, dropout, training, bidirectional)

    @_Scripted
    def _scripted_of_tensor(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch_dim = 0 if self.batch_first else 1
        if input.dim() != 2:
            y, h, c = self._scripted_call(input, input.size(batch_dim), None, hx)
            return y, (h, c)
        if hx is not None:
            hx = (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
        y, h, c = self._scripted_call(input.unsqueeze(batch_dim), 1, None, hx)
        return y.squeeze(batch_dim), (h.squeeze(1), c.squeeze(1))

    @_Scripted
    def _scripted_of_packed(
        self, input: PackedSequence, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[PackedSequence, tuple[Tensor, Tensor]]:
        x, batch_sizes, order, inverse = input
        if hx is not None and order is not None:
            hx = (hx[0].index_select(1, order), hx[1].index_select(1, order))
        y, h, c = self._scripted_call(x, int(batch_sizes[0]), batch_sizes, hx)
        after = (h, c) if inverse is None else (h.index_select(1, inverse), c.index_select(1, inverse))
        return PackedSequence(y, batch_sizes, order, inverse), after
