"""How far the results of several processes are from those of one."""

import copy
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ostinato
import ostinato.distributed
from ostinato.models import LanguageModel
from ostinato.processes import make_mesh, part
from ostinato.training import Trainer, TrainingSettings
from parallel.job import GATES, Job, Record, gates, relative

SCANS = "linear_scan", "log_linear_scan"
# With smooth candidates: at a kink, rounding now and then takes a number to the other side.
PARALLEL: dict[str, dict[str, str]] = {"MinGRU": {"candidate": "tanh"}, "MinLSTM": {"candidate": "tanh"}, "RGLRU": {}}
TRAINED = {
    "GRU": lambda: ostinato.GRU(32, 64, 2, batch_first=True),
    "LSTM": lambda: ostinato.LSTM(32, 64, batch_first=True),
    "RNN": lambda: ostinato.RNN(32, 64, batch_first=True),
    "LSTM, pruned": lambda: ostinato.prune(ostinato.LSTM(32, 64, batch_first=True), 0.3, block=(8, 4)),
    "MinGRU": lambda: ostinato.MinGRU(32, 64, 2, batch_first=True, bidirectional=True),
    "MinLSTM": lambda: ostinato.MinLSTM(32, 64, batch_first=True),
    "RGLRU": lambda: ostinato.RGLRU(32, 64, batch_first=True),
    "ParaGRU": lambda: ostinato.ParaGRU(32, 64, batch_first=True),
}
WRAPS: dict[str, Callable] = {
    "DDP": lambda layer, job: DistributedDataParallel(layer),
    "FSDP2": lambda layer, job: fully_shard(layer, mesh=init_device_mesh(job.device.type, (job.size,))),
}


def correctness(job: Job) -> Record:
    """Compare float32 results of all processes with one process's in float64: largest errors over largest values."""
    errors = {}
    for name, kind, packed, reverse in itertools.product(SCANS, GATES, (False, True), (False, True)):
        case = f"{name}, {kind}{', packed' * packed}{', reversed' * reverse}"
        errors[case] = job.worst(*error_of_scan(job, name, kind, packed, reverse))
    for cell in PARALLEL:
        errors[cell] = job.worst(*error_of_layer(job, cell))
    return {"max_relative_errors": errors}


def uneven(job: Job) -> list[int]:
    """The steps of each process's shard; the last has too few to be scanned before the exchange."""
    lengths = [10_007] * job.size
    lengths[0], lengths[-1] = lengths[0] + 9001, lengths[-1] - 9001
    return lengths


def error_of_scan(job: Job, name: str, kind: str, packed: bool, reverse: bool) -> list[float]:
    sizes = uneven(job)
    total = sum(sizes)
    a, b = gates(job, 1, total, 64, kind=kind, seed=1), job.random(1, total, 64, seed=2)
    h0 = job.random(5 if packed else 1, 64, seed=3)
    if name == "log_linear_scan":
        a = a.log()
    bounds = torch.tensor([0, 5, 5, sizes[0], total - 9, total], dtype=torch.int32, device=job.device)
    options: Record = {"reverse": reverse, "cu_seqlens": bounds if packed else None}
    resets = torch.rand(1, total, generator=torch.Generator().manual_seed(4)).to(job.device) < 1e-3
    whole = [x.double().requires_grad_() for x in (a, b, h0)]
    mine = [x.split(sizes, 1)[job.rank].clone().requires_grad_() for x in (a, b)] + [h0.clone().requires_grad_()]
    expected = getattr(ostinato, name)(*whole, resets=resets, **options)
    shard_options = {**options, "resets": resets.split(sizes, 1)[job.rank], "group": job.world}
    results = getattr(ostinato.distributed, name)(*mine, **shard_options)
    weights = job.random(1, total, 64, seed=5)
    grads = torch.autograd.grad((expected[0] * weights.double()).sum(), whole)
    parts = torch.autograd.grad((results[0] * weights.split(sizes, 1)[job.rank]).sum(), mine)
    pairs = [(results[0], expected[0].split(sizes, 1)[job.rank]), (results[1], expected[1]), (parts[2], grads[2])]
    pairs += [(x, y.split(sizes, 1)[job.rank]) for x, y in zip(parts[:2], grads[:2], strict=True)]
    return [relative(x, y) for x, y in pairs]


def error_of_layer(job: Job, cell: str) -> list[float]:
    sizes = uneven(job)
    torch.manual_seed(0)
    layer = getattr(ostinato, cell)(32, 64, 2, batch_first=True, **PARALLEL[cell]).to(job.device)
    x, weights = job.random(2, sum(sizes), 32, seed=6), job.random(2, sum(sizes), 64, seed=7)
    sharded = ostinato.distributed.sequence_parallel(copy.deepcopy(layer), job.world)
    exact = copy.deepcopy(layer).double()
    expected = exact(x.double())[0]
    (expected * weights).sum().backward()
    y = sharded(x.split(sizes, 1)[job.rank])[0]
    (y * weights.split(sizes, 1)[job.rank]).sum().backward()
    errors = [relative(y, expected.split(sizes, 1)[job.rank])]
    for one, several in zip(exact.parameters(), sharded.parameters(), strict=True):
        distributed.all_reduce(several.grad)
        errors.append(relative(several.grad, one.grad))
    return errors


def training(job: Job) -> Record:
    """Compare each layer's outputs after four steps of AdamW, by DDP and by FSDP2, with those of one process."""
    results = {}
    for cell, wrap in itertools.product(TRAINED, WRAPS):
        error, moved = error_of_training(job, cell, wrap)
        results[f"{cell}, {wrap}"] = {"max_relative_error": job.worst(error), "relative_change": job.worst(moved)}
    return {"four_steps_of_adamw": results}


def error_of_training(job: Job, cell: str, wrap: str) -> tuple[float, float]:
    """Return the error of the outputs and their change by training, both relative to the largest output."""
    rows = 16 * job.size
    x = job.random(5, rows, 40, 32, seed=8)

    def fit(layer: torch.nn.Module, mine: slice) -> Tensor:
        optimizer = torch.optim.AdamW(layer.parameters(), 1e-2)
        for batch in x[:4, mine]:
            optimizer.zero_grad()
            layer(batch)[0].square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            return layer(x[4])[0]

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return TRAINED[cell]().to(job.device)

    with torch.no_grad():
        untrained = make()(x[4])[0]
    expected = fit(make(), slice(None))
    actual = fit(WRAPS[wrap](make(), job), part(rows, job.rank, job.size))
    return relative(actual, expected), relative(actual, untrained)


def curves(job: Job) -> Record:
    """Return the losses of a small language model after some steps, by one process and by each way to use several."""
    tokens = torch.randint(50, (40_000,), generator=torch.Generator().manual_seed(0))
    settings = TrainingSettings(steps=8, batch_size=8, chunk_length=256, warmup_steps=2)
    losses = {}
    for name, mesh, shard in (
        ("one process", None, False),
        ("DDP", {}, False),
        ("FSDP2", {}, True),
        ("sequence parallel", {"sequence_parallel": job.size}, False),
        ("sequence parallel, FSDP2", {"sequence_parallel": job.size}, True),
    ):
        torch.manual_seed(0)
        model = LanguageModel(50, width=64, num_layers=2, dropout=0.0)
        on = None if mesh is None else make_mesh(job.device.type, shard=shard, **mesh)
        trainer = Trainer(model, tokens, settings, device=job.device, precision="float32", mesh=on, shard=shard)
        trainer.advance(8)
        losses[name] = trainer.evaluate().held_out_loss
    return {"held_out_loss_after_8_steps": losses}
