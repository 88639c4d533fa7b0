"""Compiled loops kept between processes: the right one or a new one, whatever has become of the files."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.registry import cpu_target
from torch import distributed

import small_loop
from ostinato.kernels import cache
from ostinato.kernels.cpu import compiler
from ostinato.kernels.persistent.cpu import step_loop
from ostinato.kernels.recurrence.arguments import LayerArguments
from ostinato.kernels.recurrence.linear import cpu, cpu_loops
from ostinato.kernels.recurrence.symbolic.trace import parse
from ostinato.minimal.recurrences import recurrence_of
from small_loop import result

SOURCE, TESTS = pathlib.Path(compiler.__file__).parents[3], pathlib.Path(small_loop.__file__).parent
STEPS = {"positive": 1.75, "linear": 1.5, "tanh": 0.5 * np.tanh(3.0)}  # of the layer below: sigmoid(0) * candidate(3)


def in_fresh_process(*factors, source=SOURCE, before=""):
    """The small loop's results, by the package in a folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (source, TESTS)))}
    code = f"{before}\nfrom small_loop import result\nprint(*map(result, {factors}))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def with_cache(folder, function, *arguments):
    """What a function returns, and how many loops it compiled."""
    count = 0

    def counted(*args, **options):
        nonlocal count
        count += 1
        return cfunc(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        cfunc = compiler.cfunc
        patch.setattr(compiler, "cfunc", counted)
        patch.setenv("OSTINATO_CACHE_DIR", str(folder.parent))
        return function(*arguments), count


def results(*factors):
    return [result(factor) for factor in factors]


def new_loop(candidate):
    """Compiled or loaded at each call."""
    trace = parse(recurrence_of("mingru", candidate, False))
    return cpu_loops.forward.__wrapped__(trace, np.float32), cpu_loops.work_of(trace, False)


def steps_of_layers(*candidates):
    compiled, steps = [(candidate, new_loop(candidate)) for candidate in candidates], []
    for candidate, loop in compiled:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "_loop", lambda *_, loop=loop: loop)
            recurrence, pre = recurrence_of("mingru", candidate, False), torch.tensor([[[0.0, 3.0]]]).float()
            steps.append(cpu.layer(LayerArguments(pre, None, None, None, None, recurrence, True, 1, "cpu"))[0].item())
    return steps


def step_of_rank():
    return steps_of_layers(list(STEPS)[distributed.get_rank()])


def refuse(*_, **__):
    pytest.fail("compiled what is in the cache")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ostinato"


def test_each_variant_and_each_revision_has_a_file_of_its_own(folder, tmp_path, processes):
    newer = tmp_path / "newer"
    shutil.copytree(SOURCE / "ostinato", newer / "ostinato", ignore=shutil.ignore_patterns("__pycache__"))
    inlined = newer / "ostinato" / "kernels" / "cpu" / "elementary.py"  # not the file that the loops are in
    old = "return large if x >= 0 else small"
    inlined.write_text(inlined.read_text().replace(old, "return cast(0.25, x), cast(0.75, x)\n    " + old))
    assert processes.run(1, with_cache, folder, results, 2.0) == [([1.0], 1)]
    files = {file: file.read_bytes() for file in folder.iterdir()}
    assert len(files) == 1
    assert in_fresh_process(2.0, 3.0, source=newer) == [0.5, 0.75]
    assert processes.run(1, with_cache, folder, results, 4.0, 2.0) == [([2.0, 1.0], 1)]
    assert len(list(folder.iterdir())) == 4
    assert all(file.read_bytes() == content for file, content in files.items())


def test_loops_that_differ_in_a_function_only_have_files_of_their_own(monkeypatch):
    """Those of a step of RNNs, whose activation is a function of a function."""
    keys, codegen = [], cpu_target.target_context.codegen()
    monkeypatch.setattr(step_loop, "compiled_loop", lambda loop: keys.append(compiler._cache_key(loop, codegen, "")))
    for cell in ("rnn_tanh", "rnn_relu", "rnn_tanh"):
        step_loop.step_loop.__wrapped__(np.float32, cell, "dense", 1, "dense", 1, False)
    assert keys[0] == keys[2] != keys[1]


