"""Training on several processes: the curve of one process, intact checkpoints, and an end when a process dies."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ostinato
from ostinato.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ostinato.cli import main
from ostinato.models import LanguageModel
from ostinato.processes import Share, make_mesh, part
from ostinato.text import Vocabulary
from ostinato.training import Trainer, TrainingSettings
from recurrent_layers import fit

TEXT = "the quick brown fox jumps over the lazy dog\n" * 80
SETTINGS = {"steps": 6, "batch_size": 7, "chunk_length": 11, "warmup_steps": 2, "held_out": 0.3}


def trainer(cell="mingru", shard=False, accumulate=1, dropout=0.0, sequence_parallel=1):
    torch.manual_seed(0)
    model = LanguageModel(5, width=8, num_layers=2, cell=cell, dropout=dropout).double()
    tokens = torch.randint(5, (1400,), generator=torch.Generator().manual_seed(1))
    mesh = make_mesh("cpu", shard=shard, sequence_parallel=sequence_parallel)
    return Trainer(model, tokens, TrainingSettings(**SETTINGS), mesh=mesh, shard=shard, accumulate=accumulate)


def points(of):
    return [(point.step, point.tokens, point.train_loss, point.held_out_loss) for point in of.curve]


def assert_curves_close(found, expected):
    """Two curves, whose held-out losses are added up in float32."""
    for point, other in zip(found, expected, strict=True):
        assert point[:2] == other[:2]
        assert point[2] == pytest.approx(other[2], rel=1e-11)
        assert point[3] == pytest.approx(other[3], rel=1e-6)


def curve(*arguments):
    made = trainer(*arguments)
    for _ in range(3):
        made.advance(2)
        made.evaluate()
    return points(made)


def curves(*cases):
    return [curve(*case) for case in cases]


TRAIN = ["--width", "8", "--num-layers", "1", "--batch-size", "4", "--chunk-length", "16", "--dropout", "0"]
TRAIN += ["--evaluate-every", "2", "--device", "cpu"]


def start(folder, processes, *arguments):
    """`ostinato train` in a folder, under torchrun."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--rdzv-backend", "c10d"]
    launch += ["--rdzv-endpoint", "localhost:0"]  # a port of its own
    command = [sys.executable, *launch, "-m", "ostinato", "train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    return subprocess.Popen(command, cwd=folder, **options)


def train(folder, *arguments):
    """`ostinato train` in a folder, by the processes of a group, which torchrun would start and join."""
    torch.set_default_dtype(torch.float32)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.chdir(folder)
        patch.setenv("WORLD_SIZE", str(distributed.get_world_size()))
        patch.setattr(distributed, "init_process_group", lambda _: None)
        patch.setattr(distributed, "destroy_process_group", lambda: None)
        with pytest.raises(SystemExit) as stopped:
            main(["train", *arguments])
    return stopped.value.code


def train_on_a_text_of_its_own(folder):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        options = ["--output", "out", *TRAIN, "--chunk-length", "4", "--steps", "2"]
        code = train(folder, "--text", "/proc/self/stat", *options)
    return code, said.getvalue()


# Before what is quick, since the other worker would have nothing to do beside the last test.
def test_a_killed_process_ends_the_job_whose_checkpoint_goes_on(tmp_path, processes):
    (tmp_path / "text.txt").write_text(TEXT)
    job = start(tmp_path, 2, "--text", "text.txt", "--output", "cut", *TRAIN, "--steps", "100000")
    last = tmp_path / "cut" / "last.safetensors"
    while not last.exists():
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.05)
    threads = Path(f"/proc/{job.pid}/task").glob("*/children")
    workers = sorted(int(pid) for children in threads for pid in children.read_text().split())
    victim = workers[-1]
    os.kill(victim, signal.SIGKILL)
    out, err = job.communicate(timeout=60)
    assert job.returncode != 0
    # torchrun may have seen first what the others say when they lose it.
    assert re.search(rf"exitcode\s*: -9\b.*\(pid: {victim}\)", err), err
    assert out.count("Text:") == 1
    step = load_checkpoint(last).training["trainer"]["step"]
    assert step % 2 == 0

    more = ["--resume", str(last), "--device", "cpu", "--steps", str(step + 4)]
    assert processes.run(1, train, tmp_path, *more, "--output", "one") == [0]
    more += ["--shard", "--sequence-parallel", "2"]
    assert processes.run(2, train, tmp_path, *more, "--output", "two") == [0, 0]
    found = [load_checkpoint(tmp_path / folder / last.name).training["trainer"]["curve"] for folder in ("one", "two")]
    assert [point["step"] for point in found[0]] == [point["step"] for point in found[1]]
    for one, other in zip(*found, strict=True):
        assert one["held_out_loss"] == pytest.approx(other["held_out_loss"], rel=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_processes_gives_the_curve_of_one(processes, size):
    cases = [("mingru",), ("mingru", True), ("lstm", False, 2 if size == 2 else 1), ("minlstm", True)]
    cases += [("mingru", False, 1, 0.0, 2), ("minlstm", True, 1, 0.0, size)]
    alone = processes.run(1, curves, *(case[:1] for case in cases))[0]
    for found in processes.run(size, curves, *cases):
        for one, several in zip(alone, found, strict=True):
            assert_curves_close(several, one)


def test_accumulated_gradients_are_those_of_the_whole_batch(processes):
    whole, parts = processes.run(1, curves, ("mingru",), ("mingru", False, 3))[0]
    assert_curves_close(parts, whole)


def exchanges(accumulate):
    """How many gradients DDP exchanged in two steps."""
    made, count = trainer(accumulate=accumulate), 0

    def counted(state, bucket):
        nonlocal count
        count += 1
        return allreduce_hook(state, bucket)

    made._replica.register_comm_hook(None, counted)
    made.advance(2)
    return count


def test_gradients_are_exchanged_once_a_step(processes):
    assert processes.run(2, exchanges, 3) == processes.run(2, exchanges, 1)


def saved(path, shard, dropout):
    made = trainer(shard=shard, dropout=dropout)
    made.advance(3)
    state, tensors = made.state()
    save_checkpoint(path, Checkpoint(made.model, Vocabulary("abcde"), state, tensors))
    made.advance(3)
    made.evaluate()
    return points(made)


def resumed(path, shard, dropout):
    checkpoint, fresh = load_checkpoint(path), trainer(shard=shard, dropout=dropout)
    made = Trainer(
        checkpoint.model.double(),
        torch.cat([fresh.train_tokens, fresh.held_out_tokens]),
        TrainingSettings(**SETTINGS),
        mesh=make_mesh("cpu", shard=shard),
        shard=shard,
    )
    made.restore(checkpoint.training, checkpoint.training_tensors)
    made.advance(3)
    made.evaluate()
    return points(made)


def test_a_checkpoint_goes_on_on_any_number_of_processes(processes, tmp_path):
    path = tmp_path / "last.safetensors"
    whole = processes.run(2, saved, path, True, 0.0)[0]
    assert os.listdir(tmp_path) == [path.name]
    for size, shard in ((1, False), (2, False), (4, True)):
        for found in processes.run(size, resumed, path, shard, 0.0):
            assert_curves_close(found, whole)
    one = processes.run(1, saved, path, False, 0.0)[0]
    assert_curves_close(processes.run(2, resumed, path, True, 0.0)[1], one)


def test_each_process_draws_its_own_dropout_and_goes_on_with_it(processes, tmp_path):
    path = tmp_path / "last.safetensors"
    whole = processes.run(2, saved, path, False, 0.5)
    assert processes.run(2, resumed, path, False, 0.5) == whole
    assert "dropout.1" in load_checkpoint(path).training_tensors
    first, second = processes.run(2, dropped)
    assert first != second


def dropped():
    trainer(dropout=0.5)
    return torch.rand(3).tolist()


def test_processes_with_different_texts_are_refused(processes, tmp_path):
    message = "ostinato: error: /proc/self/stat: expected the same text in all processes; it differs\n"
    assert processes.run(2, train_on_a_text_of_its_own, tmp_path) == [(1, message)] * 2
    assert processes.run(1, train_on_a_text_of_its_own, tmp_path) == [(0, "")]


def test_shares_cover_everything_once():
    for number in (0, 1, 5, 16):
        parts = [part(number, rank, 3) for rank in range(3)]
        assert [i for some in parts for i in range(number)[some]] == list(range(number))


def shares(shard, sequence_parallel):
    return Share.on(make_mesh("cpu", shard=shard, sequence_parallel=sequence_parallel))


def test_neighbours_share_a_sequence(processes):
    for shard in (False, True):
        found = processes.run(4, shares, shard, 2)
        assert [tuple(share) for share in found] == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]


