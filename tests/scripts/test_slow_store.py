"""The slow store serves a folder. Tests assert no times, so its rate is not tested."""

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from scripts import slow_store
from tests.ports import free_port, wait_until_it_listens
from tests.servers import running

CONTENT = bytes(range(256)) * 400


def test_the_store_serves_a_folder_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "a.tar").write_bytes(CONTENT)
    port = free_port()
    arguments = [str(folder), "--port", str(port), "--kilobytes-per-s", "500"]
    store = subprocess.Popen([sys.executable, slow_store.__file__, *arguments], stdout=subprocess.PIPE)
    try:
        wait_until_it_listens(port, store)
        for kind in ("slow", "fast"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{kind}/a.tar", timeout=60) as answer:
                assert answer.read() == CONTENT
    finally:
        store.send_signal(signal.SIGINT)
        store.communicate(timeout=60)
    assert store.returncode == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/fast/a.tar", timeout=60)


def test_a_client_that_disconnects_causes_no_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.tar").write_bytes(CONTENT * 100)
    server = slow_store.make_server(tmp_path, 0, 100_000)
    server.daemon_threads = False  # the test waits for the threads
    with running(server):
        for kind in ("slow", "fast"):
            with socket.create_connection(server.server_address, timeout=60) as client:
                client.sendall(f"GET /{kind}/a.tar HTTP/1.0\r\n\r\n".encode())
                assert client.recv(100).startswith(b"HTTP/1.1 200")
    assert capfd.readouterr().err == ""
