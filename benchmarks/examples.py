"""What a program in ``examples/`` returns, for the documentation: on one core, seconds, but reinforcement minutes.

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
# How its main is called, and what its results are: of what, and their parts.
RESULTS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "audio": ({}, "network", ("median", "slow")),
    "reinforcement": ({"picture": None}, "policy", ("curve", "steps_per_second")),
    "recurrent_gemma": ({"device": None}, "work", ("loop", "recurrence")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RESULTS)
    parser.add_argument("--device", default="cpu", help="of an example that runs on any")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    options, of_what, parts = RESULTS[arguments.name]
    if "device" in options:
        options = {**options, "device": arguments.device}
    torch.set_num_threads(1)
    head = environment(torch.device(arguments.device))
    results = runpy.run_path(str(FOLDER / f"{arguments.name}.py"))["main"](**options)
    rows = [{of_what: name, **dict(zip(parts, values, strict=True))} for name, values in results.items()]
    write_json(arguments.output, {"benchmark": arguments.name, **head, "results": rows})


if __name__ == "__main__":
    main()