def test_what_cannot_be_divided(processes):
    with pytest.raises(ValueError, match="sequence_parallel must divide the number of processes, 1; got 2"):
        make_mesh("cpu", sequence_parallel=2)
    with pytest.raises(TypeError, match="sequence_parallel must be an int; got float"):
        make_mesh("cpu", sequence_parallel=1.0)
    with pytest.raises(
        ValueError, match="batch_size must be at least 8, a row for each of 8 parts on 1 processes; got 7"
    ):
        trainer(accumulate=8)


LAYERS = {
    "GRU": lambda: ostinato.GRU(5, 8, 2, bidirectional=True),
    "LSTM": lambda: ostinato.LSTM(5, 8),
    "RNN": lambda: ostinato.RNN(5, 8),
    "pruned LSTM": lambda: ostinato.prune(ostinato.LSTM(5, 16), 0.3, block=(8, 4)),
    "MinGRU": lambda: ostinato.MinGRU(5, 8, 2, bidirectional=True),
    "MinLSTM": lambda: ostinato.MinLSTM(5, 8, candidate="tanh"),
    "RGLRU": lambda: ostinato.RGLRU(5, 8),
    "ParaGRU": lambda: ostinato.ParaGRU(5, 8),
    "SLSTM": lambda: ostinato.SLSTM(5, 8, 2, bidirectional=True),
}


def layers_errors():
    rank, size = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    x = torch.randn(5, 6, 4, 5, generator=torch.Generator().manual_seed(1))
    errors = {}
    for name, make in LAYERS.items():
        for wrap in (nn.parallel.DistributedDataParallel, lambda layer: fully_shard(layer, mesh=mesh)):
            made = []
            for _ in range(2):
                torch.manual_seed(0)
                made.append(make())
            single, shared = made
            shared = wrap(shared)
            fit(single, x[:4])
            fit(shared, x[:4, :, part(4, rank, size)])
            with torch.no_grad():
                errors[name, wrap.__name__] = (shared(x[4])[0] - single(x[4])[0]).abs().max().item()
    return errors


def test_every_layer_trains_as_in_one_process(processes):
    for found in processes.run(2, layers_errors):
        assert all(error < 1e-9 for error in found.values()), found


def prune_a_shard():
    model = nn.Sequential(ostinato.LSTM(5, 8))
    with pytest.raises(ValueError, match="module must be pruned before fully_shard; got one that is sharded"):
        ostinato.prune(fully_shard(model, mesh=init_device_mesh("cpu", (1,))), 0.3)
    return list(model.buffers())


def test_shards_are_not_pruned(processes):
    assert processes.run(1, prune_a_shard) == [[]]
