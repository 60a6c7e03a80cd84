"""Servers that wait, drip, send on or are asked with secrets: told, bounded, and named without them."""

import io
import logging
import re
import socketserver
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho import IndexedTarShards, Retries, TarShards
from adaecho.shards import ArchiveError, TransferError, remote, tar
from adaecho.shards.remote import Transfer
from tests.servers import running
from tests.shards.archives import NUM_EXAMPLES, number_of, read_all

CONTENT = np.random.default_rng(0).bytes(5000)
QUICK = Retries(tries=3, delay_s=0.001, timeout_s=0.5, tell_after_s=0.1)
SECRET_USER, SECRET_QUERY = "bob:hunter22", "sig=5ecre7sig"
Answer = Callable[["Connection"], None]


class Connection(socketserver.StreamRequestHandler):
    """Gives each request to the server's ``answer``."""

    def handle(self) -> None:
        server: Any = self.server
        line, *fields = iter(lambda: self.rfile.readline().decode().strip(), "")
        self.path, self.fields = line.split()[1], dict(field.split(": ", 1) for field in fields)
        server.asked.append((self.path, self.fields))
        with suppress(OSError):  # the client has gone
            server.answer(self)

    def send(self, head: str, content: bytes = b"") -> None:
        self.wfile.write(f"HTTP/1.1 {head}\r\nConnection: close\r\n\r\n".encode() + content)

    def send_content(self, content: bytes = CONTENT) -> None:
        first, _, last = self.fields.get("Range", "bytes=0-")[6:].partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        status = f"206 x\r\nContent-Range: bytes {first}-{len(content) - 1}/{len(content)}"
        self.send(f"{status}\r\nContent-Length: {len(part)}", part)

    def drip(self, content: bytes, pause_s: float) -> None:
        for byte in content:
            self.wfile.write(bytes([byte]))
            time.sleep(pause_s)


@contextmanager
def served(answer: Answer) -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """Host and port, and what is asked: paths and fields."""
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection)
    server.daemon_threads, server.block_on_close = True, False
    server.asked, server.answer = [], answer  # type: ignore[attr-defined]
    with running(server):
        yield f"127.0.0.1:{server.server_address[1]}", server.asked  # type: ignore[attr-defined]


def silent(connection: Connection) -> None:
    connection.rfile.read(1)


def test_a_server_that_never_answers_is_told_in_each_try(caplog: pytest.LogCaptureFixture) -> None:
    retries = replace(QUICK, timeout_s=2.0)  # much longer than until it is told, on a machine however busy
    with served(silent) as (host, _), pytest.raises(TransferError, match="after 3 tries: TimeoutError"):
        read_all(f"http://{SECRET_USER}@{host}/a.tar?{SECRET_QUERY}", retries)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    first, second, third = caplog.messages
    shown = re.escape(f"http://***@{host}/a.tar?***")
    assert re.fullmatch(rf"{shown}: in try 1 of 3: no data for \d+ s: it has not answered", first)
    assert re.fullmatch(rf"{shown}: in try 2 of 3: no data for \d+ s: TimeoutError: timed out", second)
    assert "in try 3 of 3" in third


def test_a_wait_is_seen_on_stderr_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    handlers, logging.root.handlers = logging.root.handlers, []  # as in a script of its own
    try:
        with served(silent) as (host, _), pytest.raises(TransferError):
            read_all(f"http://{host}/a.tar", replace(QUICK, timeout_s=2.0, tries=1))
    finally:
        logging.root.handlers = handlers
    assert capfd.readouterr().err.count("no data for") == 1


def test_a_server_that_falls_silent_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def answer(connection: Connection) -> None:
        if len(asked) > 1:
            connection.send_content()
        else:
            connection.send(f"200 x\r\nContent-Length: {len(CONTENT)}", CONTENT[:100])
            silent(connection)

    with served(answer) as (host, asked):
        assert read_all(f"http://{host}/a", replace(QUICK, timeout_s=2.0)) == CONTENT
        assert [fields.get("Range") for _, fields in asked] == [None, "bytes=100-"]
    assert caplog.messages[0].endswith(": it sends no more")


def test_nobody_is_told_of_a_read_that_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with served(Connection.send_content) as (host, _):
        transfer = Transfer(f"http://{host}/a", retries=QUICK)
        assert transfer.read(10) == CONTENT[:10]
        time.sleep(0.3)  # the reader's own time
        assert transfer.read(10_000) == CONTENT[10:]
        transfer.close()
    assert caplog.messages == []


