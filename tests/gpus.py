"""GPUs that kernels are compiled and planned for in tests that run without one."""

from types import SimpleNamespace

from ostinato.kernels.scan.cuda.heuristics.criteria import Device

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
GPUS = {
    "A100": Device(108, 1.94e12, 163 << 10, 164 << 10),
    "L4": Device(58, 0.3e12, 99 << 10, 100 << 10),
    "H100": Device(132, 3.35e12, 227 << 10, 228 << 10, True),
    "H200": Device(132, 4.9e12, 227 << 10, 228 << 10, True),
    "B200": Device(148, 8e12, 227 << 10, 228 << 10, True),
}
H100 = SimpleNamespace(  # its properties, named as in torch
    multi_processor_count=132,
    shared_memory_per_block_optin=232448,
    regs_per_multiprocessor=65536,
    L2_cache_size=50 << 20,
    major=9,
)
