"""The geometries and shapes that the CUDA scans are tested with, and comparisons of their results."""

import torch

from ostinato.kernels.recurrence.linear import cuda as recurrence_cuda
from ostinato.kernels.scan.cuda import launch
from ostinato.kernels.scan.cuda import scans as cuda
from ostinato.kernels.scan.cuda.heuristics import choice

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_SHARED = {"lanes": 8, "vec": 1, "chained": True, "narrow": 0, "stages": 1, "resident": 2}  # chains of several blocks
_WIDE = _SHARED | {"warps": 2, "rows": 8}
GEOMETRIES = {
    "chosen": None,
    "streaming": {"chained": False, "looks_back": False},
    "chained": {"chained": True, "looks_back": False, "warps": 2, "rows": 2, "resident": 2},
    "looking back": {"chained": True, "looks_back": True, "warps": 2, "rows": 2, "stages": 1, "resident": 2},
    "lanes 4": {"lanes": 4, "vec": 1, "warps": 2, "rows": 3, "narrow": 0},
    "lanes 8 chained": _SHARED | {"warps": 4, "rows": 2},
    "wide copies": _WIDE,
    "tensor maps": _WIDE | {"looks_back": False, "mapped": True},
    "one warp": {"warps": 1, "rows": 1},
    "in clusters": {"chained": False, "looks_back": False, "warps": 2, "rows": 2, "stages": 1, "cluster": 3},
}
# Rows that are not aligned.  In 16 bits: in one wave of tiles by two, nine and 32 warps; by look-back; streamed.
ODD = [(16, 300, 31), (4, 2100, 65), (8, 300, 1023), (1, 1100, 1025), (150, 70, 33), (3, 700, 130)]
# Few channels or steps: by look-back over whole rows, by one wave of tiles of rows, by one to eight warps per sequence.
FEW = [(12, 700, 5), (3, 900, 19), (1, 3000, 20), (600, 6, 24), (140, 3, 300), (600, 29, 33)]
FEW += [(1500, 60, 7), (700, 130, 3), (400, 300, 2), (150, 300, 1), (800, 40, 31), (300, 150, 12), (140, 700, 16)]
FEW += [(8, 4200, 24), (20, 2500, 18)]  # several blocks share each sequence
# Short sequences of few channels, several of which are scanned as one on a GPU of up to 150 multiprocessors.
JOINED = [(3000, 13, 1), (6000, 1, 5), (4500, 30, 3), (3001 * 2, 9, 7), (12000, 150, 1), (5280, 5, 16)]
JOINED += [(13200, 13, 5)]  # two of these joined have a shape that would be joined again


def force(monkeypatch, name):
    """Run scans with this geometry, whatever would be chosen."""
    for prepared in (launch._prepare, cuda._prepare_scan, recurrence_cuda._prepare_layer):
        prepared.cache_clear()  # they hold other geometries
    changes = GEOMETRIES[name]
    if changes is None:
        return
    choose = launch.choose_geometry.__wrapped__
    monkeypatch.setattr(choice, "staying", lambda *_: None)  # whose tiles have no other algorithm

    def forced(scan):
        geometry = choose(scan)._replace(**changes)
        return geometry._replace(mapped=geometry.mapped and scan.mappable)

    monkeypatch.setattr(launch, "choose_geometry", forced)


def relative_error(got, want):
    want = want.double()
    scale = want.abs().max().clamp(min=1e-2)  # below, float16 is subnormal
    return ((got.double().cpu() - want).abs().max() / scale).item()


def assert_close(got, want, tolerance):
    """Assert that the same results are None, and that the errors of the others are small."""
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        assert g is None or relative_error(g, w) < tolerance


def gpu(*tensors):
    """Copy those tensors to the GPU that are not None."""
    return [None if x is None else x.cuda() for x in tensors]


def boundaries(steps, sequences=5):
    """Draw the boundaries of packed sequences of random lengths, some of which may be empty."""
    inner = torch.randint(0, steps + 1, (sequences - 1,)).sort().values
    return torch.cat((torch.tensor([0]), inner, torch.tensor([steps]))).int()
