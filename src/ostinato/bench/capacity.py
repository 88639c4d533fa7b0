"""The largest recurrent layers whose weights fit on a chip, by the kernels' own plans; nothing is run."""

from types import SimpleNamespace
from typing import Any

import torch

from ostinato.bench.grid import Grid
from ostinato.bench.workloads import name_of
from ostinato.kernels.persistent.cuda.heuristics.search import choose_geometry
from ostinato.kernels.persistent.plan import GATES, Plan
from ostinato.masks import BLOCKS, block_name

H100 = SimpleNamespace(  # as CUDA reports an SXM module, and an H200 too; used where there is no GPU
    name="NVIDIA H100 or H200",
    multi_processor_count=132,
    shared_memory_per_block_optin=232_448,
    regs_per_multiprocessor=65_536,
    L2_cache_size=50 << 20,
    major=9,
)
BATCH, DTYPE = 4, torch.float16
CELLS = {"RNN": "rnn_tanh", "GRU": "gru", "LSTM": "lstm"}
DENSITIES = (1.0, 0.3, 0.1, 0.05)
STEP = 16  # hidden sizes tried are multiples of it
COARSE_STEP = 16 * STEP  # of the first part of the search

Row = dict[str, Any]


def capacity(device: torch.device) -> list[Row]:
    """Find each cell's largest hidden size whose weights stay in registers and shared memory, by density and block.

    The L2 cache is not used for weights.  On a CPU, the chip is an H100.
    """
    reported: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else H100
    properties = SimpleNamespace(**{name: getattr(reported, name) for name in vars(H100)} | {"L2_cache_size": 0})
    shapes: list[tuple[float, tuple[int, int] | None]] = [(1.0, None)]
    shapes += [(density, block) for density in DENSITIES[1:] for block in BLOCKS[::-1]]
    rows = []
    for cell in CELLS:
        for density, block in shapes:
            plan, hidden = _largest(CELLS[cell], density, block, properties)
            rows.append(
                {
                    "device": properties.name,
                    "cell": cell,
                    "density": density,
                    "block": block,
                    "batch": BATCH,
                    "dtype": name_of(DTYPE),
                    "hidden_size": hidden,
                    "path": plan.path,
                    "bytes_on_chip": plan.bytes_on_chip,
                    "bytes_available": plan.bytes_available,
                }
            )
    return rows


def _largest(cell: str, density: float, block: tuple[int, int] | None, properties: Any) -> tuple[Plan, int]:
    """Return the largest layer that fits, searched downwards from the size whose weights alone would fill the chip."""

    def plan(hidden: int) -> Plan:
        weights = None if block is None else int(density * GATES[cell] * hidden**2)
        return choose_geometry(cell, hidden, BATCH, DTYPE, weights, block, properties)

    available = plan(STEP).bytes_available
    hidden = int((available / (GATES[cell] * density * DTYPE.itemsize)) ** 0.5) // STEP * STEP
    while hidden > COARSE_STEP and not plan(hidden - COARSE_STEP).has_kernel:
        hidden -= COARSE_STEP
    while hidden > 0 and not plan(hidden).has_kernel:
        hidden -= STEP
    return plan(hidden), hidden


def shape_name(row: Row) -> str:
    """The density and the shape of the pruned blocks, such as "10% in 16x1", or "dense"."""
    return "dense" if row["block"] is None else f"{row['density']:.0%} in {block_name(row['block'])}"


def table(rows: list[Row]) -> Grid:
    """Tabulate the hidden sizes by cell, each with the size of its matrix relative to the largest dense layer's."""
    dense = {row["cell"]: row["hidden_size"] for row in rows if row["block"] is None}
    sizes: dict[str, list[str]] = {}
    for row in rows:
        weights = (row["hidden_size"] / dense[row["cell"]]) ** 2
        sizes.setdefault(shape_name(row), []).append(f"{row['hidden_size']:,} ({weights:.1f}×)")
    title = (
        f"the largest hidden size on the chip of an {rows[0]['device']}, {rows[0]['dtype']}, batch {rows[0]['batch']}"
    )
    return Grid(["weights kept", *CELLS], [[kept, *row] for kept, row in sizes.items()], title)
