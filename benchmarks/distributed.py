"""Correctness and speed of several GPUs of a machine beside one of them, into a JSON file.

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --output distributed-nvidia-h200.json

Results are compared with one process's, then timed.  Times are medians over runs of the slowest process's time;
"alone" is a process that does the same without the others.
"""

import argparse
import copy
import functools
import gc
import itertools
import os
import statistics
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ostinato
import ostinato.distributed
from ostinato.bench.runs import environment, write_json
from ostinato.models import LanguageModel
from ostinato.processes import make_mesh, part
from ostinato.training import Trainer, TrainingSettings

Record = dict[str, Any]
GATES = {"forgets": (0.0, 1.0), "never forgets": (12.0, 1.0)}  # mean and deviation before the sigmoid
SCANS = "linear_scan", "log_linear_scan"
# Of smooth candidates: rounding takes a number to the other side of a kink now and then.
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


class Job:
    """This process, its device, and how large the problems are."""

    def __init__(self, scale: int) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.world = distributed.group.WORLD
        self.scale = scale  # shifts sizes to the right

    def seconds(self, call: Callable[[], object], runs: int = 15) -> float:
        """The median of several calls, each as long as its slowest process, after two that do not count."""
        times = []
        for number in range(runs + 2):
            distributed.barrier()
            self.wait()
            begin = time.perf_counter()
            call()
            self.wait()
            if number >= 2:
                times.append(time.perf_counter() - begin)
        slowest = torch.tensor(times, dtype=torch.float64, device=self.device)
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def worst(self, error: float) -> float:
        found = torch.tensor(error, dtype=torch.float64, device=self.device)
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return found.item()

    def random(self, *shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)


def gates(job: Job, *shape: int, kind: str, seed: int) -> Tensor:
    mean, deviation = GATES[kind]
    return job.random(*shape, seed=seed).mul_(deviation).add_(mean).sigmoid_()


def relative(x: Tensor, y: Tensor) -> float:
    if not x.numel():
        return 0.0
    return ((x.double() - y.double()).abs().max() / y.double().abs().max().clamp(min=1e-30)).item()


def correctness(job: Job) -> Record:
    """The largest errors, relative to the largest value, of float32 results from one process's in float64."""
    found = {}
    for name, kind, packed, reverse in itertools.product(SCANS, GATES, (False, True), (False, True)):
        case = f"{name}, {kind}{', packed' * packed}{', reversed' * reverse}"
        found[case] = job.worst(error_of_scan(job, name, kind, packed, reverse))
    for cell in PARALLEL:
        found[cell] = job.worst(error_of_layer(job, cell))
    return {"max_relative_errors": found}


def uneven(job: Job) -> list[int]:
    """The steps of each process's shard, the last one's too few to be scanned before the exchange."""
    lengths = [10_007] * job.size
    lengths[0], lengths[-1] = lengths[0] + 9001, lengths[-1] - 9001
    return lengths


def error_of_scan(job: Job, name: str, kind: str, packed: bool, reverse: bool) -> float:
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
    own = {**options, "resets": resets.split(sizes, 1)[job.rank], "group": job.world}
    results = getattr(ostinato.distributed, name)(*mine, **own)
    weights = job.random(1, total, 64, seed=5)
    grads = torch.autograd.grad((expected[0] * weights.double()).sum(), whole)
    parts = torch.autograd.grad((results[0] * weights.split(sizes, 1)[job.rank]).sum(), mine)
    pairs = [(results[0], expected[0].split(sizes, 1)[job.rank]), (results[1], expected[1]), (parts[2], grads[2])]
    pairs += [(x, y.split(sizes, 1)[job.rank]) for x, y in zip(parts[:2], grads[:2], strict=True)]
    return max(relative(x, y) for x, y in pairs)


def error_of_layer(job: Job, cell: str) -> float:
    sizes = uneven(job)
    torch.manual_seed(0)
    layer = getattr(ostinato, cell)(32, 64, 2, batch_first=True, **PARALLEL[cell]).to(job.device)
    x, weights = job.random(2, sum(sizes), 32, seed=6), job.random(2, sum(sizes), 64, seed=7)
    parts_of = ostinato.distributed.sequence_parallel(copy.deepcopy(layer), job.world)
    exact = copy.deepcopy(layer).double()
    expected = exact(x.double())[0]
    (expected * weights).sum().backward()
    y = parts_of(x.split(sizes, 1)[job.rank])[0]
    (y * weights.split(sizes, 1)[job.rank]).sum().backward()
    errors = [relative(y, expected.split(sizes, 1)[job.rank])]
    for one, several in zip(exact.parameters(), parts_of.parameters(), strict=True):
        distributed.all_reduce(several.grad)
        errors.append(relative(several.grad, one.grad))
    return max(errors)