def test_a_transfer_that_drips_ends_and_keeps_what_it_gained(caplog: pytest.LogCaptureFixture) -> None:
    def answer(connection: Connection) -> None:
        if len(asked) == 3:
            connection.send_content()
            return
        connection.send(f"206 x\r\nContent-Range: bytes {len(asked) and starts()[-1]}-4999/5000")
        connection.drip(CONTENT, 0.02)

    def starts() -> list[int]:
        return [int(fields.get("Range", "bytes=0-")[6:-1]) for _, fields in asked]

    with served(answer) as (host, asked):
        assert len(read_all(f"http://{host}/a", QUICK)) == len(CONTENT)
        first, second, third = starts()
        assert first == 0 < second < third < 200
    slow = [message for message in caplog.messages if "slower than 1024 bytes a second" in message]
    assert [message.partition(" of 3")[0][-1] for message in slow] == ["1", "2"]

    def drip(connection: Connection) -> None:
        connection.send("200 x")
        connection.drip(CONTENT, 0.02)

    with served(drip) as (host, asked):
        with pytest.raises(TransferError, match="after 2 tries: slower than 1024 bytes a second for"):
            read_all(f"http://{host}/a", Retries(tries=2, delay_s=0.001, timeout_s=0.3))
        assert len(asked) == 2


@pytest.mark.timeout(60)  # whole, it would take fifty minutes
def test_a_header_that_drips_ends() -> None:
    head = b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + 60_000 * b"x"
    with served(lambda connection: connection.drip(head, 0.05)) as (host, asked):
        with pytest.raises(
            TransferError, match=r"after 3 tries: TimeoutError: no whole header within 0\.5 s"
        ):
            read_all(f"http://{host}/a", QUICK)
        assert len(asked) == 3


@pytest.mark.parametrize(
    ("asked_for", "waits"), [("7", 7), ("100000", 120), ("0", 0.5), ("soon", 0.5), ("date", 30), ("-3", 0.5)]
)
def test_a_time_to_ask_again_is_kept_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked_for: str, waits: float
) -> None:
    def answer(connection: Connection) -> None:
        text = formatdate(time.time() + 30, usegmt=True) if asked_for == "date" else asked_for
        if len(asked) > 1:
            connection.send_content()
        else:
            connection.send(f"503 Busy\r\nRetry-After: {text}")

    rested: list[float] = []
    monkeypatch.setattr(remote, "rest", rested.append)
    with served(answer) as (host, asked):
        assert read_all(f"http://{host}/a", Retries()) == CONTENT
    assert rested == [pytest.approx(waits, abs=5 if asked_for == "date" else 0)]
    told = [message for message in caplog.messages if "503: Busy; it asks to wait" in message]
    assert len(told) == (waits > 1)


@pytest.mark.parametrize("target", ["ftp://{host}/a", "file:///etc/hostname", "http://u:hunter22@{host}/b"])
def test_a_redirect_elsewhere_is_not_followed(target: str) -> None:
    def answer(connection: Connection) -> None:
        connection.send(f"302 x\r\nLocation: {target.format(host=host)}")

    with served(answer) as (host, asked):
        with pytest.raises(TransferError, match="HTTP Error 302") as caught:
            read_all(f"http://{host}/a", QUICK)
        assert "hunter22" not in told(caught.value)
        assert len(asked) == 1


def test_a_user_is_named_to_the_same_host_alone() -> None:
    def answer(connection: Connection) -> None:
        if connection.path == "/b":
            connection.send_content()
        else:
            body = "302 x\r\nContent-Length: 1000000"  # which nobody waits for
            connection.send(f"{body}\r\nLocation: http://{other if connection.path == '/away' else host}/b")

    with served(Connection.send_content) as (other, elsewhere):
        with served(answer) as (host, asked):
            for path in ("/here", "/away"):
                assert read_all(f"http://{SECRET_USER}@{host}{path}", QUICK) == CONTENT
        assert ["Authorization" in fields for _, fields in asked] == [True, True, True]
        assert ["Authorization" in fields for _, fields in elsewhere] == [False]


def told(error: BaseException) -> str:
    """All that may be shown of an error: with its causes and contexts."""
    causes = [str(one) for one in (error.__cause__, error.__context__) if one is not None]
    return "\n".join([*traceback.format_exception_only(error), str(error), *causes])


class NamingError(Exception):
    """An error of a library that names what it was asked for, without its scheme."""


