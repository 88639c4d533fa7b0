"""``torch.nn``'s own forward of RNN, GRU and LSTM with weights that are passed in, also episode by episode."""

import functools
import operator
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.backends.cudnn.rnn import get_cudnn_mode
from torch.nn.utils.rnn import PackedSequence

from ostinato.episodes import forward_by_episodes
from ostinato.kernels.operators.eager import is_differentiated, is_eager
from ostinato.kernels.persistent.modes import is_pushed_forward
from ostinato.recurrent.rows import from_rows, to_rows
from ostinato.states import hidden_of, states_of

_FUNCTIONS = {mode: getattr(torch._VF, mode.lower()) for mode in ("RNN_TANH", "RNN_RELU", "GRU", "LSTM")}


class TorchLayers(nn.RNNBase):
    """``torch.nn``'s forward with weights that are passed in, as the module's own list of them can be stale."""

    def _forward_torch(self, input: Any, hx: Any, weights: list[Tensor]) -> tuple[Any, Any]:
        """The forward itself, without torch's slow argument checks where a faster check passes.

        Otherwise it runs on a copy of the module, from which it reads the weights, or compiled, on the module itself.
        """
        module = self
        if not torch.compiler.is_compiling():
            if isinstance(input, PackedSequence) and is_pushed_forward():
                raise NotImplementedError(
                    f"torch.func.jvp cannot take a PackedSequence through {type(self).__name__}, nor resets, whose "
                    "episodes are packed; torch.autograd.forward_ad can"
                )
            if hx is not None:  # cuDNN takes contiguous ones only
                hx = hidden_of([*map(_contiguous, states_of(hx))])
            if self.mode == "LSTM":  # torch's LSTM reads its memory, and autograd's zero tensors have none
                input = _in_memory(input)
            if weights[0].is_cuda and not all(map(operator.is_, weights, self._flat_weights)):
                _silence_copy_warning()
            if not self.training and weights[0].is_cuda:
                x = input.data if isinstance(input, PackedSequence) else input
                if is_differentiated([x, *states_of(hx), *weights]):  # cuDNN has no backward in evaluation mode
                    module = _copied(self, training=True, dropout=0.0)
            if isinstance(input, Tensor) and _fits(self, input, hx, weights[0]):
                return module._call_torch(input, hx, weights)
            module = _copied(module, _flat_weights=weights, _update_flat_weights=_left_as_it_is)
            if self.mode == "LSTM" and isinstance(input, PackedSequence):
                _check_packed(module, input, hx)
        return super(TorchLayers, module).forward(input, hx)

    def _call_torch(self, input: Tensor, hx: Any, weights: list[Tensor]) -> tuple[Tensor, Any]:
        """Call torch's function for the layer, given batched tensors that have been checked."""
        lstm = self.mode == "LSTM"
        if hx is None:
            batch = input.shape[0 if self.batch_first else 1]
            zero = input.new_zeros(len(self._all_weights), batch, self.hidden_size)
            hx = (zero, zero) if lstm else zero
        settings = self.bias, self.num_layers, self.dropout, self.training, self.bidirectional, self.batch_first
        result = _FUNCTIONS[self.mode](input, hx, weights, *settings)
        return result[0], result[1:] if lstm else result[1]

    def _forward_torch_by_episodes(self, input: Any, hx: Any, weights: list[Tensor], resets: Tensor) -> tuple[Any, Any]:
        """The forward of each episode separately, as ``torch.nn`` does not support resets."""
        if resets.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a CUDA graph cannot capture this {type(self).__name__} with resets: torch's kernels run each episode "
                "apart, and where these begin is read on the host; call the layer outside of the graph, capture `step` "
                "with a state that you reset, or see in `plan` why no kernel takes it"
            )
        unbatched = isinstance(input, Tensor) and input.dim() == 2
        if isinstance(input, PackedSequence):
            batch_sizes = input.batch_sizes
        else:
            size = (input.shape[0], 1) if unbatched else input.shape[1::-1] if self.batch_first else input.shape[:2]
            batch_sizes = torch.full(size[:1], size[1], device="cpu")
        states = states_of(hx)
        lead = (len(self._all_weights), *(() if unbatched else (int(batch_sizes[0]),)))
        if any(state.shape != (*lead, size) for state, size in zip(states, state_sizes(self), strict=False)):
            return self._forward_torch(input, hx, weights)  # which raises the error

        def forward(packed: PackedSequence, states: list[Tensor]) -> tuple[Any, list[Tensor]]:
            output, last = self._forward_torch(packed, hidden_of(states), weights)
            return output, states_of(last)

        rows, states, resets_of_rows = to_rows(input, states, resets, self.batch_first)
        directions = 2 if self.bidirectional else 1
        episode_starts = cast(Tensor, resets_of_rows)
        output, last = forward_by_episodes(forward, rows, states, batch_sizes, episode_starts, directions)
        return from_rows(input, output, last, self.batch_first)

    def flatten_parameters(self) -> None:
        """Put the weights into one buffer for cuDNN; see :func:`flatten_weights`."""
        flatten_weights(self)


