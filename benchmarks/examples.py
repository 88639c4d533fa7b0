"""Writes what a program of ``examples/`` returns to a JSON file, for the documentation.

Programs run on one core, and take seconds; reinforcement takes minutes.

python benchmarks/examples.py audio --output benchmarks/results/audio-cpu.json
python benchmarks/examples.py recurrent_gemma --device cuda --output benchmarks/results/recurrent-gemma-gpu.json
"""

import argparse
import runpy
from pathlib import Path
from typing import Any

import torch

from ostinato.bench.runs import environment, write_json

FOLDER = Path(__file__).parents[1] / "examples"
# The arguments of its main, what the keys of its results name, and the names of each result's values.
RESULTS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "audio": ({}, "network", ("median", "slow")),
    "reinforcement": ({"picture": None}, "policy", ("curve", "steps_per_second")),
    "recurrent_gemma": ({"device": None}, "work", ("loop", "recurrence")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RESULTS)
    parser.add_argument("--device", default="cpu", help="for an example that takes one")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    options, key, parts = RESULTS[arguments.name]
    if "device" in options:
        options = {**options, "device": arguments.device}
    torch.set_num_threads(1)
    head = environment(torch.device(arguments.device))
    results = runpy.run_path(str(FOLDER / f"{arguments.name}.py"))["main"](**options)
    rows = [{key: name, **dict(zip(parts, values, strict=True))} for name, values in results.items()]
    write_json(arguments.output, {"benchmark": arguments.name, **head, "results": rows})


if __name__ == "__main__":
    main()
