"""The contestants: Ostinato and its peers, one function each, which prepares a workload in its best configuration.

Each gets contiguous tensors in its own layout; transpositions are not timed.  One that cannot run here raises
:class:`Unavailable` with the reason; a failure is reported and does not stop the others.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ostinato
from ostinato.bench.workloads import (
    EQUATIONS,
    OURS,
    RECURRENT,
    Equation,
    Layer,
    ParaLayer,
    Recurrence,
    Run,
    Scan,
    Unavailable,
    Workload,
)

Build = Callable[[Any, tuple[Tensor, ...]], Run]
UNROLLED = 256  # steps of a compiled loop
PLANNED = "is what the plan chooses"  # why a kernel is not measured under its own name


def contestants(work: Workload) -> dict[str, Build]:
    """The contestants that the workload names, or all but those on request."""
    everyone = CONTESTANTS[work.cell]
    names = work.who or [name for name in everyone if name not in ON_REQUEST]
    return {name: everyone[name] for name in names if name in everyone}


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Unavailable(f"{package} is not installed ({error})") from error


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in tensors)


def _compiled(function: Callable) -> Callable:
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # the backward pass is timed many times over one graph
    return torch.compile(function)


def _time_last(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _time_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def _over_time(
    step: Callable[[Any, Any], tuple[Tensor, Any]], inputs: Iterable[Any], state: Any, dim: int = 0
) -> Tensor:
    """The outputs of a loop of ``output, state = step(input, state)``."""
    outputs = []
    for x in inputs:
        output, state = step(x, state)
        outputs.append(output)
    return torch.stack(outputs, dim)


# Scans


def ostinato_scan(work: Scan, data: tuple[Tensor, ...]) -> Run:
    (a, b), resets, cu_seqlens = _leaves(*data[:2]), work.resets_of(data), work.cu_seqlens(data[0].device)
    return Run(lambda: ostinato.linear_scan(a, b, cu_seqlens=cu_seqlens, resets=resets)[0], (a, b))


def accelerated_scan(variant: str, work: Scan, data: tuple[Tensor, ...]) -> Run:
    """accelerated-scan: (B, C, T), contiguous."""
    _need_cuda(data[0])
    if variant == "warp" and (work.length & (work.length - 1) or not 32 <= work.length <= 65536):
        raise Unavailable("T must be a power of two from 32 to 65,536")
    if work.dtype is torch.bfloat16:  # the error would corrupt the CUDA context
        raise Unavailable("left out in bfloat16, where a run with it ended in an illegal memory access")
    scan = _import(f"accelerated_scan.{variant}", "accelerated-scan").scan
    a, b = _leaves(*(_time_last(x).contiguous() for x in data))
    return Run(lambda: scan(a, b), (a, b), _time_last)


def compiled_associative_scan(work: Scan, data: tuple[Tensor, ...]) -> Run:
    """PyTorch's own ``associative_scan``, compiled, along the last dimension."""
    if data[0].device.type != "cuda":
        raise Unavailable("compiles for CUDA only")
    associative_scan = _import("torch._higher_order_ops.associative_scan", "torch's prototype").associative_scan

    def compose(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    scan = _compiled(lambda a, b: associative_scan(compose, (a, b), dim=2, combine_mode="pointwise")[1])
    a, b = _leaves(*(_time_last(x).contiguous() for x in data))
    wrong = "its backward pass is left out: it is off by more than a tenth, and takes a minute to compile"
    return Run(lambda: scan(a, b), (a, b), _time_last, forward_only=wrong)


def time_loop(work: Scan, data: tuple[Tensor, ...]) -> Run:
    """One PyTorch operation a time step."""
    if work.length > 4096:
        raise Unavailable("left out above T = 4,096")
    a, b = _leaves(*(_time_first(x).contiguous() for x in data))

    def step(coefficients: tuple[Tensor, Tensor], h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.addcmul(coefficients[1], coefficients[0], h)
        return h, h

    loop = partial(_over_time, step)
    return Run(lambda: loop(zip(a.unbind(0), b.unbind(0), strict=True), torch.zeros_like(a[0])), (a, b), _time_first)


# Layers without a loop


def ostinato_layer(work: Layer, data: tuple[Tensor, ...]) -> Run:
    (x,), module = _leaves(data[0]), _minimal_layer(work, data)
    return Run(lambda: module(x)[0], (x, *module.parameters()), has_bias=True)


def ostinato_steps(work: Layer, data: tuple[Tensor, ...]) -> Run:
    """The same layer one time step at a time, as for decoding."""
    if work.length > 16384:
        raise Unavailable("left out above T = 16,384, where a call takes seconds")
    (x,), module = _leaves(data[0]), _minimal_layer(work, data)
    return Run(lambda: _over_time(module.step, x.unbind(1), None, 1), (x, *module.parameters()), has_bias=True)


def ostinato_from_host(work: Layer, data: tuple[Tensor, ...]) -> Run:
    """The same layer, its input and output in the host's memory."""
    _need_cuda(data[0])
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
    """minGRU-pytorch, whose layers have no bias and compute in log space: in the dtype, or in float32 with autocast."""
    if autocast and work.dtype is torch.float32:
        raise Unavailable("autocast is to 16 bits")
    name = {"mingru": "minGRU", "minlstm": "minLSTM"}[work.cell]
    layer_type = getattr(_import(f"minGRU_pytorch.{name}", "minGRU-pytorch"), name)
    (x,) = _leaves(data[0])
    module = layer_type(work.input_size, expansion_factor=work.channels / work.input_size, proj_out=False)
    module = module.to(x.device, torch.float32 if autocast else work.dtype)
    *gates, candidate = data[1].chunk(3 if work.cell == "minlstm" else 2)
    (weight,) = module.parameters()
    with torch.no_grad():
        weight.copy_(torch.cat((candidate, *gates)))
    if compiled:
        torch._dynamo.reset()  # beyond a few shapes the compiler would silently fall back to eager mode
        module = torch.compile(module)

    def call() -> Tensor:
        with torch.autocast(x.device.type, work.dtype, enabled=autocast):
            return module(x)

    return Run(call, (x, weight))


def torch_recurrent(layer_type: type[nn.GRU] | type[nn.LSTM], work: Layer, data: tuple[Tensor, ...]) -> Run:
    """PyTorch's recurrent layer of the same size, time first as cuDNN wants it: another function, the usual choice."""
    if work.length > 65536:
        raise Unavailable("left out above T = 65,536, where a call takes seconds")
    (x,) = _leaves(_time_first(data[0]).contiguous())
    module = layer_type(work.input_size, work.channels, device=x.device, dtype=work.dtype)
    return Run(lambda: module(x)[0], (x, *module.parameters()), _time_first, same_function=False)


def torch_cell_loop(cell_type: type[nn.GRUCell] | type[nn.LSTMCell], work: Layer, data: tuple[Tensor, ...]) -> Run:
    """PyTorch's cell in a loop over time, as one writes where no layer's kernel fits."""
    (x,) = _leaves(_time_first(data[0]).contiguous())
    cell: Any = cell_type(work.input_size, work.channels, device=x.device, dtype=work.dtype)

    def step(x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        state = cell(x_t, state)
        return (state[0] if isinstance(state, tuple) else state), state

    inputs = (x, *cell.parameters())
    return Run(lambda: _over_time(step, x.unbind(0), None), inputs, _time_first, same_function=False)


# Recurrences made of their equations


def ostinato_equation(work: Equation, data: tuple[Tensor, ...]) -> Run:
    arguments, function = _leaves(*data), EQUATIONS[work.cell]
    return Run(lambda: function(*arguments)[0], arguments)


def equation_loop(work: Equation, data: tuple[Tensor, ...]) -> Run:
    """The coefficients of all steps, then one PyTorch operation a step."""
    arguments, function = _leaves(*data), EQUATIONS[work.cell].function

    def loop() -> Tensor:
        a, b = function(*arguments)
        return torch.stack(list(_states(a, b, torch.zeros_like(a[:, 0]))), 1)

    return Run(loop, arguments)


def _states(a: Tensor, b: Tensor, h: Tensor) -> Iterator[Tensor]:
    for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
        h = torch.addcmul(b_t, a_t, h)
        yield h


def compiled_equation_loop(work: Equation, data: tuple[Tensor, ...]) -> Run:
    """The same, compiled for UNROLLED steps per call: 256, which was faster than 16 and 64."""
    *sequences, parameter = data
    function = EQUATIONS[work.cell].function

    def chunk(h: Tensor, *arguments: Tensor) -> Tensor:
        a, b = function(*arguments)
        return torch.stack(list(_states(a, b, h)), 1)

    compiled = _compiled(chunk)

    def loop() -> Tensor:
        h, parts = torch.zeros_like(sequences[0][:, 0]), []
        for arguments in zip(*(x.split(UNROLLED, 1) for x in sequences), strict=True):
            parts.append(compiled(h, *arguments, parameter))
            h = parts[-1][:, -1]
        return torch.cat(parts, 1)

    slow = "left out, as it takes minutes to compile"
    return Run(loop, (*sequences, parameter), forward_only=f"its backward pass is {slow}")


def lrnnx(work: Equation, data: tuple[Tensor, ...]) -> Run:
    """lrnnx's kernel, (B, D, T), on the gated input, the decay and its exponent, which are computed compiled."""
    _need_cuda(data[0])
    if work.dtype is not torch.float32:
        raise Unavailable("takes float32")
    scan = _import("lrnnx.ops.rglru_scan", "lrnnx").rglru_scan_fn
    *sequences, log_lambda = data
    arguments = _leaves(*(_time_last(x).contiguous() for x in sequences), log_lambda)

    def coefficients(x: Tensor, r: Tensor, i: Tensor, log_lambda: Tensor) -> tuple[Tensor, ...]:
        return torch.sigmoid(i) * x, 8 * torch.sigmoid(r), torch.exp(-F.softplus(log_lambda))[:, None]

    compiled = _compiled(coefficients)
    return Run(lambda: scan(*compiled(*arguments)), arguments, _time_last)


def fla_hgrn(_work: Equation, data: tuple[Tensor, ...]) -> Run:
    """flash-linear-attention's kernel, on the input and the logarithm of the gate, which are computed compiled."""
    _need_cuda(data[0])
    chunk_hgrn = _import("fla.ops.hgrn", "flash-linear-attention").chunk_hgrn
    arguments = _leaves(*data)

    def coefficients(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        a, b = EQUATIONS["HGRN"].function(*(x.float() for x in arguments))
        return b.to(data[0].dtype), a.log().to(data[0].dtype)

    compiled = _compiled(coefficients)
    return Run(lambda: chunk_hgrn(*compiled(*arguments))[0], arguments)


def ostinato_para_layer(work: ParaLayer, data: tuple[Tensor, ...]) -> Run:
    (x,), layer = _leaves(data[0]), work.layer(data)
    return Run(lambda: layer(x)[0], (x, *layer.parameters()), has_bias=True)


def pararnn(work: ParaLayer, data: tuple[Tensor, ...]) -> Run:
    """pararnn-torch's layer, which trains by Newton's method over time."""
    _need_cuda(data[0])
    module = _import("pararnn", "pararnn-torch")
    x, weight, bias, *recurrent = data
    cell = getattr(module, work.cell)(work.input_size, work.channels, device=x.device)
    order = [0, 1, 2] if work.cell == "ParaGRU" else [0, 2, 1]  # its LSTM has the candidate before the output gate
    names = ("a_z", "a_r", "a_n") if work.cell == "ParaGRU" else ("a_f", "a_o", "a_z", "c_f", "c_o")
    with torch.no_grad():
        cell.W_x.weight.copy_(weight.unflatten(0, (3, -1))[order].flatten(0, 1))
        cell.W_x.bias.copy_(bias.unflatten(0, (3, -1))[order].flatten())
        for name, value in zip(names, recurrent, strict=True):
            getattr(cell, name).copy_(value)
    layer, (x,) = module.ParaRNN(cell).train(), _leaves(x)
    return Run(lambda: layer(x), (x, *layer.parameters()), has_bias=True)


# RNN, GRU and LSTM


def ostinato_recurrence(path: str | None, work: Recurrence, data: tuple[Tensor, ...]) -> Run:
    """Our layer, by the kernel that its plan chooses, or that of a given path."""
    layer = work.layer(data)
    asked = partial(layer.plan, work.batch, training=work.trained, steps=work.length)
    plan = asked()
    if path is not None:
        _need_cuda(data[0])
        if plan.path == path:
            raise Unavailable(PLANNED)
        layer._path = path
        plan = asked()
        if plan.path != path:
            raise Unavailable(plan.reason)
    resets: dict[str, Any] = {"resets": work.resets_of(data)} if work.resets else {}
    shown = {name: getattr(plan, name) for name in ("path", "bytes_on_chip", "bytes_available", "blocks", "reason")}
    return replace(work.run(partial(work.apply, layer, **resets), data, layer.parameters()), plan=shown)


def torch_recurrence(work: Recurrence, data: tuple[Tensor, ...]) -> Run:
    """``torch.nn``'s layer; on NVIDIA GPUs cuDNN's, with the batch padded if that enables its persistent kernels.

    These take float16, multiples of 8 sequences, and no GRU.  Pruned layers are dense ones with zeros.  Sequences with
    resets are split into episodes at every call, as resets differ between batches.
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


def loop_of_steps(sparse: bool, work: Recurrence, data: tuple[Tensor, ...]) -> Run:
    """A loop over time of a product and PyTorch's fused gates, in a CUDA graph unless sparse."""
    x, first = data[0], [state[0] for state in data[1 : 1 + work.states]]
    _need_cuda(x)
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
            return _over_time(gru if work.cell == "GRU" else lstm, F.linear(x, weight_ih), first)
        steps, h = F.linear(x, weight_ih, bias_ih + bias_hh), first[0]
        for step in steps:  # in place: each becomes the state after it
            h = torch.tanh_(step.add_(multiply(h)) if sparse else step.addmm_(h, transposed))
        return steps

    if sparse:  # captured twice in a process, cuSPARSE reads freed memory
        return Run(torch.no_grad()(steps))
    return Run(_captured(torch.no_grad()(steps)))


def _captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function as a CUDA graph, whose replays write to the same tensors."""
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        function()
    current.wait_stream(stream)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool):
            output = function()
    except Exception:  # a failed capture leaves PyTorch's allocator in capture mode, in which it frees no memory
        torch.cuda.set_stream(current)
        with suppress(RuntimeError):  # the capture had ended
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
        raise

    def replay() -> Any:
        graph.replay()
        return output

    return replay


def torchrl(work: Recurrence, data: tuple[Tensor, ...]) -> Run:
    """torchrl's Triton functions, which support resets: (B, T, H), with an initial state for every step."""
    _need_cuda(data[0])
    functions = _import("torchrl.modules.tensordict_module._rnn_triton", "torchrl")
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
        if resets is not None:  # at the first step it hides the given state, too
            first = [state.where(~begins[..., None], 0.0) for state in first]
        results = function(x.transpose(0, 1), *first, *weights, begins, input_precision=precision)
        return results[0].transpose(0, 1), *(state[None] for state in results[-len(states) :])

    return work.run(call, data, weights)


def in_a_graph(build: Build, work: Recurrence, data: tuple[Tensor, ...]) -> Run:
    """Another contestant's pass as a CUDA graph."""
    _need_cuda(data[0])
    run = build(work, data)
    if run.gradients is None:
        return replace(run, call=_captured(torch.no_grad()(run.call)))
    return replace(run, gradients=_captured(run.gradients))


def _need_cuda(x: Tensor) -> None:
    if x.device.type != "cuda":
        raise Unavailable("needs a CUDA device")


TIME_LOOP, FROM_HOST = "Ostinato, time loop", "Ostinato, with the transfer"
CELL_LOOPS = {"mingru": "torch.nn.GRUCell, time loop", "minlstm": "torch.nn.LSTMCell, time loop"}
EQUATION_LOOPS = {"PyTorch loop": equation_loop, "PyTorch loop, compiled": compiled_equation_loop}
ON_REQUEST = {TIME_LOOP, FROM_HOST, *CELL_LOOPS.values(), *EQUATION_LOOPS}


def minimal(cell: str, name: str, layer_type: Any, cell_type: Any) -> dict[str, Build]:
    """The contestants of minGRU or minLSTM."""
    return {
        OURS: ostinato_layer,
        f"{name}-pytorch": min_rnn_pytorch,
        f"{name}-pytorch, autocast": partial(min_rnn_pytorch, autocast=True),
        f"{name}-pytorch, compiled": partial(min_rnn_pytorch, compiled=True),
        f"{name}-pytorch, compiled, autocast": partial(min_rnn_pytorch, compiled=True, autocast=True),
        f"torch.nn.{layer_type.__name__}": partial(torch_recurrent, layer_type),
        TIME_LOOP: ostinato_steps,
        FROM_HOST: ostinato_from_host,
        CELL_LOOPS[cell]: partial(torch_cell_loop, cell_type),
    }


RECURRENCES: dict[str, Build] = {
    OURS: partial(ostinato_recurrence, None),
    "Ostinato in a CUDA graph": partial(in_a_graph, partial(ostinato_recurrence, None)),
    "torch.nn": torch_recurrence,
    "torch.nn in a CUDA graph": partial(in_a_graph, torch_recurrence),
    "GEMMs in a CUDA graph": partial(loop_of_steps, False),
    "cuSPARSE": partial(loop_of_steps, True),
    "torchrl": torchrl,
    "Ostinato, dense kernel": partial(ostinato_recurrence, "dense"),
    "Ostinato, sparse kernel": partial(ostinato_recurrence, "sparse"),
    "Ostinato, block kernel": partial(ostinato_recurrence, "block"),
}
CONTESTANTS: dict[str, dict[str, Build]] = {
    "scan": {
        OURS: ostinato_scan,
        "accelerated-scan warp": partial(accelerated_scan, "warp"),
        "accelerated-scan Triton": partial(accelerated_scan, "scalar"),
        "torch associative_scan": compiled_associative_scan,
        "PyTorch time loop": time_loop,
    },
    "mingru": minimal("mingru", "minGRU", nn.GRU, nn.GRUCell),
    "minlstm": minimal("minlstm", "minLSTM", nn.LSTM, nn.LSTMCell),
    "RG-LRU": {OURS: ostinato_equation, "lrnnx, compiled": lrnnx, **EQUATION_LOOPS},
    "invented": {OURS: ostinato_equation},
    "HGRN": {OURS: ostinato_equation, "flash-linear-attention, compiled": fla_hgrn},
    "ParaGRU": {OURS: ostinato_para_layer, "pararnn-torch": pararnn},
    "ParaLSTM": {OURS: ostinato_para_layer, "pararnn-torch": pararnn},
    **dict.fromkeys(RECURRENT, RECURRENCES),
}