def _check_packed(layer: nn.RNNBase, input: PackedSequence, hx: Any) -> None:
    """Check what ``torch.nn.LSTM`` does not, so that its kernels do not read out of bounds."""
    if hx is None:
        layer.check_input(input.data, input.batch_sizes)
    else:
        layer.check_forward_args(input.data, hx, input.batch_sizes)


def _copied(layer: TorchLayers, **attributes: Any) -> TorchLayers:
    """A shallow copy of the module with some attributes replaced."""
    module = object.__new__(type(layer))
    module.__dict__.update(layer.__dict__, **attributes)
    return module


def takes_as_they_are(layer: nn.RNNBase, input: Tensor, states: list[Tensor], weights: list[Tensor]) -> bool:
    """Whether :meth:`_call_torch` takes these batched tensors, of the right sizes, and so all like them."""
    if layer.proj_size:
        return False
    if weights[0].is_cuda and not all(map(operator.is_, weights, layer._flat_weights)):  # cuDNN would copy them
        return False
    return is_eager([input, *states, *weights]) and all(state.is_contiguous() for state in states)


def _fits(layer: nn.RNNBase, input: Tensor, hx: Any, weight: Tensor) -> bool:
    """Whether the input and any states are batched, and of the layer's dtype and sizes."""
    shape = input.shape
    if input.dtype is not weight.dtype or layer.proj_size or len(shape) != 3 or shape[2] != layer.input_size:
        return False
    if hx is None:
        return True
    expected = len(layer._all_weights), shape[0 if layer.batch_first else 1], layer.hidden_size
    if layer.mode == "LSTM":
        return hx[0].shape == expected and hx[1].shape == expected
    return hx.shape == expected


def state_sizes(layer: nn.RNNBase) -> tuple[int, int]:
    """The sizes of h and of an LSTM's c."""
    return layer.proj_size or layer.hidden_size, layer.hidden_size


def flatten_weights(layer: nn.RNNBase) -> None:
    """``torch.nn``'s ``flatten_parameters``, for bfloat16 too: cuDNN copies separate weights at every call."""
    nn.RNNBase.flatten_parameters(layer)
    weights: list[Any] = layer._flat_weights
    if len(weights) != len(layer._flat_weights_names) or not all(_is_bfloat16_of_cudnn(weight) for weight in weights):
        return
    if len({weight.data_ptr() for weight in weights}) < len(weights):  # shared weights cannot be in several places
        return
    first = len(layer._all_weights[0]), layer.input_size, get_cudnn_mode(layer.mode), layer.hidden_size
    rest = layer.proj_size, layer.num_layers, layer.batch_first, bool(layer.bidirectional)
    with torch.cuda.device_of(weights[0]), torch.no_grad():
        torch._cudnn_rnn_flatten_weight(weights, *first, *rest)


def _is_bfloat16_of_cudnn(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.dtype is torch.bfloat16 and torch.cudnn_is_acceptable(weight)


def _left_as_it_is() -> None:
    """Replaces ``torch.nn``'s ``_update_flat_weights``, which would overwrite the list of a call's weights."""


@functools.cache
def _silence_copy_warning() -> None:
    """Masked weights are never one contiguous chunk, so cuDNN copies them at each call; torch would warn."""
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk of memory")


def _contiguous(state: Tensor) -> Tensor:
    # No other tensor is named `state`: ``torch.jit.trace`` numbers tensors of one name, but not the same way twice, and
    # then reports that its check has failed.
    return _in_memory(state).contiguous()


def _in_memory(x: Any) -> Any:
    """The tensor, copied if it is one of autograd's zero tensors, which have no memory."""
    return x.clone() if isinstance(x, Tensor) and x._is_zerotensor() else x


def check_hidden(name: str, hx: Any, lstm: bool) -> None:
    """Raise TypeError unless `hx` is None, a tensor or, for an LSTM, a pair of tensors."""
    if hx is None or (isinstance(hx, Tensor) and not lstm):
        return
    if not (lstm and isinstance(hx, (tuple, list)) and len(hx) == 2 and all(isinstance(x, Tensor) for x in hx)):
        kind = "a tuple of two tensors, h and c" if lstm else "a tensor"
        raise TypeError(f"{name} must be {kind}; got {_described(hx)}")


def _described(x: Any) -> str:
    if isinstance(x, (tuple, list)):
        return f"a {type(x).__name__} of {', '.join(type(part).__name__ for part in x) or 'nothing'}"
    return type(x).__name__
