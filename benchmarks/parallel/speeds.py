"""The times of several GPUs compared with one of them, and their memory."""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

import ostinato
import ostinato.distributed
from ostinato.models import LanguageModel
from ostinato.processes import make_mesh, part
from ostinato.training import Trainer, TrainingSettings
from parallel.job import GATES, Job, Record, free, gates, relative


def exchanges(job: Job) -> Record:
    """Time the collectives by bytes per process, to plan larger jobs."""
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
    """Weak scaling: 2^22 steps of 256 channels per GPU, float32."""
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
    """Run 10^8 steps of 64 channels in all, forward and backward, and compare samples with float64.

    The samples include the boundaries between shards.
    """
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
    errors: list[float] = []
    for left, right in itertools.pairwise(everyone):
        errors += compare(torch.cat((left[:, reach:], right[:, :reach]), 1))
    for place in torch.randint(reach, steps - reach, (4,), generator=torch.Generator().manual_seed(job.rank)).tolist():
        window = slice(place - reach, place + reach)
        errors += compare(torch.stack([x[0, window] for x in (a, b, h, *grads)]))
    return {
        "long_sequence": {
            "steps": total,
            "channels": channels,
            "seconds": job.worst(seconds),
            "max_relative_error": job.worst(*errors),
            "peak_bytes": job.peak(),
        }
    }


def compare(window: Tensor) -> list[float]:
    """Return the errors in the middle of a window of a, b, h and the gradients, where its ends are forgotten."""
    a, b, h, grad_a, grad_b = window.double()
    middle = slice(len(a) * 3 // 8, len(a) * 5 // 8)
    exact, _ = ostinato.linear_scan(a[None], b[None])
    after = torch.cat((a[1:], torch.zeros_like(a[:1])))
    exact_b, _ = ostinato.linear_scan(after[None], b[None], reverse=True)
    before = torch.cat((torch.zeros_like(exact[0, :1]), exact[0, :-1]))
    pairs = [(h, exact[0]), (grad_b, exact_b[0]), (grad_a, exact_b[0] * before)]
    return [relative(x[middle], y[middle]) for x, y in pairs]


def language_model(job: Job) -> Record:
    """Measure the tokens a second of a model of over 100 million parameters, and its memory.

    Each GPU has 32,768 tokens per step.
    """
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
