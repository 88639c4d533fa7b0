"""The shapes and contestants of each kind of benchmark: a few small ones for a quick look, a CPU's, and a GPU's."""

import functools
import math
import random
from dataclasses import replace
from typing import Any

import torch

from ostinato.bench.workloads import (
    EQUATIONS,
    OURS,
    RECURRENT,
    Equation,
    Layer,
    ParaLayer,
    RecurrentLayer,
    Scan,
    SLSTMLayer,
    Training,
    Workload,
    short_name,
)

f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
CELLS = tuple(RECURRENT)
EAGER = (OURS, "minGRU-pytorch", "minGRU-pytorch, autocast", "torch.nn.GRU")
LSTMS = (OURS, *(f"minLSTM-pytorch{how}" for how in ("", ", autocast", ", compiled, autocast")), "torch.nn.LSTM")
SCANS = (OURS, "accelerated-scan warp", "accelerated-scan Triton", "torch associative_scan")
PLAIN = (OURS, "torch.nn")
CUDNN = (*PLAIN, "torch.nn in a CUDA graph")
GRAPHS = (*CUDNN, "GEMMs in a CUDA graph")
SPARSE = (*GRAPHS, "cuSPARSE")
KERNELS = ("Ostinato, dense kernel", "Ostinato, sparse kernel", "Ostinato, block kernel")
IN_GRAPHS = (*CUDNN, "Ostinato in a CUDA graph")
FLASHRNN = (*IN_GRAPHS, "flashrnn")
FROM_EQUATION = (OURS, "Ostinato, from its equation", "its equation in a loop", "torch.nn")
IN_GRAPHS_FROM_EQUATION = (
    *FROM_EQUATION,
    "Ostinato, from its equation, in a CUDA graph",
    "its equation in a loop in a CUDA graph",
    "torch.nn in a CUDA graph",
    "Ostinato in a CUDA graph",
)
# Without torch.nn in a CUDA graph: to split sequences into episodes, the host must know where they end.
EPISODES = (*PLAIN, "Ostinato in a CUDA graph")
PRUNED: dict[str, Any] = {"density": 0.1, "block": (16, 1)}
EQUATIONS_ON_HOST = (128, 4), (256, 16)  # units and sequences
HOST: dict[str, Any] = {"dtype": f32, "who": PLAIN}
PRUNED_ON_HOST = PRUNED | HOST


def workloads(kind: str, device: torch.device, quick: bool = False, only: str = "") -> list[Workload]:
    """Return the workloads measured on a type of device; those of `quick` end within a minute.

    Raises ValueError if no workload's full or short name contains `only`, in either case.
    """
    works = (QUICK if quick else ON_CUDA if device.type == "cuda" else ON_CPU)[kind]
    short = [short_name(str(work)) for work in works]
    names = zip(works, short, strict=True)
    chosen = [work for work, name in names if only.lower() in f"{work}; {name}".lower()]
    if not chosen:
        raise ValueError(f"only must be part of one of {'; '.join(short)}; got {only!r}")
    return chosen


