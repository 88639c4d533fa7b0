"""Contestants of a minGRU or minLSTM, of a ParaGRU or ParaLSTM, and of an SLSTM."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ostinato
from ostinato.bench.peers.prepare import (
    Build,
    flashrnn_function,
    import_peer,
    leaves,
    need_cuda,
    over_time,
    time_first,
)
from ostinato.bench.workloads import OURS, Layer, ParaLayer, Run, SLSTMLayer, Unavailable

TIME_LOOP, FROM_HOST = "Ostinato, time loop", "Ostinato, with the transfer"
CELL_LOOPS = {"mingru": "torch.nn.GRUCell, time loop", "minlstm": "torch.nn.LSTMCell, time loop"}


def ours(work: Layer, data: tuple[Tensor, ...]) -> Run:
    (x,), module = leaves(data[0]), _minimal_layer(work, data)
    return Run(lambda: module(x)[0], (x, *module.parameters()), has_bias=True)


def our_time_loop(work: Layer, data: tuple[Tensor, ...]) -> Run:
    """The same layer one time step at a time, as for decoding."""
    if work.length > 16384:
        raise Unavailable("left out above T = 16,384, where a call takes seconds")
    (x,), module = leaves(data[0]), _minimal_layer(work, data)
    return Run(lambda: over_time(module.step, x.unbind(1), None, 1), (x, *module.parameters()), has_bias=True)


def ours_from_host(work: Layer, data: tuple[Tensor, ...]) -> Run:
    """The same layer, with its input and output in the host's memory."""
    need_cuda(data[0])
    x, module = data[0].cpu(), _minimal_layer(work, data)
    return Run(lambda: module(x.to(data[0].device))[0].cpu(), has_bias=True)


def _minimal_layer(work: Layer, data: tuple[Tensor, ...]) -> Any:
    layer_type = {"mingru": ostinato.MinGRU, "minlstm": ostinato.MinLSTM}[work.cell]
    x, weight, bias = data
    module = layer_type(work.input_size, work.channels, batch_first=True, device=x.device, dtype=work.dtype)
    with torch.no_grad():
        module.get_parameter("weight_ih_l0").copy_(weight)
        module.get_parameter("bias_ih_l0").copy_(bias)
    return module


def min_rnn_pytorch(work: Layer, data: tuple[Tensor, ...], compiled: bool = False, autocast: bool = False) -> Run:
    """minGRU-pytorch, whose layers have no bias and compute in log space: in the dtype, or in float32 by autocast."""
    if autocast and work.dtype is torch.float32:
        raise Unavailable("autocast is to 16 bits")
    name = {"mingru": "minGRU", "minlstm": "minLSTM"}[work.cell]
    layer_type = getattr(import_peer(f"minGRU_pytorch.{name}", "minGRU-pytorch"), name)
    (x,) = leaves(data[0])
    module = layer_type(work.input_size, expansion_factor=work.channels / work.input_size, proj_out=False)
    module = module.to(x.device, torch.float32 if autocast else work.dtype)
    *gates, candidate = data[1].chunk(3 if work.cell == "minlstm" else 2)
    (weight,) = module.parameters()
    with torch.no_grad():
        weight.copy_(torch.cat((candidate, *gates)))
    if compiled:
        torch.compiler.reset()  # beyond a few shapes the compiler would silently fall back to eager mode
        module = torch.compile(module)

    def call() -> Tensor:
        with torch.autocast(x.device.type, work.dtype, enabled=autocast):
            return module(x)

    return Run(call, (x, weight))


def torch_recurrent(layer_type: type[nn.GRU] | type[nn.LSTM], work: Layer, data: tuple[Tensor, ...]) -> Run:
    """PyTorch's recurrent layer of the same size, time first for cuDNN: the usual choice, though another function."""
    if work.length > 65536:
        raise Unavailable("left out above T = 65,536, where a call takes seconds")
    (x,) = leaves(time_first(data[0]).contiguous())
    module = layer_type(work.input_size, work.channels, device=x.device, dtype=work.dtype)
    return Run(lambda: module(x)[0], (x, *module.parameters()), time_first, same_function=False)