@pytest.mark.parametrize(
    "url",
    [
        "http://bob:hunt/er22@h.invalid/a.tar",
        "http://bob:hunt#er22@h.invalid/a.tar",
        "http://bob:hunt?er22@h.invalid/a.tar",
        "http://bob:h@nt/er22@h.invalid/a.tar",
        "http://h.invalid:port/a.tar;token=er22",
        "http://h.invalid:port/a.tar#access_token=er22",
        "http://h.invalid/a b.tar?sig=er22 and er22",
        "naming://KEY:er22/SECRET@bucket/a.tar",
        "naming://bucket/a.tar?sig=er22",
    ],
)
def test_no_error_of_a_transfer_names_a_secret(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def name_it(url: str, start: int, end: int | None) -> None:  # noqa: ARG001
        raise NamingError(f"no bucket {url.partition('://')[2]!r}, {url}")

    monkeypatch.setattr(remote, "_open_fsspec", name_it)
    with pytest.raises(TransferError, match="failed") as caught:
        read_all(url, Retries(tries=1))
    text = told(caught.value)
    assert not re.search("er22|hunt|SECRET", text)
    assert "/a" in text or "***@***" in text


def test_errors_of_archives_and_origins_name_no_secret(folder: Path) -> None:
    def answer(connection: Connection) -> None:
        connection.send_content((folder / connection.path.partition("?")[0].strip("/")).read_bytes())

    with served(answer) as (host, _):
        url = f"http://{SECRET_USER}@{host}/shard-00{{0..3}}.tar?{SECRET_QUERY}"
        index = folder / "index.npz"
        shards = IndexedTarShards(url, index=index, retries=QUICK)
        assert shards.origin(0) == f"example 0 of http://***@{host}/shard-000.tar?*** (byte 0)"
        kept = str([array.tolist() for array in np.load(index).values()]).encode() + index.read_bytes()
        assert not re.search(b"hunter22|bob|5ecre7sig", kept)
        anew = IndexedTarShards(url.replace("5ecre7sig", "another"), index=index, retries=QUICK)
        assert [number_of(anew[row]) for row in range(NUM_EXAMPLES)] == list(range(NUM_EXAMPLES))
        with pytest.raises(ValueError, match="it is of other shards"):
            IndexedTarShards(url.replace("3}", "2}"), index=index)
        (folder / "shard-001.tar").write_bytes(b"x" * 2048)
        with pytest.raises(ArchiveError, match="no tar header") as caught:
            list(TarShards(url, retries=QUICK))
        assert not re.search("hunter22|bob|5ecre7sig", told(caught.value))


def test_a_lack_of_memory_is_no_broken_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def open_stream(*args: Any) -> None:
        tries.append(args)
        raise MemoryError

    monkeypatch.setattr(remote, "open_stream", open_stream)
    with pytest.raises(MemoryError):
        read_all("http://h/a", QUICK)
    assert len(tries) == 1


NO_URL = "InvalidURL: it is no url, or sends on to"
NO_LENGTH = "its Content-Length is '.{0,40}', no number of bytes"


@pytest.mark.parametrize(
    ("head", "message"),
    [
        *(
            (f"302 Found\r\nLocation: {url}\r\nContent-Length: 0", NO_URL)
            for url in ("http://a..b/", f"http://{'a' * 70}.de/", "http://[::1/", "http://\u20ac/")
        ),
        *((f"200 OK\r\nContent-Length: {length}", NO_LENGTH) for length in ("12abc", "-5", "", "9" * 5000)),
        ("\x1b[2J 200", r"BadStatusLine: HTTP/1\.1 \\x1b\[2J 200"),  # would clear the terminal
    ],
)
def test_heads_that_can_not_be_say_what_is_wrong(head: str, message: str) -> None:
    with (
        served(lambda connection: connection.send(head)) as (host, _),
        pytest.raises(TransferError, match=message),
    ):
        read_all(f"http://{host}/", QUICK)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["first", "between", "trailer"])
def test_a_chunked_answer_whose_lines_have_no_end_is_given_up(kind: str) -> None:
    def answer(connection: Connection) -> None:
        connection.send("200 x\r\nTransfer-Encoding: chunked", b"" if kind == "first" else b"5\r\nhello\r\n")
        if kind == "trailer":
            connection.wfile.write(b"0\r\n")
            while True:
                connection.wfile.write(b"a: b\r\n")
        connection.drip(b"0" * 1000, 0.05)

    with served(answer) as (host, _), pytest.raises(TransferError):
        read_all(f"http://{host}/a", replace(QUICK, tries=2))


@pytest.mark.timeout(60)
def test_zeros_behind_an_archive_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(connection: Connection) -> None:
        connection.send("200 x")  # without a length
        while True:
            connection.wfile.write(bytes(1 << 16))

    monkeypatch.setattr(tar, "_MOST_PADDING", 1 << 20)
    with served(answer) as (host, _), pytest.raises(ArchiveError, match="byte 0, and zeros follow"):
        list(tar.groups(Transfer(f"http://{host}/a.tar", retries=QUICK), read=True))


def test_zeros_where_the_rest_of_a_copy_was_to_come_are_no_end(tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    with tarfile.open(shard, "w") as archive:
        for name in ("a.bin", "b.bin"):
            member = tarfile.TarInfo(name)
            member.size = 5 << 20
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    with shard.open("r+b") as file:
        file.seek(512 + (5 << 20))
        file.write(bytes(512))
    with (
        closing(Transfer(str(shard), retries=QUICK)) as transfer,
        pytest.raises(ArchiveError, match="zeros follow for more than 4 MiB, as where a copy broke off"),
    ):
        list(tar.groups(transfer, read=True))
