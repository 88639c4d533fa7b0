"""Contestants of an RNN, GRU or LSTM."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import ostinato
from ostinato.bench.peers.prepare import Build, captured, flashrnn_function, import_peer, need_cuda, over_time
from ostinato.bench.workloads import OURS, RECURRENT, RecurrentLayer, Run, Unavailable
from ostinato.kernels.persistent.plan import KernelPath

FROM_EQUATION = "Ostinato, from its equation"
PLANNED = "is what the plan chooses"  # why a kernel is not measured under its own name


def ours(path: KernelPath | None, work: RecurrentLayer, data: tuple[Tensor, ...]) -> Run:
    """Our layer in the kernel that its plan chooses, or in that of a given path."""
    layer = work.layer(data)
    options = {"resets": work.resets > 0, "packed": work.shortest > 0}
    make_plan = partial(layer.plan, work.batch, training=work.trained, steps=work.length, **options)
    plan = make_plan()
    if path is not None:
        need_cuda(data[0])
        if plan.path == path:
            raise Unavailable(PLANNED)
        layer._forced_path = path
        plan = make_plan()
        if plan.path != path:
            raise Unavailable(plan.reason)
    resets: dict[str, Any] = {"resets": work.resets_of(data)} if work.resets else {}
    names = "path", "bytes_on_chip", "bytes_available", "blocks", "at_once", "reason"
    shown = {name: getattr(plan, name) for name in names}
    return replace(work.run(partial(work.apply, layer, **resets), data, layer.parameters()), plan=shown)


def torch_layer(work: RecurrentLayer, data: tuple[Tensor, ...]) -> Run:
    """``torch.nn``'s layer; on NVIDIA GPUs this is cuDNN, with the batch padded if that enables its persistent kernels.

    These need float16, a multiple of 8 sequences, and an RNN or LSTM.  Pruned layers run as dense ones with zeros.
    Sequences with resets are split into episodes at every call, as resets differ between batches.
    """
    layer = work.torch_layer(data, work.dtype)
    persistent = data[0].is_cuda and work.dtype is torch.float16 and work.cell != "GRU" and work.is_plain
    missing = -work.batch % 8 if persistent and work.hidden <= 1024 and work.hidden % 128 == 0 else 0
    if not missing:
        return work.run(partial(work.apply_torch, layer, data), data, layer.parameters())

    def padded(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        results = work.apply(layer, *(F.pad(tensor, (0, 0, 0, missing)) for tensor in (x, *states)))
        return tuple(result[:, : work.batch] for result in results)

    return replace(work.run(padded, data, layer.parameters()), plan={"padded_batch": work.batch + missing})


def loop_of_steps(sparse: bool, work: RecurrentLayer, data: tuple[Tensor, ...]) -> Run:
    """A loop over time of a matrix product and PyTorch's fused gates, in a CUDA graph unless the product is sparse."""
    x, first = data[0], [state[0] for state in data[1 : 1 + work.states]]
    need_cuda(x)
    if work.trained or not work.is_plain:
        raise Unavailable("written for one layer and direction, without gradient")
    if sparse and work.density == 1:
        raise Unavailable("the layer is dense")
    weight_ih, weight, bias_ih, bias_hh = (work.state_dict(data)[name] for name in work.names[:4])
    transposed = weight.t()
    if sparse:
        csr = weight.to_sparse_csr()  # with 4-byte indices, the faster ones
        weight = torch.sparse_csr_tensor(csr.crow_indices().int(), csr.col_indices().int(), csr.values(), csr.shape)

    def multiply(h: Tensor) -> Tensor:
        return (weight @ h.t()).t().contiguous() if sparse else h @ transposed

    def gru(step: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        h, _ = torch.ops.aten._thnn_fused_gru_cell(step, multiply(state[0]), state[0], bias_ih, bias_hh)
        return h, [h]

    def lstm(step: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        h, c, _ = torch.ops.aten._thnn_fused_lstm_cell(step, multiply(state[0]), state[1], bias_ih, bias_hh)
        return h, [h, c]

    def steps() -> Tensor:
        if work.cell != "RNN":
            return over_time(gru if work.cell == "GRU" else lstm, F.linear(x, weight_ih), first)
        steps, h = F.linear(x, weight_ih, bias_ih + bias_hh), first[0]
        for step in steps:  # in place: each becomes the state after it
            h = torch.tanh_(step.add_(multiply(h)) if sparse else step.addmm_(h, transposed))
        return steps

    if sparse:  # not captured: a second capture in a process makes cuSPARSE read freed memory
        return Run(torch.no_grad()(steps))
    return Run(captured(torch.no_grad()(steps)))


def torchrl(work: RecurrentLayer, data: tuple[Tensor, ...]) -> Run:
    """torchrl's Triton functions, which support resets: (B, T, H), with an initial state for every step."""
    need_cuda(data[0])
    functions = import_peer("torchrl.modules.tensordict_module._rnn_triton", "torchrl")
    plain = replace(work, resets=0.0).is_plain and work.trained
    if work.cell == "RNN" or not plain or work.dtype is not torch.float32:
        raise Unavailable("has GRU and LSTM of one layer and direction, not packed, trained in float32")
    function = {"GRU": functions.gru_triton, "LSTM": functions.lstm_triton}[work.cell]
    weights = tuple(work.torch_layer(data, work.dtype).parameters())
    resets = work.resets_of(data)
    begins = torch.zeros_like(data[0][..., 0], dtype=torch.bool) if resets is None else resets
    begins, precision = begins.t().contiguous(), "tf32" if work.tf32 else "ieee"

    def call(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        first = [F.pad(state[0][:, None], (0, 0, 0, work.length - 1)) for state in states]
        if resets is not None:  # a reset at the first step discards the initial state, too
            first = [state.where(~begins[..., None], 0.0) for state in first]
        results = function(x.transpose(0, 1), *first, *weights, begins, input_precision=precision)
        return results[0].transpose(0, 1), *(state[None] for state in results[-len(states) :])

    return work.run(call, data, weights)


def flashrnn(work: RecurrentLayer, data: tuple[Tensor, ...]) -> Run:
    """FlashRNN's persistent kernel; or, for a GRU, which that does not support, its loop of a product and the gates.

    For the persistent kernel, the input's product has the gates of each unit adjacent in memory.
    """
    need_cuda(data[0])
    if not (work.trained and work.is_plain and work.density == 1):
        raise Unavailable("measured for one dense layer and direction, not packed, without resets, trained")
    persistent, gates, hidden = work.cell != "GRU", work.gates, work.hidden
    cell, backend = "elman" if work.cell == "RNN" else work.cell.lower(), "cuda_fused" if persistent else "cuda"
    function = flashrnn_function(work, data[0].device, cell, hidden, backend=backend)
    weights = tuple(work.torch_layer(data, work.dtype).parameters())

    def call(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        weight_ih, weight_hh, bias_ih, bias_hh = (weight.unflatten(0, (gates, hidden)) for weight in weights)
        if persistent:
            steps = F.linear(x, weight_ih.transpose(0, 1).flatten(0, 1)).unflatten(-1, (hidden, gates)).mT
            bias = bias_ih + bias_hh
        else:  # its order is candidate, reset, update in weight_hh, and reset, update, candidate in the input's product
            steps = F.linear(x, weights[0]).unflatten(-1, (gates, hidden))
            weight_hh = weight_hh[[2, 0, 1]]
            bias = torch.cat((bias_hh[2:], (bias_ih + bias_hh)[:2], bias_ih[2:]))
        first = torch.stack(states).unsqueeze(3)
        output, last = function(steps.unsqueeze(3), weight_hh.unsqueeze(1), bias.unsqueeze(1), first)
        return output[0].squeeze(2), *last.squeeze(3)

    return work.run(call, data, weights)


@ostinato.recurrence
def rnn(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x)


@ostinato.recurrence
def gru(h: Tensor, r: Tensor, z: Tensor, n_h: Tensor, n_x: Tensor) -> Tensor:
    z = torch.sigmoid(z)
    return (1 - z) * torch.tanh(n_x + torch.sigmoid(r) * n_h) + z * h


@ostinato.recurrence
def lstm(state: tuple[Tensor, Tensor], i: Tensor, f: Tensor, g: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
    _, c = state
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


RECURRENCES = {"RNN": rnn, "GRU": gru, "LSTM": lstm}


def from_equation(backend: str, work: RecurrentLayer, data: tuple[Tensor, ...]) -> Run:
    """The layer's equation as a user would write it, in generated kernels or, with the backend "torch", in a loop."""
    if not (work.is_plain and work.density == 1):
        raise Unavailable("written for one dense layer and direction, not packed, without resets")
    recurrence, hidden = RECURRENCES[work.cell], work.hidden
    weights = tuple(work.torch_layer(data, work.dtype).parameters())

    def call(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        weight_ih, weight_hh, bias_ih, bias_hh = weights
        added = F.pad(bias_hh[: 2 * hidden], (0, hidden)) if work.cell == "GRU" else bias_hh
        arguments = F.linear(x, weight_ih, bias_ih + added).transpose(0, 1).chunk(work.gates, -1)
        if work.cell == "GRU":
            arguments = *arguments[:2], bias_hh[2 * hidden :], arguments[2]
        first: Any = tuple(state[0] for state in states) if work.cell == "LSTM" else states[0][0]
        output, last = recurrence(*arguments, weight_hh=weight_hh, h0=first, backend=backend)
        if work.cell != "LSTM":
            output, last = (output,), (last,)
        return output[0].transpose(0, 1), *(state[None] for state in last)

    return work.run(call, data, weights)


def in_a_graph(build: Build, work: RecurrentLayer, data: tuple[Tensor, ...]) -> Run:
    """Another contestant, with its pass captured in a CUDA graph."""
    need_cuda(data[0])
    run = build(work, data)
    if run.gradients is None:
        return replace(run, call=captured(torch.no_grad()(run.call)))
    return replace(run, gradients=captured(run.gradients))


EVERYONE: dict[str, Build] = {
    OURS: partial(ours, None),
    "Ostinato in a CUDA graph": partial(in_a_graph, partial(ours, None)),
    "torch.nn": torch_layer,
    "torch.nn in a CUDA graph": partial(in_a_graph, torch_layer),
    "GEMMs in a CUDA graph": partial(loop_of_steps, False),
    "cuSPARSE": partial(loop_of_steps, True),
    "torchrl": torchrl,
    "flashrnn": flashrnn,
    FROM_EQUATION: partial(from_equation, "auto"),
    f"{FROM_EQUATION}, in a CUDA graph": partial(in_a_graph, partial(from_equation, "auto")),
    "its equation in a loop": partial(from_equation, "torch"),
    "its equation in a loop in a CUDA graph": partial(in_a_graph, partial(from_equation, "torch")),
    "Ostinato, dense kernel": partial(ours, "dense"),
    "Ostinato, sparse kernel": partial(ours, "sparse"),
    "Ostinato, block kernel": partial(ours, "block"),
}
CONTESTANTS = dict.fromkeys(RECURRENT, EVERYONE)
