"""One writer per folder: flock on a host, a heartbeat between hosts."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from subprocess import PIPE

import pytest

from adaecho.errors import FolderError
from adaecho.records import folder as lock
from adaecho.records.folder import FolderLock, is_held
from tests.forks import FORKS

HOLD = """
import sys
from pathlib import Path
from adaecho.records.folder import FolderLock
FolderLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(folder):
    """A process that holds the folder."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


def write_lock(folder, age_s=0.0, host="elsewhere"):
    path = folder / "lock"
    path.write_text(json.dumps({"host": host, "pid": 1, "token": "t"}))
    os.utime(path, (time.time() - age_s,) * 2)


@contextmanager
def held(folder):
    """Hold the lock inside the block."""
    mine = FolderLock(folder)
    mine.acquire()
    assert mine.is_mine()
    yield mine
    mine.release()
    assert not mine.is_mine()


def is_refused(folder, says):
    with pytest.raises(lock.FolderInUseError, match=says):
        FolderLock(folder).acquire()


def is_free(folder):
    with held(folder):
        pass


def test_a_live_process_keeps_the_lock_even_if_stopped_and_a_dead_one_loses_it(tmp_path):
    with another_process(tmp_path) as process:
        says = f"process {process.pid} on host {socket.gethostname()}"
        is_refused(tmp_path, says)
        os.kill(process.pid, signal.SIGSTOP)
        os.utime(tmp_path / "lock", (time.time() - 10 * lock.STALE_AFTER_S,) * 2)
        is_refused(tmp_path, says)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        is_free(tmp_path)


def test_a_process_of_another_host_holds_the_lock_while_its_heart_beats(tmp_path):
    write_lock(tmp_path, lock.STALE_AFTER_S - 30)
    is_refused(tmp_path, "process 1 on host elsewhere")
    write_lock(tmp_path, lock.STALE_AFTER_S + 30)
    is_free(tmp_path)
    write_lock(tmp_path, host=socket.gethostname())  # a live process of this host would hold the flock
    is_free(tmp_path)


def test_without_flock_the_heartbeat_decides(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refused)
    with held(tmp_path):
        is_refused(tmp_path, f"process {os.getpid()}")
    is_free(tmp_path)
    write_lock(tmp_path, lock.STALE_AFTER_S + 30, host=socket.gethostname())
    is_free(tmp_path)


def test_the_writer_sends_a_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    with held(tmp_path) as mine:
        os.utime(mine.path, (0, 0))
        for _ in range(20_000):
            if mine.path.stat().st_mtime > 0:
                break
            time.sleep(0.01)
        assert mine.path.stat().st_mtime > 0


@pytest.mark.parametrize("torn", ["", '{"host": "els'], ids=["nothing", "a part"])
def test_the_lock_of_a_process_killed_before_it_wrote_its_name_is_taken_over(tmp_path, torn):
    (tmp_path / "lock").write_text(torn)
    is_free(tmp_path)


def test_releasing_a_lock_that_was_taken_over_leaves_it(tmp_path):
    mine = FolderLock(tmp_path)
    mine.acquire()
    write_lock(tmp_path)
    assert not mine.is_mine()
    mine.release()
    assert json.loads((tmp_path / "lock").read_text())["host"] == "elsewhere"


def test_one_of_many_takes_a_stale_lock(tmp_path):
    barrier = threading.Barrier(8)

    def race(one):
        barrier.wait()
        with suppress(FolderError):
            one.acquire()

    for _ in range(20):
        write_lock(tmp_path, 10 * lock.STALE_AFTER_S)
        locks = [FolderLock(tmp_path) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(race, locks))
        (holder,) = [one for one in locks if one.is_mine()]
        holder.release()


def test_a_forked_child_does_not_keep_the_lock_of_its_parent(tmp_path):
    mine = FolderLock(tmp_path)
    mine.acquire()
    child = FORKS.Process(target=time.sleep, args=(100,))
    child.start()
    os.close(mine._descriptor)  # as at the parent's death
    lock._descriptors.discard(mine._descriptor)
    mine._descriptor = -1
    deadline = time.monotonic() + 100
    taken = FolderLock(tmp_path)
    while not taken.is_mine() and time.monotonic() < deadline:
        time.sleep(0.01)
        with suppress(FolderError):
            taken.acquire()
    assert taken.is_mine()
    taken.release()
    child.kill()
    child.join()


def test_a_folder_is_held_while_its_lock_is_signed_and_fresh(tmp_path):
    assert not is_held(tmp_path)
    with held(tmp_path):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)
    write_lock(tmp_path, lock.STALE_AFTER_S + 30)
    assert not is_held(tmp_path)