def training(job: Job) -> Record:
    """The error of each layer's outputs against one process's after four steps of AdamW, by DDP and by FSDP2."""
    found = {}
    for cell, wrap in itertools.product(TRAINED, WRAPS):
        error, moved = error_of_training(job, cell, wrap)
        found[f"{cell}, {wrap}"] = {"max_relative_error": job.worst(error), "relative_change": job.worst(moved)}
    return {"four_steps_of_adamw": found}


def error_of_training(job: Job, cell: str, wrap: str) -> tuple[float, float]:
    """The error of the outputs, and their change by the training, both relative to the largest output."""
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
    found = fit(WRAPS[wrap](make(), job), part(rows, job.rank, job.size))
    return relative(found, expected), relative(found, untrained)


def curves(job: Job) -> Record:
    """Losses of a small language model after some steps, trained in each way; the last by one process."""
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


def exchanges(job: Job) -> Record:
    """Seconds of the collectives by bytes per process, to plan larger jobs."""
    found: dict[str, dict[int, float]] = {"all_gather": {}, "all_reduce": {}}
    for number in (1 << shift for shift in range(9, 28 - job.scale, 3)):
        x = torch.ones(number, device=job.device)
        gathered = x.new_empty(job.size * number)

        def gather(x: Tensor = x, gathered: Tensor = gathered) -> None:
            distributed.all_gather_into_tensor(gathered, x)

        def reduce(x: Tensor = x) -> None:
            distributed.all_reduce(x)

        for name, call in (("all_gather", gather), ("all_reduce", reduce)):

            def many(call: Callable[[], None] = call) -> None:
                for _ in range(20):
                    call()

            found[name][4 * number] = job.seconds(many, 3) / 20
    return {"seconds_by_bytes": found}


def scans(job: Job) -> Record:
    """Weak scaling: 2^22 steps of 256 channels a GPU, float32."""
    rows, steps = [], 1 << 22 - job.scale
    for kind in GATES:
        a, b = gates(job, 1, steps, 256, kind=kind, seed=job.rank), job.random(1, steps, 256, seed=9)
        a.requires_grad_()
        b.requires_grad_()
        all_together = functools.partial(ostinato.distributed.linear_scan, group=job.world)
        seconds: Record = {}
        for who, scan in (("alone", ostinato.linear_scan), ("all", all_together)):
            forward, both = (functools.partial(call, scan, a, b) for call in (without_gradient, with_gradient))
            seconds[who] = {"forward": job.seconds(forward), "forward and backward": job.seconds(both)}
        rows.append({"gates": kind, "steps": steps, "channels": 256, "seconds": seconds})
        del a, b, forward, both
        free()
    return {"weak_scaling": rows}


def without_gradient(scan: Callable, a: Tensor, b: Tensor) -> None:
    with torch.no_grad():
        scan(a, b)


def with_gradient(scan: Callable, a: Tensor, b: Tensor) -> None:
    torch.autograd.grad(scan(a, b)[0], (a, b), b.detach())


def layer(job: Job) -> Record:
    """Strong scaling: a bfloat16 layer of 1,024 channels over 2^20 steps in all, with all-reduced gradients."""
    steps = 1 << 20 - job.scale
    torch.manual_seed(0)
    seconds: Record = {}
    for who in ("alone", "all"):
        made = ostinato.MinGRU(1024, 1024, batch_first=True, device=job.device, dtype=torch.bfloat16)
        own = slice(0, steps)
        if who == "all":
            ostinato.distributed.sequence_parallel(made, job.world)
            own = part(steps, job.rank, job.size)
        number = own.stop - own.start
        x = job.random(1, number, 1024, seed=1, dtype=torch.bfloat16).requires_grad_()
        grad = torch.ones(1, number, 1024, device=job.device, dtype=torch.bfloat16)

        def both(made: Any = made, x: Tensor = x, grad: Tensor = grad, several: bool = who == "all") -> None:
            made.zero_grad()
            made(x)[0].backward(grad)
            if several:
                for parameter in made.parameters():
                    distributed.all_reduce(parameter.grad)
            x.grad = None

        seconds[who] = job.seconds(both)
        del made, x, grad, both
        free()
    return {"strong_scaling": {"steps": steps, "hidden_size": 1024, "dtype": "bfloat16", "seconds": seconds}}


