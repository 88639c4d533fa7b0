"""The tables of the papers and projects behind this library, each a sweep over one size, with the published figures.

==================  =============================================================================================
``lengths-*``       a course project's minGRU and minLSTM in CUDA on an RTX 4090 (CS179, Caltech), sizes not stated
``transfer-*``      the repository CUDA_RNN (NumPy and Numba) on an RTX 3070 Laptop, input 64, hidden 128
``density-*``       Zhu et al. 2018, "Sparse Persistent RNNs", arXiv 1804.10223: H = 2304, batch 4, 30 % kept,
``hidden``          with one of these sizes varied at a time
``batch``, ``steps``
``training-*``      Feng et al. 2024, "Were RNNs All We Needed?", arXiv 2410.01201, section 4.1: batch 64 on a T4
==================  =============================================================================================
"""

from dataclasses import replace

from ostinato.bench.peers import CELL_LOOPS, FROM_HOST, TIME_LOOP
from ostinato.bench.shapes import GRAPHS, PLAIN, PRUNED, PRUNED_ON_HOST
from ostinato.bench.sweep import Ratio, Sweep, Values
from ostinato.bench.workloads import OURS, Layer, RecurrentLayer, Workload

LENGTHS = tuple(4**power for power in range(4, 9))  # 256 to 65,536
DEMO_LENGTHS = tuple(4**power for power in range(4, 10))  # 256 to 262,144
TRANSFER_LENGTHS = tuple(2**power for power in range(3, 11))  # 8 to 1,024
DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
NAMES = {"mingru": "MinGRU", "minlstm": "MinLSTM"}
TORCH = {"mingru": "torch.nn.GRU", "minlstm": "torch.nn.LSTM"}

# Milliseconds by T.
PUBLISHED_LENGTHS: dict[str, dict[str, Values]] = {
    "mingru": {
        "published: CPU time loop": {256: 634, 1024: 2395, 4096: 5493},
        "published: CPU scan": {256: 32.8, 1024: 97.6, 4096: 300, 16384: 2683, 65536: 10989},
        "published: GPU scan": {256: 25.8, 1024: 92.1, 4096: 340, 16384: 1333, 65536: 5330},
    },
    "minlstm": {
        "published: CPU time loop": {256: 701.0, 1024: 2966.7, 4096: 12035.1},
        "published: CPU scan": {256: 37.0, 1024: 96.8, 4096: 416.5, 16384: 2993.6, 65536: 13005.4},
        "published: GPU scan": {256: 22.0, 1024: 107.8, 4096: 431.5, 16384: 1693.9, 65536: 6709.8},
    },
}
# Milliseconds by T, with the transfer on the GPU; then the repository's own ratios of these.
PUBLISHED_TRANSFER: dict[str, dict[str, Values]] = {
    "mingru": {
        "published: CPU": {
            8: 0.101, 16: 0.323, 32: 0.703, 64: 1.147, 128: 3.436, 256: 8.134, 512: 12.369, 1024: 28.504
        },
        "published: GPU with the transfer": {
            8: 8.272, 16: 1.157, 32: 1.696, 64: 2.08, 128: 1.484, 256: 1.76, 512: 2.938, 1024: 4.52
        },
    },
    "minlstm": {
        "published: CPU": {
            8: 0.244, 16: 0.422, 32: 0.938, 64: 1.562, 128: 3.826, 256: 9.929, 512: 19.686, 1024: 42.319
        },
        "published: GPU with the transfer": {
            8: 7.168, 16: 13.222, 32: 1.425, 64: 2.307, 128: 3.449, 256: 1.591, 512: 3.178, 1024: 4.482
        },
    },
}  # fmt: skip
PUBLISHED_RATIOS: dict[str, Values] = {
    "mingru": {8: 0.01, 16: 0.28, 32: 0.41, 64: 0.55, 128: 2.32, 256: 4.62, 512: 4.21, 1024: 6.31},
    "minlstm": {8: 0.03, 16: 0.03, 32: 0.66, 64: 0.68, 128: 1.11, 256: 6.24, 512: 6.19, 1024: 9.44},
}

