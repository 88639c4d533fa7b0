"""The JSON files of runs, with the environment in which they were measured."""

import json
import math
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import ostinato
from ostinato.files import replacing

PACKAGES = (
    *("numpy", "numba", "triton", "cuda-core", "accelerated-scan", "minGRU-pytorch", "torchrl", "transformers"),
    *("flash-linear-attention", "flashrnn", "lrnnx", "pararnn-torch"),
)


def environment(device: torch.device) -> dict[str, Any]:
    """Return what measurements depend on: device, versions, commit and date."""
    versions = {
        "ostinato": ostinato.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **{package: _version(package) for package in PACKAGES},
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "device_type": device.type,
        "processor": device_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "versions": versions,
        "commit": _commit(),
    }


def device_name(device: torch.device) -> str:
    """Return the GPU's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        fields = dict(re.findall(r"^(model name|cpu family|model)\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M))
    except OSError:
        fields = {}
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" not in fields or re.search(r"\d", name):
        return name
    # Virtual machines leave the number out of the model's name.
    return f"{name} (family {fields['cpu family']}, model {fields['model']})"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of this package's checkout, with "-dirty" if files have changed, or None outside a checkout.

    The environment variable ``OSTINATO_COMMIT`` overrides it, for copies without history.
    """
    source = Path(__file__).parents[1]
    if commit := os.environ.get("OSTINATO_COMMIT"):
        return commit
    try:
        git = ["git", "-C", str(source)]
        top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True)
        if Path(top.stdout.strip()) / "src" / "ostinato" != source:
            return None
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", str(source)], check=False)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + "-dirty" * (changed.returncode != 0)


def path_for(path: Path, name: str, device: torch.device) -> Path:
    """Return the file of a run: `path`, or in a folder a file named after the run and the type of device.

    A path that does not exist is taken for a folder if its name has no suffix.
    """
    is_folder = path.is_dir() or not (path.suffix or path.exists())
    return path / f"{name}-{'gpu' if device.type == 'cuda' else device.type}.json" if is_folder else path


def plot_for(path: Path) -> Path:
    """Return the path of the plot beside a run's file.  Raises ValueError if they are the same, in .png."""
    plot = path.with_suffix(".png")
    if plot == path:
        raise ValueError(f"json must not end in .png, as the plot beside it does; got {path}")
    return plot


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the file atomically; numbers that are not finite, which JSON does not have, become null."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
