"""The CUDA backend: a kernel that is compiled at run time for an operation, a dtype and a shape of tiles.

================  ==========================================================================================
``scans.py``      the backend: tensors of any layout in and out
``problem.py``    what a scan is launched with, but for addresses
``launch.py``     the launch of ``scan.cu``
``workspace.py``  the memory in which chained blocks tell each other their states
``heuristics/``   which algorithm and tiles a scan has
``compose.py``    many steps reduced to one without writing states, by ``compose.cu`` and ``pass_on.cu``
================  ==========================================================================================

``scan.cu`` is put together of the operations in ``elements.cuh``, the shape of a tile and the places of threads in it
(``tile.cuh``, ``place.cuh``), its steps (``copies.cuh``, ``shared.cuh``, ``resets.cuh``, ``steps.cuh``,
``rescan.cuh``), what they are reduced to (``composition.cuh``) and what blocks of one chain tell each other
(``chain.cuh``, ``cluster.cuh``, ``messages.cuh``).
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