def long_sequence(job: Job) -> Record:
    """10^8 steps of 64 channels in all, forward and backward, against float64 on samples, also around boundaries."""
    total, channels, reach = 10**8 >> job.scale, 64, 2000
    own = part(total, job.rank, job.size)
    steps = own.stop - own.start
    a = job.random(1, steps, channels, seed=10 + job.rank).add_(3.0).sigmoid_().requires_grad_()
    b = job.random(1, steps, channels, seed=20 + job.rank).requires_grad_()
    distributed.barrier()
    job.wait()
    begin = time.perf_counter()
    h, _ = ostinato.distributed.linear_scan(a, b, group=job.world)
    grads = torch.autograd.grad(h, (a, b), b.detach())  # of the loss sum(h * b)
    job.wait()
    seconds = time.perf_counter() - begin
    # Around the boundaries: the end of each shard and the beginning of the next.
    a, b, h = (x.detach() for x in (a, b, h))
    ends = torch.stack([torch.cat((x[0, :reach], x[0, -reach:])) for x in (a, b, h, *grads)])
    everyone = [torch.empty_like(ends) for _ in range(job.size)]
    distributed.all_gather(everyone, ends)
    errors = []
    for left, right in itertools.pairwise(everyone):
        errors.append(compare(torch.cat((left[:, reach:], right[:, :reach]), 1)))
    for place in torch.randint(reach, steps - reach, (4,), generator=torch.Generator().manual_seed(job.rank)).tolist():
        window = slice(place - reach, place + reach)
        errors.append(compare(torch.stack([x[0, window] for x in (a, b, h, *grads)])))
    return {
        "long_sequence": {
            "steps": total,
            "channels": channels,
            "seconds": job.worst(seconds),
            "max_relative_error": job.worst(max(errors)),
            "peak_bytes": job.peak(),
        }
    }


def compare(window: Tensor) -> float:
    """The error in the middle of a window of a, b, h and the gradients: its ends are far enough to be forgotten."""
    a, b, h, grad_a, grad_b = window.double()
    middle = slice(len(a) * 3 // 8, len(a) * 5 // 8)
    exact, _ = ostinato.linear_scan(a[None], b[None])
    after = torch.cat((a[1:], torch.zeros_like(a[:1])))
    exact_b, _ = ostinato.linear_scan(after[None], b[None], reverse=True)
    before = torch.cat((torch.zeros_like(exact[0, :1]), exact[0, :-1]))
    pairs = [(h, exact[0]), (grad_b, exact_b[0]), (grad_a, exact_b[0] * before)]
    return max(relative(x[middle], y[middle]) for x, y in pairs)


def language_model(job: Job) -> Record:
    """Tokens a second of a model of over 100 million parameters, 32,768 tokens a GPU and step, and the memory held."""
    rows: Record = {}
    rows_a_gpu, length = 32 >> job.scale // 3, 1024 >> job.scale // 3
    tokens = torch.randint(256, (4_000_000,), generator=torch.Generator().manual_seed(0))
    for who in ("alone", "DDP", "FSDP2"):
        torch.manual_seed(0)
        model = LanguageModel(256, width=1024 >> job.scale // 2, num_layers=8, dropout=0.0)
        batch = rows_a_gpu * (1 if who == "alone" else job.size)
        settings = TrainingSettings(steps=1000, batch_size=batch, chunk_length=length, warmup_steps=2)
        mesh = None if who == "alone" else make_mesh(job.device.type, shard=who == "FSDP2")
        trainer = Trainer(model, tokens, settings, device=job.device, mesh=mesh, shard=who == "FSDP2")
        free()
        seconds = job.seconds(functools.partial(trainer.advance, 4), 3) / 4
        held = sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in model.parameters())
        rows[who] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "tokens_per_second": batch * length / seconds,
            "parameter_bytes": held,
            "bytes_between_steps": torch.cuda.memory_allocated(job.device) if job.device.type == "cuda" else 0,
            "peak_bytes": job.peak(),
        }
        if job.rank == 0:
            print(who, rows[who], flush=True)
        del trainer, model
        free()
    return {"language_model": rows}


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


PARTS = {
    what.__name__: what
    for what in (correctness, scans, layer, language_model, long_sequence, training, curves, exchanges)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--scale", type=int, default=0, help="sizes are divided by 2 to this")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be given several times")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.backends.cudnn.allow_tf32 = False  # GRU and LSTM in float32, to be compared with one process's
    distributed.init_process_group(backend, timeout=timedelta(minutes=1))  # for one that failed
    job = Job(options.scale)
    record: Record = {"environment": environment(job.device), "gpus": job.size}
    for name in options.part or PARTS:
        begin = time.perf_counter()
        try:
            found = PARTS[name](job)
        except Exception:  # the others still say something
            found = {name: traceback.format_exc()}
            print(f"process {job.rank}:", found[name], flush=True)
        record |= found
        free()
        if job.rank == 0:
            print(f"{name}: {time.perf_counter() - begin:.1f} s", found, flush=True)
            write_json(options.output, record)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
