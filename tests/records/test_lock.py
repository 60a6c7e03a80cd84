import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE

import pytest

from adaecho.errors import FolderError
from adaecho.records import lock
from adaecho.records.lock import FolderLock, is_held, process_start

HOLD = """
import sys
from pathlib import Path
from adaecho.records.lock import FolderLock
FolderLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(folder):
    """One that holds the folder."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


def write_lock(folder, age_s=0.0, **changes):
    holder = {"folder": str(folder), "host": "elsewhere", "pid": 1, "process_start": "x", "since": "today"}
    holder |= {"token": "t", **changes}
    path = folder / "lock"
    path.write_text(json.dumps(holder))
    os.utime(path, (time.time() - age_s,) * 2)


@contextmanager
def held(folder):
    """A lock on it, which is this process's inside."""
    mine = FolderLock(folder)
    mine.acquire()
    assert mine.is_mine()
    yield mine
    mine.release()


def is_refused(folder, says):
    with pytest.raises(lock.FolderInUseError, match=says):
        FolderLock(folder).acquire()


def is_free(folder):
    assert not is_held(folder)
    with held(folder):
        pass


def test_a_live_process_is_named_also_one_that_is_stopped_however_long_and_a_dead_one_is_none(tmp_path):
    with another_process(tmp_path) as process:
        is_refused(tmp_path, f"process {process.pid} on host {socket.gethostname()}")
        os.kill(process.pid, signal.SIGSTOP)
        os.utime(tmp_path / "lock", (time.time() - 10 * lock.STALE_AFTER_S,) * 2)
        is_refused(tmp_path, f"process {process.pid}")
        process.kill()
        # Not waited for: a dead child that its parent has not collected yet holds nothing.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        is_free(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_second_writer_in_this_process_is_refused(tmp_path):
    second = FolderLock(tmp_path)
    with held(tmp_path) as first:
        with pytest.raises(FolderError, match=f"process {os.getpid()}"):
            second.acquire()
        assert not second.is_mine()
        second.release()
        assert first.is_mine()
    second.acquire()
    second.release()


def test_a_reused_pid_is_not_the_holder(tmp_path):
    write_lock(tmp_path, host=socket.gethostname(), pid=os.getpid(), process_start="another boot:17")
    is_free(tmp_path)


@pytest.mark.parametrize("here", [False, True], ids=["on another host", "hidden by hidepid"])
def test_who_cannot_be_looked_up_counts_as_alive_while_its_heart_beats(tmp_path, monkeypatch, here):
    """``hidepid`` shows each user their own processes alone."""
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "process_start": process_start(os.getpid())}
    read_text = Path.read_text

    def hidden(path, *arguments, **named):
        if path.name == "stat":
            raise PermissionError(13, "Permission denied")
        return read_text(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", hidden)
    write_lock(tmp_path, lock.STALE_AFTER_S - 30, **(holder if here else {}))
    is_refused(tmp_path, "is writing this folder since today")
    write_lock(tmp_path, -10_000, **(holder if here else {}))
    is_refused(tmp_path, r"in the future, as a clock was set back.*remove .*/lock")
    write_lock(tmp_path, lock.STALE_AFTER_S + 30, **(holder if here else {}))
    is_free(tmp_path)


def test_the_heart_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    with held(tmp_path) as mine:
        os.utime(mine.path, (0, 0))
        for _ in range(20_000):
            if mine.path.stat().st_mtime > 0:
                break
            time.sleep(0.01)
        assert mine.path.stat().st_mtime > 0


@pytest.mark.parametrize("torn", ["", '{"host": "els', "[" * 100_000], ids=["nothing", "a part", "depth"])
@pytest.mark.parametrize("age_s", [10**9, -10_000], ids=["old", "of the future"])
def test_a_lock_whose_writer_was_killed_before_it_signed_is_taken_over(tmp_path, monkeypatch, torn, age_s):
    monkeypatch.setattr(lock, "_UNNAMED_AFTER_S", 0.1)
    (tmp_path / "lock").write_text(torn)
    os.utime(tmp_path / "lock", (time.time() - age_s,) * 2)
    with held(tmp_path):
        pass


def test_a_folder_copied_while_its_run_lives_is_free_and_one_that_was_moved_is_not(tmp_path):
    with another_process(tmp_path / "run") as process:
        shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=shutil.copy2)
        is_free(tmp_path / "copy")
        is_refused(tmp_path / "run", f"process {process.pid}")
        (tmp_path / "run").rename(tmp_path / "moved")
        is_refused(tmp_path / "moved", f"process {process.pid}")