def torch_cell_loop(cell_type: type[nn.GRUCell] | type[nn.LSTMCell], work: Layer, data: tuple[Tensor, ...]) -> Run:
    """PyTorch's cell in a loop over time, as one writes it where no fused layer applies."""
    (x,) = leaves(time_first(data[0]).contiguous())
    cell: Any = cell_type(work.input_size, work.channels, device=x.device, dtype=work.dtype)

    def step(x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        state = cell(x_t, state)
        return (state[0] if isinstance(state, tuple) else state), state

    inputs = (x, *cell.parameters())
    return Run(lambda: over_time(step, x.unbind(0), None), inputs, time_first, same_function=False)


def our_layer(work: ParaLayer | SLSTMLayer, data: tuple[Tensor, ...]) -> Run:
    (x,), layer = leaves(data[0]), work.layer(data)
    return Run(lambda: layer(x)[0], (x, *layer.parameters()), has_bias=True)


def pararnn(work: ParaLayer, data: tuple[Tensor, ...]) -> Run:
    """pararnn-torch's layer, which trains by Newton's method over time."""
    need_cuda(data[0])
    module = import_peer("pararnn", "pararnn-torch")
    x, weight, bias, *recurrent = data
    cell = getattr(module, work.cell)(work.input_size, work.channels, device=x.device)
    order = [0, 1, 2] if work.cell == "ParaGRU" else [0, 2, 1]  # its LSTM has the candidate before the output gate
    names = ("a_z", "a_r", "a_n") if work.cell == "ParaGRU" else ("a_f", "a_o", "a_z", "c_f", "c_o")
    with torch.no_grad():
        cell.W_x.weight.copy_(weight.unflatten(0, (3, -1))[order].flatten(0, 1))
        cell.W_x.bias.copy_(bias.unflatten(0, (3, -1))[order].flatten())
        for name, value in zip(names, recurrent, strict=True):
            getattr(cell, name).copy_(value)
    layer, (x,) = module.ParaRNN(cell).train(), leaves(x)
    return Run(lambda: layer(x), (x, *layer.parameters()), has_bias=True)


def slstm_loop(work: SLSTMLayer, data: tuple[Tensor, ...]) -> Run:
    """The same function in a loop over time in PyTorch."""
    (x,), layer = leaves(data[0]), work.layer(data)
    layer.backend = "torch"
    return Run(lambda: layer(x)[0], (x, *layer.parameters()), has_bias=True)


def flashrnn(work: SLSTMLayer, data: tuple[Tensor, ...]) -> Run:
    """FlashRNN's persistent kernel, which takes the gates of each unit adjacent in memory."""
    need_cuda(data[0])
    x, weight, bias, *recurrent = data
    units = work.channels // work.heads
    function = flashrnn_function(work, x.device, "slstm", units, work.heads)
    weight = weight.unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1)
    weight_hh = torch.stack(recurrent).unflatten(1, (4, -1)).transpose(0, 1).contiguous()
    inputs = leaves(time_first(x).contiguous(), weight, weight_hh, bias.view(4, work.heads, units))

    def call() -> Tensor:
        x, weight, weight_hh, bias = inputs
        gates = F.linear(x, weight).unflatten(-1, (work.heads, units, 4)).movedim(-1, 2)
        states, _ = function(gates, weight_hh, bias, None)
        return states[0].flatten(2)

    return Run(call, inputs, time_first, has_bias=True)


def minimal(cell: str, name: str, layer_type: Any, cell_type: Any) -> dict[str, Build]:
    """The contestants of minGRU or minLSTM."""
    return {
        OURS: ours,
        f"{name}-pytorch": min_rnn_pytorch,
        f"{name}-pytorch, autocast": partial(min_rnn_pytorch, autocast=True),
        f"{name}-pytorch, compiled": partial(min_rnn_pytorch, compiled=True),
        f"{name}-pytorch, compiled, autocast": partial(min_rnn_pytorch, compiled=True, autocast=True),
        f"torch.nn.{layer_type.__name__}": partial(torch_recurrent, layer_type),
        TIME_LOOP: our_time_loop,
        FROM_HOST: ours_from_host,
        CELL_LOOPS[cell]: partial(torch_cell_loop, cell_type),
    }


CONTESTANTS: dict[str, dict[str, Build]] = {
    "mingru": minimal("mingru", "minGRU", nn.GRU, nn.GRUCell),
    "minlstm": minimal("minlstm", "minLSTM", nn.LSTM, nn.LSTMCell),
    "ParaGRU": {OURS: our_layer, "pararnn-torch": pararnn},
    "ParaLSTM": {OURS: our_layer, "pararnn-torch": pararnn},
    "SLSTM": {OURS: our_layer, "its equation in a loop": slstm_loop, "flashrnn": flashrnn},
}
