"""The CUDA backend: one kernel, compiled at run time for an operation, a dtype and the shape of its tiles.

================  ==========================================================================================
``scans.py``      the backend's functions, for tensors of any layout
``problem.py``    the description of a scan: all that a launch depends on except addresses
``launch.py``     compiling and launching ``scan.cu``
``workspace.py``  the global memory through which chained blocks exchange their states
``heuristics/``   the choice of a scan's algorithm and tiles
``compose.py``    reducing many steps to one without writing states, by ``compose.cu`` and ``pass_on.cu``
================  ==========================================================================================

The kernel's source is ``scan.cu`` after the operations (``elements.cuh``), the shape of a tile and the places of
threads in it (``tile.cuh``, ``place.cuh``), loading and computing its steps (``copies.cuh``, ``shared.cuh``,
``resets.cuh``, ``steps.cuh``, ``rescan.cuh``), the compositions that steps are reduced to (``composition.cuh``), and
the messages between the blocks of a chain (``chain.cuh``, ``cluster.cuh``, ``messages.cuh``).
"""

from ostinato.kernels.scan.cuda.scans import (
    linear_scan,
    linear_scan_backward,
    log_linear_scan,
    log_linear_scan_backward,
    prepare_linear_scan,
    states_like,
)

__all__ = [
    "linear_scan",
    "linear_scan_backward",
    "log_linear_scan",
    "log_linear_scan_backward",
    "prepare_linear_scan",
    "states_like",
]
