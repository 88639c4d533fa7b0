"""Writes the errors and speeds of several GPUs of a machine, compared with one of them, to a JSON file.

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --output distributed-nvidia-h200.json

Results are compared with those of one process, then timed.  Times are medians over runs, each run's being that of its
slowest process; "alone" is one process that does the same without the others.
"""

import argparse
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from ostinato.bench.runs import environment, write_json
from parallel import errors, speeds
from parallel.job import Job, Record, free

PARTS = {
    part.__name__: part
    for part in (
        errors.correctness,
        speeds.scans,
        speeds.layer,
        speeds.language_model,
        speeds.long_sequence,
        errors.training,
        errors.curves,
        speeds.exchanges,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--scale", type=int, default=0, help="sizes are divided by 2 to the power of this")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be given several times")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.backends.cudnn.allow_tf32 = False  # GRU and LSTM in float32, to be compared with one process's
    distributed.init_process_group(backend, timeout=timedelta(minutes=1))  # in case another process failed
    job = Job(options.scale)
    record: Record = {"environment": environment(job.device), "gpus": job.size}
    for name in options.part or PARTS:
        begin = time.perf_counter()
        try:
            result = PARTS[name](job)
        except Exception:  # the other parts may still run
            result = {name: traceback.format_exc()}
            print(f"process {job.rank}:", result[name], flush=True)
        record |= result
        free()
        if job.rank == 0:
            print(f"{name}: {time.perf_counter() - begin:.1f} s", result, flush=True)
            write_json(options.output, record)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
