"""Compiled loops kept between processes: the right one or a new one, whatever has become of the files."""

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from ostinato.kernels import numba_loops
from ostinato.kernels.recurrence import cpu, cpu_loops
from ostinato.kernels.recurrence.trace import parse
from ostinato.minimal.recurrences import recurrence_of

SOURCE = pathlib.Path(numba_loops.__file__).parents[2]
STEP = """
import sys, torch
from ostinato.kernels.recurrence import cpu
from ostinato.minimal.recurrences import recurrence_of
pre = torch.tensor([[[0.0, 3.0]]])
recurrences = (recurrence_of("mingru", candidate, False) for candidate in sys.argv[1:])
print(*(cpu.layer(recurrence, pre, None, None, None, None, True, 1)[0].item() for recurrence in recurrences))
"""
STEPS = {"positive": 1.75, "linear": 1.5, "tanh": 0.5 * np.tanh(3.0)}  # of the layer in STEP: sigmoid(0) * candidate(3)


def start(candidates, source=SOURCE, before=""):
    """A process that prints the step with each candidate, of the package in a folder."""
    environment = os.environ | {"PYTHONPATH": str(source)}
    code = [sys.executable, "-c", before + STEP, *candidates]
    return subprocess.Popen(code, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process):
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return [float(word) for word in output.split()]


def new_loop(candidate):
    """Compiled or loaded at each call."""
    trace = parse(recurrence_of("mingru", candidate, False))
    return cpu_loops.forward.__wrapped__(trace, np.float32), cpu_loops.work_of(trace, False)


def step(candidate, loop=None):
    """The step in this process, by a loop or by a new one."""
    loop = loop or new_loop(candidate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_loop", lambda *_: loop)
        recurrence, pre = recurrence_of("mingru", candidate, False), torch.tensor([[[0.0, 3.0]]])
        return cpu.layer(recurrence, pre, None, None, None, None, True, 1)[0].item()


def refuse(*_, **__):
    pytest.fail("compiled what is in the cache")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ostinato"


def test_each_variant_and_each_revision_has_a_file_of_its_own(folder, tmp_path):
    newer = tmp_path / "newer"
    shutil.copytree(SOURCE / "ostinato", newer / "ostinato", ignore=shutil.ignore_patterns("__pycache__"))
    inlined = newer / "ostinato" / "kernels" / "numba_math.py"  # not the file that the loops are in
    old = "return large if x >= 0 else small"
    inlined.write_text(inlined.read_text().replace(old, "return cast(0.25, x), cast(0.75, x)\n    " + old))
    assert finish(start(["positive"])) == pytest.approx([STEPS["positive"]])
    files = {file: file.read_bytes() for file in folder.iterdir()}
    assert len(files) == 1
    assert finish(start(["positive", "linear"], newer)) == pytest.approx([0.875, 0.75])
    assert finish(start(["tanh", "positive"])) == pytest.approx([STEPS["tanh"], STEPS["positive"]])
    assert len(list(folder.iterdir())) == 4
    assert all(file.read_bytes() == content for file, content in files.items())


def test_processes_that_compile_at_once_leave_all_variants(folder, monkeypatch):
    processes = {start([candidate]): expected for candidate, expected in STEPS.items()}
    for process, expected in processes.items():
        assert finish(process) == pytest.approx([expected])
    assert len(list(folder.iterdir())) == len(STEPS)
    monkeypatch.setattr(numba_loops, "cfunc", refuse)
    loops = [(candidate, new_loop(candidate)) for candidate in STEPS]  # each was its process's first
    assert [step(*loop) for loop in loops] == pytest.approx(list(STEPS.values()))


def test_processes_that_need_the_same_loop_compile_it_once(folder, tmp_path):
    counting = f"""
from ostinato.kernels import numba_loops
cfunc = numba_loops.cfunc
def counted(*args, **options):
    open({str(tmp_path / "compiled")!r}, "a").write("x")
    return cfunc(*args, **options)
numba_loops.cfunc = counted
"""
    processes = [start(["positive"], before=counting) for _ in range(2)]
    assert [finish(process) for process in processes] == [pytest.approx([STEPS["positive"]])] * 2
    assert (tmp_path / "compiled").read_text() == "x"
    assert len(list(folder.iterdir())) == 1


def test_a_damaged_file_is_mended(folder):
    expected = step("tanh")
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1] + b"\0", b"\0" * len(whole)):
        file.write_bytes(damaged)
        assert step("tanh") == expected
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(numba_loops, "cfunc", refuse)
            assert step("tanh") == expected


def test_a_folder_that_cannot_be_had_costs_a_compilation(monkeypatch):
    monkeypatch.setenv("OSTINATO_CACHE_DIR", "/dev/null/nowhere")
    assert step("positive") == STEPS["positive"]
    monkeypatch.delenv("OSTINATO_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", home)
    assert step("linear") == STEPS["linear"]


def test_loops_of_sources_that_cannot_be_read_are_not_kept(folder, monkeypatch):
    monkeypatch.setattr(numba_loops, "_SOURCES", None)
    assert step("linear") == STEPS["linear"]
    assert not folder.exists()


def test_loops_are_compiled_where_numba_compiles_no_functions(folder, monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert finish(start(["linear"], before="import numba; assert numba.config.DISABLE_JIT")) == [STEPS["linear"]]


@pytest.mark.parametrize("how", ["a file system", "a stand-in"])
def test_a_full_disk_costs_a_compilation(folder, monkeypatch, how):
    folder.parent.mkdir()
    if how == "a file system":
        mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder.parent)]
        if sys.platform != "linux" or subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("needs the right to mount a file system")
    else:
        monkeypatch.setattr(pathlib.Path, "write_bytes", fill_the_disk)
    try:
        assert step("positive") == STEPS["positive"]
        assert list(folder.iterdir()) == []
        assert step("linear") == STEPS["linear"]
    finally:
        if how == "a file system":
            subprocess.run(["umount", str(folder.parent)], check=True)


def fill_the_disk(path, data):
    with path.open("wb") as file:
        file.write(data[: len(data) // 2])
    raise OSError(28, "No space left on device")