def random_layers(device: torch.device, count: int, seed: int, quick: bool = False) -> list[Workload]:
    """Draw layers to train at random, so that neither kernels nor their plans can have been tuned to the shapes.

    Sizes are log-uniform; hidden sizes are multiples of 8, as torch.nn's kernels are much slower at others.  One in
    four layers is bidirectional, and one in four packed.
    """
    on_cuda, draw = device.type == "cuda", random.Random(seed)
    size = functools.partial(random_size, draw)

    def layer() -> Workload:
        hidden, batch = 8 * size(2, 8 if quick else 256 if on_cuda else 64), size(1, 8 if quick else 256)
        steps = size(16, max(16, min(1000, (2**24 if on_cuda and not quick else 2**18) // (hidden * batch))))
        dtype, layers = draw.choice((f32, f16, bf16)) if on_cuda else f32, draw.choice((1, 1, 2, 3))
        bidirectional, packed = draw.random() < 0.25, draw.random() < 0.25
        return Training(
            draw.choice(CELLS),
            hidden,
            batch,
            steps,
            dtype=dtype,
            tf32=on_cuda and dtype == f32,
            who=IN_GRAPHS,
            layers=layers,
            bidirectional=bidirectional,
            shortest=steps // 4 if packed and batch > 1 else 0,
        )

    return [layer() for _ in range(count)]


def random_size(draw: random.Random, least: int, most: int) -> int:
    """Draw a size from a log-uniform distribution."""
    return round(math.exp(draw.uniform(math.log(least), math.log(most))))


def networks(dtype: torch.dtype, who: tuple[str, ...], *names: str) -> list[Workload]:
    """Return the recurrent layers of published networks, dense and pruned: some serve a batch, the others one stream.

    GNMT's decoder (arXiv 1609.08144), Deep Speech 2 in the size of Baidu's DeepBench, the encoder of a streaming RNN-T
    without its projections (1811.06621), WaveRNN (1802.08435), the largest layer of LPCNet (1810.11846) and the
    GRUs of RNNoise (1709.08243) in its second version.
    """
    stacks = {
        "GNMT": ("LSTM", 1024, 8, 50, 8),
        "Deep Speech 2": ("GRU", 2560, 4, 500, 1),
        "RNN-T": ("LSTM", 2048, 1, 200, 8),
        "WaveRNN": ("GRU", 896, 1, 1000, 1),
        "LPCNet": ("GRU", 384, 1, 1000, 1),
        "RNNoise": ("GRU", 256, 1, 1000, 3),
    }
    return [
        RecurrentLayer(cell, hidden, batch, length, dtype=dtype, who=who, layers=layers, network=name, **pruned)
        for name, (cell, hidden, batch, length, layers) in stacks.items()
        for pruned in ({}, PRUNED)
        if name in names or not names
    ]


QUICK: dict[str, list[Workload]] = {
    "scan": [Scan(1, 4096, 256)],
    "layer": [Layer("mingru", 1, 1024, 256, 256), Layer("minlstm", 1, 1024, 256, 256)],
    "recurrence": [
        *(Equation(cell, 1, 1024, 256) for cell in EQUATIONS),
        ParaLayer("ParaGRU", 1, 1024, 64, 64),
        SLSTMLayer("SLSTM", 4, 100, 64, 64),
    ],
    "persistent": [RecurrentLayer(cell, 384, length=1000, **PRUNED_ON_HOST) for cell in ("GRU", "LSTM")],
    "training": [
        *(Training(cell, 256, 1, 200, dtype=f32, who=IN_GRAPHS) for cell in ("GRU", "LSTM")),
        Training("LSTM", 64, 4, 50, dtype=f32, layers=2, bidirectional=True, shortest=10, who=IN_GRAPHS),
        Training("LSTM", 64, 4, 64, dtype=f32, who=FROM_EQUATION),
    ],
    "networks": networks(f32, PLAIN, "LPCNet"),
    "training-sweep": [
        Training("GRU", hidden, batch, 50, dtype=f32, who=IN_GRAPHS) for hidden in (64, 128) for batch in (1, 4)
    ],
}

ON_CPU: dict[str, list[Workload]] = {
    "scan": [
        *(Scan(16, 4096, 256), Scan(1, 65536, 256)),
        *(Scan(64, 2048, 1), Scan(64, 2048, 3), Scan(16, 4096, 16, time_contiguous=True)),
    ],
    "layer": [
        *(Layer("mingru", *sizes, 256, 256) for sizes in ((1, 256), (1, 4096), (1, 16384), (16, 512))),
        Layer("minlstm", 1, 4096, 256, 256),
    ],
    "recurrence": [
        Equation("RG-LRU", 1, 4096, 256, who=(OURS, "PyTorch loop", "PyTorch loop, compiled")),
        *(Equation(cell, 1, 4096, 256) for cell in EQUATIONS if cell != "RG-LRU"),
    ],
    "persistent": [
        *(RecurrentLayer(cell, hidden, length=1000, **PRUNED_ON_HOST) for cell in CELLS for hidden in (384, 1024)),
        RecurrentLayer("GRU", 384, length=1000, density=0.3, block=(16, 1), **HOST),
        RecurrentLayer("GRU", 384, length=1000, density=0.1, block=(8, 4), **HOST),
        RecurrentLayer("GRU", 384, length=1000, density=0.1, **HOST),
        *(RecurrentLayer(cell, 384, 16, 200, **PRUNED_ON_HOST) for cell in ("GRU", "LSTM")),
        RecurrentLayer("GRU", 384, length=1, **PRUNED_ON_HOST),
    ],
    "training": [
        *(Training(cell, 256, *sizes, **HOST) for cell in CELLS for sizes in ((1, 1000), (16, 200))),
        Training("GRU", 256, 1, 1000, **PRUNED_ON_HOST),
        *(Training(cell, 256, 16, 200, shortest=50, **HOST) for cell in ("GRU", "LSTM")),
        # Recurrences generated from the equations of these cells.
        *(Training(cell, *sizes, 64, dtype=f32, who=FROM_EQUATION) for cell in CELLS for sizes in EQUATIONS_ON_HOST),
        # Dense layers without gradient, over hidden size.
        *(
            RecurrentLayer(cell, hidden, *sizes, **HOST)
            for cell in CELLS
            for hidden in (64, 128, 256, 512, 1024)
            for sizes in ((1, 1000), (16, 200))
        ),
    ],
    "networks": networks(f32, PLAIN, "GNMT", "WaveRNN", "LPCNet", "RNNoise"),
    "training-sweep": [
        Training(cell, hidden, batch, 100, **HOST)
        for cell in CELLS
        for hidden in (64, 128, 256, 512)
        for batch in (1, 4, 16)
    ],
}

TRAINED_LAYERS = [
    Training("GRU", 1024, 16, 512, dtype=bf16, who=FLASHRNN),
    Training("LSTM", 1024, 16, 512, dtype=bf16, who=FLASHRNN),
    Training("LSTM", 768, 16, 512, dtype=f16, who=FLASHRNN),
    Training("GRU", 2048, 8, 512, dtype=f16, who=FLASHRNN),
    Training("LSTM", 512, 64, 512, dtype=bf16, who=FLASHRNN),
    Training("LSTM", 256, 64, 512, dtype=f32, tf32=True, who=FLASHRNN),
    Training("GRU", 512, 256, 128, dtype=f32, tf32=True, who=FLASHRNN),
    Training("GRU", 128, 64, 512, dtype=f32, tf32=True, who=FLASHRNN),
    Training("GRU", 2304, 4, 512, dtype=f16, who=IN_GRAPHS, **PRUNED),
    Training("LSTM", 512, 32, 512, dtype=bf16, layers=2, bidirectional=True, shortest=50, who=IN_GRAPHS),
]
STACKS = [("GRU", 256, 16, 4), ("GRU", 512, 32, 3), ("LSTM", 1024, 16, 2), ("LSTM", 512, 64, 2)]
NARROW = [(4000, 600, 7), (20000, 130, 3), (50000, 40, 8), (25000, 40, 20), (125_000, 128, 1), (1_000_000, 16, 1)]
RESET = [
    *((8, 4096, 1536), (2, 100000, 384), (128, 512, 256), (3, 5000, 1000)),
    *((1, 65536, 256), (1, 2**20, 64), (1, 2**18, 16), (4, 2**20, 8), (1, 3_000_000, 7), (1, 2**24, 1)),
    *NARROW,
]
ON_CUDA: dict[str, list[Workload]] = {
    "scan": [
        *(Scan(8, 4096, 1536, dtype) for dtype in (f32, bf16)),
        *(Scan(8, 65536, 1536, dtype, who=SCANS) for dtype in (f32, bf16)),
        *(Scan(*sizes, who=SCANS) for sizes in ((1, 65536, 256), (1, 2**20, 64), (1, 2**24, 1))),
        # Other shapes and layouts, for ours alone.
        *(Scan(*sizes, dtype, who=(OURS,)) for sizes in ((2, 100000, 384), (128, 512, 256)) for dtype in (f32, bf16)),
        *(Scan(3, 5000, 1000, dtype, who=(OURS,)) for dtype in (f32, bf16)),
        *(Scan(*sizes, who=(OURS,)) for sizes in ((4, 2**20, 8), (1, 3_000_000, 7), (1, 2**18, 16))),
        Scan(8, 2048, 255, bf16, who=(OURS,)),
        *(Scan(*sizes, dtype, who=(OURS,)) for sizes in NARROW for dtype in (f32, bf16)),
        *(
            Scan(*sizes, dtype, who=(OURS,), time_contiguous=True)
            for sizes in ((8, 4096, 1536), (256, 128, 512))
            for dtype in (f32, bf16)
        ),
        *(Scan(1000, 400, 512, dtype, who=(OURS,), shortest=1) for dtype in (f32, bf16)),
        # The cost of resets, beside the same shapes without.
        *(Scan(*sizes, who=(OURS,), resets=0.01) for sizes in RESET),
        *(Scan(*sizes, bf16, who=(OURS,), resets=0.01) for sizes in ((8, 4096, 1536), (8, 2048, 255))),
    ],
    "layer": [
        Layer("mingru", 16, 4096, 1024, 1024, bf16),
        Layer("minlstm", 16, 4096, 1024, 1024, bf16, who=LSTMS),
        Layer("mingru", 16, 4096, 1024, 1024, who=(*EAGER, "minGRU-pytorch, compiled")),
        Layer("mingru", 64, 512, 512, 512, bf16, who=EAGER),
        Layer("mingru", 1, 65536, 256, 256, bf16, who=EAGER),
        Layer("mingru", 64, 1000, 10, 100, who=EAGER),
        Layer("mingru", 64, 512, 256, 256, who=EAGER),
        Layer("mingru", 64, 4096, 256, 256, who=EAGER),
        Layer("mingru", 256, 128, 256, 256, bf16, who=EAGER),
        Layer("mingru", 4, 8192, 4096, 4096, bf16, who=EAGER),
        # The same work at every length: the time should not depend on how it is split into sequences.
        *(Layer("mingru", 65536 // t, t, 1024, 1024, bf16, who=(OURS,)) for t in (256, 1024, 16384, 65536)),
    ],
    "recurrence": [
        *(
            ParaLayer(cell, *sizes)
            for cell in ("ParaGRU", "ParaLSTM")
            for sizes in ((8, 4096, 1024, 1024), (1, 65536, 1024, 1024), (64, 512, 512, 512))
        ),
        *(Equation(cell, 8, 4096, 1536, dtype) for dtype in (bf16, f32) for cell in EQUATIONS),
        *(SLSTMLayer("SLSTM", 16, 512, width, width, bf16) for width in (768, 1024, 2048)),
        SLSTMLayer("SLSTM", 64, 512, 768, 768, bf16),
        SLSTMLayer("SLSTM", 16, 512, 768, 768, bf16, heads=1),
        SLSTMLayer("SLSTM", 16, 512, 1024, 1024, bf16, heads=16),
    ],
    "persistent": [
        *(
            RecurrentLayer(cell, 2304, 4, density=density, block=block, who=SPARSE + KERNELS)
            for density, block in ((0.3, (1, 1)), (0.1, (1, 1)), (0.1, (16, 1)), (0.1, (8, 4)))
            for cell in CELLS
        ),
        *(RecurrentLayer(cell, 1024, 16, dtype=bf16, who=GRAPHS) for cell in CELLS),
        *(
            RecurrentLayer(cell, hidden, 4, density=0.1, block=block, who=SPARSE + KERNELS)
            for cell, hidden in (("RNN", 8192), ("LSTM", 4608))
            for block in ((1, 1), (16, 1))
        ),
        # Over hidden size and batch: dense where it can fit, pruned beyond.
        *(
            RecurrentLayer(cell, hidden, batch, who=GRAPHS)
            for cell in CELLS
            for hidden in (256, 768, 1024, 2304)
            for batch in (1, 4, 16)
        ),
        *(
            RecurrentLayer(cell, hidden, batch, who=CUDNN, **PRUNED)
            for cell in CELLS
            for hidden in (4608, 8192)
            for batch in (1, 4, 16)
            if (cell, hidden, batch) not in (("RNN", 8192, 4), ("LSTM", 4608, 4))
        ),
        # float32, exact and rounded to tf32; then errors over more time steps.
        *(
            RecurrentLayer(cell, hidden, batch, dtype=f32, tf32=tf32, who=GRAPHS)
            for cell in CELLS
            for hidden, batch in ((1024, 16), (2304, 4))
            for tf32 in (False, True)
        ),
        *(RecurrentLayer("LSTM", 1024, 16, 2000, dtype=dtype, who=PLAIN) for dtype in (f32, f16, bf16)),
        RecurrentLayer("LSTM", 1024, 16, 2000, dtype=f32, tf32=True, who=PLAIN),
        RecurrentLayer("GRU", 1024, 16, 2000, dtype=bf16, who=PLAIN),
        RecurrentLayer("LSTM", 2304, 4, 2000, density=0.3, who=PLAIN),
        RecurrentLayer("LSTM", 2304, 4, 2000, who=PLAIN, **PRUNED),
    ],
    "training": [
        *TRAINED_LAYERS,
        # Errors over more time steps.
        *(replace(work, length=2000, who=PLAIN) for work in TRAINED_LAYERS if work.length == 512 and not work.shortest),
        # Stacks.
        *(
            Training(cell, hidden, batch, 512, dtype=bf16, layers=layers, who=IN_GRAPHS)
            for cell, hidden, batch, layers in STACKS
        ),
        # Projections, of the sizes of speech recognition and of language models.
        *(
            Training("LSTM", hidden, batch, 512, dtype=bf16, who=IN_GRAPHS, projection=projection)
            for hidden, projection, batch in ((512, 128, 32), (1024, 256, 16), (2048, 640, 8))
        ),
        # Pruned layers larger than the chip.
        Training("LSTM", 4608, 4, 512, dtype=f16, who=IN_GRAPHS, **PRUNED),
        *(Training("LSTM", hidden, 4, 512, dtype=f16, density=0.1, who=IN_GRAPHS) for hidden in (4608, 6144)),
        # Recurrences generated from the equations of these cells.
        *(
            Training(cell, hidden, batch, 256, dtype=dtype, tf32=dtype == f32, who=IN_GRAPHS_FROM_EQUATION)
            for cell in CELLS
            for hidden, batch, dtype in ((256, 64, f32), (512, 64, bf16), (1024, 16, bf16))
        ),
        # The cost of resets, beside the same layers without.
        Training("GRU", 512, 256, 128, dtype=bf16, resets=0.03, who=EPISODES),
        Training("GRU", 512, 256, 128, dtype=bf16, who=IN_GRAPHS),
        *(
            replace(work, resets=0.03, who=EPISODES)
            for work in TRAINED_LAYERS
            if work.is_plain and work.density == 1 and work.batch < 256
        ),
        Training("GRU", 512, 256, 128, dtype=f32, tf32=True, resets=0.03, who=(*EPISODES, "torchrl")),
    ],
    "networks": networks(f16, IN_GRAPHS),
    "training-sweep": [
        Training(cell, hidden, batch, 512, dtype=dtype, tf32=dtype == f32, who=IN_GRAPHS)
        for cell, dtype in (("GRU", bf16), ("GRU", f32), ("LSTM", bf16), ("LSTM", f32), ("LSTM", f16))
        for hidden in (128, 256, 512, 1024, 2048)
        for batch in (1, 4, 16, 64)
    ],
}