# Options of recurrent layers on the CPU, where they are pruned.
ON_CPU = PRUNED_ON_HOST | {"who": (*PLAIN, RecurrentLayer.limit_name)}
ON_GPU = (*GRAPHS, "cuSPARSE", RecurrentLayer.limit_name)
OTHERS = ("torch.nn", "torch.nn in a CUDA graph", "GEMMs in a CUDA graph", "cuSPARSE")
SPARSE_KERNEL, IN_BLOCKS = "Ostinato, sparse kernel", f"{OURS} in 16x1 blocks"


def next_best(ours: str = OURS, published: Values | None = None) -> Ratio:
    """Return the ratio of the fastest contestant other than Ostinato to one of Ostinato's lines."""
    return Ratio(f"next best / {ours}", OTHERS, ours, published or {})


def sweeps(quick: bool) -> list[Sweep]:
    """Return the sweeps of all tables; those of `quick` take less than two minutes on two cores."""
    tables = [
        *(lengths_sweep(cell, 512, LENGTHS) for cell in NAMES),
        *(_transfer(cell) for cell in NAMES),
        *(_density(cell) for cell in ("RNN", "LSTM")),
        _hidden(),
        _batch(),
        _steps(),
        _training(512, (64, 256), (64, 256, 1024), small=64),
        _training(4096, (64,), (64, 256), small=0),
    ]
    if not quick:
        return tables
    return [
        replace(
            table,
            workloads={
                device_type: [work for work in works if getattr(work, table.axis) <= table.small]
                for device_type, works in table.workloads.items()
            },
        )
        for table in tables
        if table.small
    ]


def _forward(cell: str, lengths: tuple[int, ...], size: int, hidden: int, *who: str) -> list[Workload]:
    return [Layer(cell, 1, length, size, hidden, passes=("forward",), who=who) for length in lengths]


def lengths_sweep(cell: str, size: int, lengths: tuple[int, ...]) -> Sweep:
    """Sweep a layer's forward pass over sequence lengths: a loop over time, the scan, and PyTorch's counterpart."""
    name, other = NAMES[cell], TORCH[cell]
    works = _forward(cell, lengths, size, size, TIME_LOOP, OURS, other)
    return Sweep(
        f"lengths-{cell}",
        f"{name} forward, batch 1, {size} inputs, {size} hidden, float32",
        "length",
        "sequence length T (time steps)",
        {"cpu": works, "cuda": works},
        together=True,
        quantity="latency_seconds",
        published=PUBLISHED_LENGTHS[cell] if size == 512 else {},
        ratios=(
            Ratio("CPU: time loop / scan", f"{name}, time loop, CPU", f"{name}, scan, CPU"),
            Ratio(f"CPU: {other} / scan", f"{other}, CPU", f"{name}, scan, CPU"),
            Ratio(f"GPU: {other} / scan", f"{other}, GPU", f"{name}, scan, GPU"),
        ),
        note="Published: a course project's CUDA on an RTX 4090 and an i9-12900K, at sizes that it does not state: "
        "no ratio to it would mean anything."
        if size == 512
        else "",
        small=16384,
    )


def _transfer(cell: str) -> Sweep:
    name = NAMES[cell]
    scans = f"{name}, scan, CPU", f"{name}, scan, GPU", f"{name}, scan and transfer, GPU"
    return Sweep(
        f"transfer-{cell}",
        f"{name} forward, batch 1, 64 inputs, 128 hidden, float32: CPU against GPU",
        "length",
        "sequence length T (time steps)",
        {
            "cpu": _forward(cell, TRANSFER_LENGTHS, 64, 128, OURS, TORCH[cell]),
            "cuda": _forward(cell, TRANSFER_LENGTHS, 64, 128, OURS, FROM_HOST, TORCH[cell]),
        },
        together=True,
        quantity="latency_seconds",
        published=PUBLISHED_TRANSFER[cell],
        ratios=(
            Ratio("CPU / GPU", scans[0], scans[1]),
            Ratio("CPU / GPU with the transfer", scans[0], scans[2], PUBLISHED_RATIOS[cell]),
        ),
        note="Published: CUDA_RNN on an RTX 3070 Laptop with the transfer both ways; its CPU side is a loop in NumPy.",
    )


