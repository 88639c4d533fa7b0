"""The curves and the speed of ``examples/reinforcement.py``, for the documentation: some minutes on one core.

python benchmarks/reinforcement.py --output benchmarks/results/reinforcement-cpu.json
"""

import argparse
import runpy
from pathlib import Path

import torch

from ostinato.bench.runs import environment, write_json

EXAMPLE = Path(__file__).parents[1] / "examples" / "reinforcement.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    head = environment(torch.device("cpu"))
    results = runpy.run_path(str(EXAMPLE))["main"](picture=None)
    rows = [{"policy": name, "curve": curve, "steps_per_second": speed} for name, (curve, speed) in results.items()]
    write_json(output, {"benchmark": "reinforcement", **head, "results": rows})


if __name__ == "__main__":
    main()