def test_processes_that_compile_at_once_leave_all_variants(folder, processes):
    found = processes.run(len(STEPS), with_cache, folder, step_of_rank)
    assert found == [([pytest.approx(expected)], 1) for expected in STEPS.values()]
    assert len(list(folder.iterdir())) == len(STEPS)
    here = with_cache(folder, steps_of_layers, *STEPS)  # each was its process's first
    assert here == (pytest.approx(list(STEPS.values())), 0)


def test_processes_that_need_the_same_loop_compile_it_once(folder, processes):
    found = processes.run(3, with_cache, folder, result, 2.0)
    assert sorted(count for _, count in found) == [0, 0, 1]
    assert [value for value, _ in found] == [1.0] * 3
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("work", [(JITCodeLibrary, "_optimize_final_module"), (JITCPUCodegen, "_add_module")])
def test_what_loops_call_is_compiled_with_them_alone(folder, monkeypatch, work):
    """Optimising it beforehand, and machine code of its own, took a third of the time."""
    assert result(2.0) == 1.0  # and Numba's own libraries are there
    done, run, halved = [], getattr(*work), compiler.inline(lambda x: 0.5 + x)
    monkeypatch.setattr(*work, lambda *args: done.append(args) or run(*args))
    assert result(3.0, halved) == 1.5
    assert len(done) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_who_waits_for_a_kernel_does_not_wait_for_a_process_forked_meanwhile(folder, monkeypatch):
    import fcntl

    waiting, done, flock = threading.Event(), threading.Event(), fcntl.flock

    def wait():
        monkeypatch.setattr(fcntl, "flock", lambda *args: (waiting.set(), flock(*args)))
        with cache.alone("kernel"):
            done.set()

    with cache.alone("kernel"):
        threading.Thread(target=wait, daemon=True).start()
        assert waiting.wait(20)  # for the lock
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        assert done.wait(20)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_damaged_file_is_mended(folder):
    assert result(2.0) == 1.0
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1] + b"\0", b"\0" * len(whole)):
        file.write_bytes(damaged)
        assert result(2.0) == 1.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "cfunc", refuse)
            assert result(2.0) == 1.0


def test_a_folder_that_cannot_be_had_costs_a_compilation(monkeypatch):
    monkeypatch.setenv("OSTINATO_CACHE_DIR", "/dev/null/nowhere")
    assert result(2.0) == 1.0
    monkeypatch.delenv("OSTINATO_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", home)
    assert result(3.0) == 1.5


def test_loops_of_sources_that_cannot_be_read_are_not_kept(folder, monkeypatch):
    monkeypatch.setattr(compiler, "_SOURCES", None)
    assert result(2.0) == 1.0
    assert not folder.exists()


def test_loops_are_compiled_where_numba_compiles_no_functions(folder, monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert in_fresh_process(2.0, before="import numba; assert numba.config.DISABLE_JIT") == [1.0]


@pytest.mark.parametrize("how", ["a file system", "a stand-in"])
def test_a_full_disk_costs_a_compilation(folder, monkeypatch, how):
    folder.parent.mkdir()
    if how == "a file system":
        mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder.parent)]
        if sys.platform != "linux" or subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("needs the right to mount a file system")
    else:
        monkeypatch.setattr(pathlib.Path, "write_bytes", fill_the_disk)
    try:
        assert result(2.0) == 1.0
        assert list(folder.iterdir()) == []
        assert result(3.0) == 1.5
    finally:
        if how == "a file system":
            subprocess.run(["umount", str(folder.parent)], check=True)


def fill_the_disk(path, data):
    with path.open("wb") as file:
        file.write(data[: len(data) // 2])
    raise OSError(28, "No space left on device")
