"""The time of a frame in ``examples/audio.py``, for the documentation: some seconds on one core.

python benchmarks/audio.py --output benchmarks/results/audio-cpu.json
"""

import argparse
import runpy
from pathlib import Path

import torch

from ostinato.bench.runs import environment, write_json

EXAMPLE = Path(__file__).parents[1] / "examples" / "audio.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    head = environment(torch.device("cpu"))
    results = runpy.run_path(str(EXAMPLE))["main"]()
    rows = [{"network": name, "median": median, "slow": slow} for name, (median, slow) in results.items()]
    write_json(output, {"benchmark": "audio", **head, "results": rows})


if __name__ == "__main__":
    main()