def test_a_lock_that_was_taken_over_is_left_to_its_new_holder(tmp_path):
    with held(tmp_path) as mine:
        write_lock(tmp_path)
        assert not mine.is_mine()
    assert json.loads((tmp_path / "lock").read_text())["host"] == "elsewhere"


def test_of_many_that_find_a_stale_lock_one_wins(tmp_path):
    barrier = threading.Barrier(8)

    def race(one):
        barrier.wait()
        with suppress(FolderError):
            one.acquire()

    for _ in range(20):
        write_lock(tmp_path, host=socket.gethostname(), process_start="gone")
        locks = [FolderLock(tmp_path) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(race, locks))
        (holder,) = [one for one in locks if one.is_mine()]
        holder.release()


def test_a_folder_that_is_moved_aside_while_its_lock_is_taken_is_made_again(tmp_path, monkeypatch):
    folder, aside, alone = tmp_path / "run", tmp_path / "run.old-1", lock.alone

    @contextmanager
    def moved(path):
        with alone(path):
            if not aside.exists():
                path.rename(aside)
            yield

    monkeypatch.setattr(lock, "alone", moved)
    with held(folder):
        assert os.listdir(aside) == []


def test_a_process_that_was_forked_meanwhile_keeps_no_other_out(tmp_path, monkeypatch):
    opened, copies = os.open, []

    def forked(*arguments):
        descriptor = opened(*arguments)
        copies.append(os.dup(descriptor))  # as a child has it
        return descriptor

    monkeypatch.setattr(lock.os, "open", forked)
    with lock.alone(tmp_path):
        pass
    copies.append(opened(tmp_path, os.O_RDONLY))
    fcntl.flock(copies[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    for descriptor in copies:
        os.close(descriptor)


def test_process_start_tells_processes_apart():
    # Process 1 began long before this one; a parent may have begun in the same clock tick.
    assert process_start(os.getpid()) == process_start(os.getpid()) != process_start(1)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert process_start(child.pid) is None


def test_a_lock_that_is_given_back_while_it_is_looked_at_is_in_use_and_no_error(tmp_path, monkeypatch):
    holder, other = FolderLock(tmp_path), FolderLock(tmp_path)
    holder.acquire()

    def alive_and_then_gone(*_):
        holder.release()
        return True

    monkeypatch.setattr(FolderLock, "_is_alive", alive_and_then_gone)
    with pytest.raises(lock.FolderInUseError, match="is writing this folder"):
        other.acquire()
    other.acquire()  # and free from then on
    other.release()


def test_a_holder_that_tidies_up_while_another_process_looks_is_no_error(tmp_path, monkeypatch):
    write_lock(tmp_path)
    touch, probes = Path.touch, []

    def tidied_away(path):
        touch(path)
        probes.append(path.name)
        if len(probes) == 1:
            path.unlink()

    monkeypatch.setattr(Path, "touch", tidied_away)
    assert is_held(tmp_path)
    assert len(set(probes)) == 2


@pytest.mark.parametrize(("age_s", "expected"), [(0.0, True), (lock.STALE_AFTER_S + 30, False)])
def test_who_may_only_read_sees_whether_a_folder_is_held(tmp_path, monkeypatch, age_s, expected):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    write_lock(tmp_path, age_s)
    monkeypatch.setattr(Path, "touch", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    assert is_held(tmp_path) == expected


def test_a_folder_that_is_moved_while_another_process_looks_is_not_held(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    write_lock(folder)
    monkeypatch.setattr(Path, "touch", lambda path: path.parent.rename(tmp_path / "run.old-1") / "none")
    assert not is_held(folder)


@pytest.mark.parametrize(
    "odd",
    [*({"pid": value} for value in ("12", "../self", -1, 0, 10**30, 1.5, True, None, [1], {"a": 1})),
     {"host": 3}, {"folder": 7}, {"folder": "a\0b"}, {"since": None}, {"token": ["x"]}, {"process_start": 4}],
    ids=str,
)  # fmt: skip
def test_a_lock_of_which_no_process_can_be_the_holder_is_taken_over(tmp_path, odd):
    with held(tmp_path):
        holder = json.loads((tmp_path / "lock").read_text())
    (tmp_path / "lock").write_text(json.dumps(holder | odd))
    os.utime(tmp_path / "lock", (1, 1))
    is_free(tmp_path)