def _density(cell: str) -> Sweep:
    singly, blocks = (*ON_GPU, SPARSE_KERNEL), (OURS, "Ostinato, block kernel")
    return Sweep(
        f"density-{cell.lower()}",
        f"{cell} forward over density",
        "density",
        "density of the recurrent weights",
        {
            "cpu": [RecurrentLayer(cell, 1024, **ON_CPU | {"density": density}) for density in DENSITIES],
            "cuda": [
                *(RecurrentLayer(cell, 2304, 4, density=density, who=singly) for density in DENSITIES),
                *(
                    RecurrentLayer(cell, 2304, 4, density=density, block=(16, 1), who=blocks)
                    for density in DENSITIES[:-1]
                ),
            ],
        },
        unit="us a step",
        ratios=(next_best(SPARSE_KERNEL, {0.3: 6.0}), next_best(), next_best(IN_BLOCKS)),
        note="Published: more than 6 times the next best at 30 %, by a kernel of single weights as our sparse one, "
        "on a GPU of 2018.",
        sizes={"cpu": "1024 hidden, batch 1, float32", "cuda": "2304 hidden, batch 4, float16"},
    )


def _hidden() -> Sweep:
    return Sweep(
        "hidden",
        "RNN forward over hidden size, 10 % in 16x1 blocks",
        "hidden",
        "hidden size H",
        {
            "cpu": [RecurrentLayer("RNN", hidden, **ON_CPU) for hidden in (256, 512, 1024, 2304)],
            "cuda": [
                RecurrentLayer("RNN", hidden, 4, who=ON_GPU, **PRUNED) for hidden in (256, 768, 1024, 2304, 4608, 8192)
            ],
        },
        unit="us a step",
        ratios=(next_best(IN_BLOCKS),),
        sizes={"cpu": "batch 1, float32", "cuda": "batch 4, float16"},
        small=512,
    )


def _batch() -> Sweep:
    return Sweep(
        "batch",
        "LSTM forward over batch",
        "batch",
        "batch size B",
        {
            "cpu": [RecurrentLayer("LSTM", 384, batch, 100, **ON_CPU) for batch in (1, 4, 16, 64)],
            "cuda": [
                RecurrentLayer("LSTM", 2304, batch, density=0.3, who=(*ON_GPU, SPARSE_KERNEL))
                for batch in (1, 2, 4, 8, 16, 32, 64)
            ],
        },
        unit="us a step",
        ratios=(next_best(), next_best(IN_BLOCKS)),
        sizes={"cpu": "384 hidden, 10 % in 16x1 blocks, float32", "cuda": "2304 hidden, 30 %, float16"},
        small=4,
    )


def _steps() -> Sweep:
    return Sweep(
        "steps",
        "LSTM forward over time steps",
        "length",
        "time steps T",
        {
            "cpu": [RecurrentLayer("LSTM", 384, 1, length, **ON_CPU) for length in (1, 16, 256, 4096)],
            "cuda": [
                RecurrentLayer("LSTM", 2304, 4, length, density=0.3, who=ON_GPU) for length in (16, 64, 256, 1024, 4096)
            ],
        },
        unit="us a step",
        ratios=(next_best(), next_best(IN_BLOCKS)),
        sizes={
            "cpu": "384 hidden, batch 1, 10 % in 16x1 blocks, float32",
            "cuda": "2304 hidden, batch 4, 30 %, float16",
        },
        small=256,
    )


def _training(length: int, on_cpu: tuple[int, ...], on_gpu: tuple[int, ...], small: int) -> Sweep:
    def works(sizes: tuple[int, ...]) -> list[Workload]:
        return [
            Layer(cell, 64, length, n, n, passes=("forward+backward",), who=(OURS, TORCH[cell], CELL_LOOPS[cell]))
            for n in sizes
            for cell in NAMES
        ]

    pairs = [(cell, other) for cell in NAMES for other in (TORCH[cell], CELL_LOOPS[cell])]
    return Sweep(
        f"training-{length}",
        f"forward and backward, batch 64, T = {length:,}, as many inputs as hidden units, float32",
        "channels",
        "hidden size H",
        {"cpu": works(on_cpu), "cuda": works(on_gpu)},
        ratios=tuple(Ratio(f"{other} / {NAMES[cell]}", other, f"{NAMES[cell]}, scan") for cell, other in pairs),
        note="Published of a T4, at T = 512: GRU takes 175 times as long as minGRU, LSTM 235 times as minLSTM; "
        "at 4,096 both over 1,300 times.",
        small=small,
    )
