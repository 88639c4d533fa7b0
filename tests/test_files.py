"""Files are written atomically, and what is not a regular file stays what it is."""

import errno
import os
import re
import signal
import stat
import sys
import threading
from pathlib import Path

import pytest

from ostinato.files import check_file, locked, replacing


def write(path, text):
    with replacing(path) as temporary:
        assert temporary.name == path.name or path.is_symlink()
        temporary.write_text(text)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_folder_that_cannot_be_listed_is_written_into(tmp_path, monkeypatch):
    def refuse(_):
        raise PermissionError(errno.EACCES, "refused")

    monkeypatch.setattr(Path, "iterdir", refuse)
    write(tmp_path / "a.json", "text")
    assert (tmp_path / "a.json").read_text() == "text"


def test_permissions_stay(tmp_path):
    path = tmp_path / "a.json"
    write(path, "old")
    path.chmod(0o640)
    write(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_folders_are_made(tmp_path):
    write(tmp_path / "new" / "folder" / "a.json", "text")
    assert (tmp_path / "new" / "folder" / "a.json").read_text() == "text"


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_is_followed(tmp_path, there):
    (tmp_path / "real").mkdir()
    if there:
        (tmp_path / "real" / "a.json").write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(Path("real") / "a.json")
    check_file(link)
    write(link, "new")
    assert os.readlink(link) == "real/a.json"
    assert (tmp_path / "real" / "a.json").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["link.json", "real"]
    assert os.listdir(tmp_path / "real") == ["a.json"]


def test_a_fifo_is_written_into(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    received = []
    reader = threading.Thread(target=lambda: received.append(path.read_text()), daemon=True)
    reader.start()
    check_file(path)
    write(path, "text" * 100_000)
    reader.join(10)
    assert received == ["text" * 100_000]
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["fifo"]


def test_a_device_is_written_into():
    master, slave = os.openpty()
    try:
        path = Path(os.ttyname(slave))
        check_file(path)
        write(path, "text")
        assert os.read(master, 100) == b"text"
        assert stat.S_ISCHR(path.stat().st_mode)
    finally:
        os.close(master)
        os.close(slave)


def test_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(OSError, match="No space left on device") as caught, replacing(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as write does, without a name
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    with pytest.raises(PermissionError) as caught, replacing(path) as temporary:
        raise PermissionError(errno.EACCES, "refused", str(temporary))
    assert caught.value.filename == str(path)
    assert not os.listdir(tmp_path)


def test_a_folder_is_locked_for_one(tmp_path):
    with locked(tmp_path):
        message = f"{re.escape(str(tmp_path))}: expected a folder that no other process writes to; one does"
        with pytest.raises(OSError, match=message), locked(tmp_path):
            pass
    with locked(tmp_path):
        assert not os.listdir(tmp_path)


def hold(folder, held):
    with locked(folder):
        held.set()
        signal.pause()


def test_a_lock_ends_with_its_process(tmp_path, processes):
    held = processes.context.Event()
    process = processes.apart(hold, tmp_path, held)
    assert held.wait(60)
    with pytest.raises(OSError, match="one does now"), locked(tmp_path):
        pass
    process.kill()
    process.join(60)
    with locked(tmp_path):
        pass


def write_half(path, begun):
    with replacing(path) as temporary:
        temporary.write_text("half")
        begun.set()
        signal.pause()


def test_what_a_killed_process_has_left_is_removed_by_the_next_write(tmp_path, processes):
    path, begun = tmp_path / "a.json", processes.context.Event()
    process = processes.apart(write_half, path, begun)
    assert begun.wait(60)
    (held,) = tmp_path.iterdir()
    empty, elsewhere = held.with_name(f"{held.name}-empty"), tmp_path / ".ostinato-elsewhere-"
    empty.mkdir()  # as another process has made it just now
    elsewhere.mkdir()
    (elsewhere / "a.json").touch()  # of another machine, whose locks are not seen
    write(path, "text")
    assert (held / path.name).read_text() == "half"  # of a process that lives
    process.kill()
    process.join(60)
    write(tmp_path / "b.json", "text")
    assert sorted(tmp_path.iterdir()) == sorted([elsewhere, empty, path, tmp_path / "b.json"])


@pytest.mark.parametrize("how", ["no module", "no locks"])
def test_where_there_are_no_locks_a_warning_says_so(tmp_path, monkeypatch, how):
    fcntl = pytest.importorskip("fcntl")
    if how == "no module":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:

        def refuse(*_):
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match=f"{tmp_path} cannot be locked here") as caught, locked(tmp_path):
        pass
    assert caught[0].filename == __file__
