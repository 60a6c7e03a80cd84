"""Bytes of files: local, over http(s), or on any store that fsspec reaches; broken transfers are resumed.

Not ``obstore`` (tried at 0.12), which streams faster: it refuses servers that ignore ranges, and waits inside
of a read, where neither Ctrl-C nor the end of a loader is heard before its own time limit.
"""

import errno
import hashlib
import http.client
import io
import os
import re
import ssl
import threading
import time
import urllib.error
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaecho.masking import presentable, shown, without_secrets
from adaecho.shards.http import asked_to_wait_s, open_http
from adaecho.shards.waits import log, watch

_PIECE = 1 << 16  # bytes of one read: what a connection that breaks can lose
_SKIP_BY_READING = 1 << 20  # bytes: a longer gap is worth a new request; in a local file, _PIECE
# Of fsspec's: dask's client unpickles what its scheduler sends, and before 2026.6 an index of references
# rendered templates without a sandbox.
_RUNS_CODE = {"dask", "reference"}
_SLOW_BYTES, _SLOW_S = 1 << 20, 1.0  # a transfer slower than this can be stopped within an example
_NEVER_BETTER = (
    FileNotFoundError, PermissionError, IsADirectoryError, ssl.SSLCertVerificationError,
    http.client.InvalidURL, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Retries:
    """When to give up on a transfer.

    Attributes:
        tries: in a row, without one byte gained.
        delay_s: before the second try; doubles with each further one, up to ``longest_delay_s``.
        timeout_s: an http connection that gives nothing for so long, or no whole header, has stalled; stores
            of fsspec have timeouts of their own.
        slowest_bytes_per_s: an http connection that gives less, over ``timeout_s`` of waiting for it, is
            tried again too; that is a failure whatever it gained.
        longest_retry_after_s: a server that names a time to ask again (``Retry-After``) is obeyed up to here.
        tell_after_s: without data, a warning of the logger ``adaecho.shards`` says what is waited for, and
            again in each further try.
    """

    tries: int = 6
    delay_s: float = 0.5
    longest_delay_s: float = 16.0
    timeout_s: float = 30.0
    slowest_bytes_per_s: float = 1024.0
    longest_retry_after_s: float = 120.0
    tell_after_s: float = 10.0

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ValueError(f"tries={self.tries}: must be at least 1")
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}={value}: must be a number above 0")

    def wait(self, failures: int, asked_s: float) -> None:
        """Wait before the next try, after so many; a server may ask for a longer time."""
        delay_s = min(self.delay_s * 2.0 ** (failures - 1), self.longest_delay_s)
        rest(max(delay_s, min(asked_s, self.longest_retry_after_s)))


class TransferError(ConnectionError):
    """A file could not be read: url, byte offset and cause. Says nothing about any one example.

    Neither it nor its ``__cause__`` names a secret of the url; a cause that would is left out.
    """


@dataclass(frozen=True)
class Version:
    """What tells a file from the one that lay there before.

    Attributes:
        length: in bytes; -1 where it isn't known.
        tag: ``digest_of`` an ETag; 0 where there is none.
        modified: ``digest_of`` a time of modification, for where there is no ETag; 0 where it isn't known.
    """

    length: int = -1
    tag: int = 0
    modified: int = 0

    def __str__(self) -> str:
        parts = ["of unknown length" if self.length < 0 else f"{self.length} bytes long"]
        parts += [f"ETag digest {self.tag:x}"] if self.tag else []
        parts += [f"modification digest {self.modified:x}"] if self.modified else []
        return ", ".join(parts)

    def differs(self, other: "Version") -> bool:
        """Whether these can't be of the same file."""
        if min(self.length, other.length) >= 0 and self.length != other.length:
            return True
        if self.tag and other.tag:
            return self.tag != other.tag
        return bool(self.modified and other.modified) and self.modified != other.modified

    def joined(self, other: "Version") -> "Version":
        """Of the same file, what either knows of it."""
        known = self.tag or other.tag, self.modified or other.modified
        return Version(max(self.length, other.length), *known)

    def lasting(self, url: str) -> "Version":
        """What of it may be kept beyond this process: copies of a local file have new times."""
        return self if is_remote(url) else Version(self.length)


def digest_of(text: str) -> int:
    """48 bits of a text, which any format of a state can hold; 0 for none."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") if text else 0


class Transfer:
    """A file from one byte to another, in order.

    A dropped, stalled, slow or truncated connection, a 5xx, 408 or 429 is tried again after a delay that
    doubles, and resumed at its byte; a server that ignores the range is read again up to it. Any other 4xx
    fails at once, and so does a file that has changed in between.

    Args:
        url: a path, or ``http://``, ``https://``, or a protocol of fsspec (``s3://``, ``gs://``, ...).
        start, end: bytes; None reads to the end of the file.
        retries: when to give up.
        version: what the file must be, as far as it is known.

    Attributes:
        name: the url as it may be shown.
        version: what the file is, once it has been opened.

    Raises:
        TransferError: from ``read`` and ``skip``; names url, byte and cause.
        OSError: a local file's own.
        ImportError: the protocol needs fsspec, which is not installed.
    """

    def __init__(
        self,
        url: str,
        start: int = 0,
        end: int | None = None,
        *,
        retries: Retries,
        version: Version | None = None,
    ) -> None:
        self.url, self.name, self.offset = url, shown_url(url), start
        self.version = version or Version()
        self._asked_end, self._retries = end, retries
        self._stream: Any = None  # what bytes come from: a file, a response, or a file of fsspec
        self._piece, self._at = b"", 0  # what was read last, and how much of it has been given
        self._slow_s, self._slow_bytes, self._slow_tries = 0.0, 0, 0
        self._failures, self._cause, self._told = 0, "", -1  # of the piece at hand: see ``tell``
        self.tell_after_s = retries.tell_after_s

    @property
    def is_part(self) -> bool:
        """Whether it was asked to end at a byte."""
        return self._asked_end is not None

    @property
    def _end(self) -> int | None:
        return self.length if self._asked_end is None else self._asked_end

    @property
    def length(self) -> int | None:
        """Bytes of the whole file; None where nothing has been read or the server doesn't say."""
        return None if self.version.length < 0 else self.version.length

    def read(self, size: int) -> bytes:
        """Read so many bytes; fewer only at the end."""
        begin, end = self._at, self._at + size
        if end <= len(self._piece):  # nearly always: headers and small files come many to a piece
            self._at = end
            self.offset += size
            return self._piece[begin:end]
        parts = []
        while size and (part := self._some(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def skip(self, count: int) -> None:
        """Pass over so many bytes."""
        if self._at + count <= len(self._piece):
            self._at += count
            self.offset += count
            return
        if count > (_SKIP_BY_READING if is_remote(self.url) else _PIECE):
            self.close()
            end = self._end
            self.offset = self.offset + count if end is None else min(self.offset + count, end)
            return
        while count and (part := self._some(count)):
            count -= len(part)

    def close(self) -> None:
        """Let go of the connection or file; a later read opens it again."""
        stream, self._stream = self._stream, None
        self._piece, self._at = b"", 0
        if stream is not None:
            stream.close()

    def _some(self, size: int) -> bytes:
        """Up to so many bytes, of one piece; none at the end."""
        if self._at == len(self._piece):
            self._piece, self._at = self._read_piece(), 0
        begin, self._at = self._at, min(self._at + size, len(self._piece))
        self.offset += self._at - begin
        return self._piece[begin : self._at]

    def tell(self, waited_s: float) -> None:
        """Say what is waited for, once in each try."""
        if self._told < self._failures:
            self._told = self._failures
            why = "it sends no more" if self._stream else self._cause or "it has not answered"
            tries = f"{self._failures + 1} of {self._retries.tries}"
            log.warning("%s: in try %s: no data for %.0f s: %s", self.name, tries, waited_s, why)

    def _read_piece(self) -> bytes:
        """What comes next, once all that was read before has been given; nothing at the end."""
        self._failures, self._cause, self._told = 0, "", -1
        if not is_remote(self.url):
            return self._tried_piece()
        watch.begin(self)
        try:
            return self._tried_piece()
        finally:
            watch.end(self)

    def _tried_piece(self) -> bytes:
        while True:
            try:
                return self._try_piece()
            except (ImportError, MemoryError):
                self.close()
                raise
            except Exception as error:
                self.close()
                if isinstance(error, OSError) and not is_remote(self.url):
                    error.filename = error.filename and shown(str(error.filename))
                    raise
                given_up, asked_s = self._failed(error), asked_to_wait_s(error)
            if given_up:  # out here: it has no context, which might name a secret
                try:
                    raise given_up
                finally:
                    del given_up  # no circle with its own traceback
            if asked_s or self._slow_tries:
                asks = f"; it asks to wait {asked_s:.0f} s" if asked_s else ""
                tries = f"{self._failures} of {self._retries.tries}"
                log.warning("%s: in try %s: %s%s", self.name, tries, self._cause, asks)
            self._retries.wait(self._failures, asked_s)

    def _try_piece(self) -> bytes:
        if self._end is not None and self.offset >= self._end:
            return b""
        if self._stream is None:
            self._stream = self._open()
        size = _PIECE if self._end is None else min(_PIECE, self._end - self.offset)
        piece = self._read_once(self._stream, size) if size > 0 else b""
        if not piece and self._end is not None and self.offset < self._end:
            raise _EndedError(f"it ended {self._end - self.offset} bytes early")
        return piece

    def _read_once(self, stream: Any, size: int) -> bytes:
        """What there is. Where bytes drip, a thread that is to stop does so here, not after its example."""
        begun = time.monotonic()
        # As soon as there are some; of fsspec's files many have ``read`` alone.
        piece: bytes = getattr(stream, "read1", stream.read)(size)
        self._slow_s += time.monotonic() - begun
        self._slow_bytes += len(piece)
        if self._slow_s > _SLOW_S:
            rest(0)
        if self._slow_bytes >= _SLOW_BYTES or self._slow_s >= self._retries.timeout_s:
            self._check_rate()
        return piece

    def _check_rate(self) -> None:
        least = self._retries.slowest_bytes_per_s
        slow = _is_http(self.url) and self._slow_bytes < least * self._slow_s
        slow_s, self._slow_s, self._slow_bytes = self._slow_s, 0.0, 0
        self._slow_tries = self._slow_tries + 1 if slow else 0
        if slow:
            raise _EndedError(f"slower than {least:g} bytes a second for {slow_s:.0f} s")

    def _open(self) -> Any:
        stream, found, offset = open_stream(self.url, self.offset, self._asked_end, self._retries.timeout_s)
        try:
            if self.version.differs(found):
                raise _ChangedError(
                    f"the file has changed: it was {self.version}, and is {found}. Put back the one that was "
                    "there, or begin anew, with a new index= if there is one"
                )
            self.version = self.version.joined(found)
            if 0 <= found.length < self.offset:
                raise ValueError(f"the file is {found.length} bytes long")
            while offset < self.offset:  # the server has ignored the range
                passed = len(self._read_once(stream, min(self.offset - offset, _PIECE)))
                if not passed:
                    raise _EndedError(f"it ended at byte {offset}")
                offset += passed
        except BaseException:
            stream.close()
            raise
        return stream

    def _failed(self, error: Exception) -> TransferError | None:
        """Count a failure; an error once trying again is of no use."""
        self._failures = max(self._failures + 1, self._slow_tries)
        own = isinstance(error, _EndedError | _ChangedError)
        cause = str(error) if own else f"{type(error).__name__}: {error}"
        self._cause = presentable(without_secrets(cause, self.url))
        if self._failures < self._retries.tries and _may_pass(error):
            return None
        tries = "" if self._failures == 1 else f" after {self._failures} tries"
        failure = TransferError(f"{self.name}: reading at byte {self.offset} failed{tries}: {self._cause}")
        failure.__cause__ = error if self._cause == cause else None
        return failure


class _EndedError(Exception):
    """A transfer was cut short, or is too slow."""


class _ChangedError(Exception):
    """The file is another one now."""


def _may_pass(error: Exception) -> bool:
    """Whether trying again can help."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code in (408, 429)
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        error = error.reason
    return not isinstance(error, (*_NEVER_BETTER, _ChangedError))


def is_remote(url: str) -> bool:
    """Whether it is no local path."""
    return "://" in url and not url.startswith("file://")


def shown_url(url: str) -> str:
    """One url as it may be shown, blanks in it or not; the same for one signed anew."""
    return shown(re.sub(r"\s", "%20", url) if is_remote(url) else url)


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def open_stream(url: str, start: int, end: int | None, timeout_s: float) -> tuple[Any, Version, int]:
    """A stream, what the file is, and the byte at which the stream begins, at most ``start``."""
    if _is_http(url):
        stream, length, headers, start = open_http(url, start, end, timeout_s)
        tag, modified = headers.get("ETag", ""), headers.get("Last-Modified", "")
        return stream, Version(length, digest_of(tag), digest_of(modified)), start
    if is_remote(url):
        return _open_fsspec(url, start, end)
    path = Path(url.removeprefix("file://"))
    if path.exists() and not path.is_file():  # to open a pipe would wait for ever
        raise IsADirectoryError(errno.EISDIR, "no regular file", str(path))
    stream = path.open("rb")
    stream.seek(start)
    about = os.fstat(stream.fileno())
    return stream, Version(about.st_size, modified=digest_of(str(about.st_mtime_ns))), start


def _open_fsspec(url: str, start: int, end: int | None) -> tuple[Any, Version, int]:
    protocol = url.partition("://")[0]
    if refused := _RUNS_CODE & {link.partition("://")[0].lower() for link in url.split("::")}:
        raise ValueError(f"{refused.pop()}:// runs what others say, and the url may be out of a record")
    try:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ImportError(
            f"{shown_url(url)}: reading {protocol}:// needs fsspec and its package for that protocol "
            f"(for s3:// pip install fsspec s3fs, for gs:// pip install fsspec gcsfs): {error}"
        ) from error
    about: dict[str, Any] = filesystem.info(path)
    tag = str(about.get("ETag") or about.get("etag") or "")
    modified = str(about.get("LastModified") or about.get("mtime") or about.get("created") or "")
    size = about.get("size")
    version = Version(-1 if size is None else size, digest_of(tag), digest_of(modified))
    if end is not None:  # a file opened would read megabytes ahead
        return io.BytesIO(filesystem.cat_file(path, start=start, end=end)), version, start
    file = filesystem.open(path, "rb")
    file.seek(start)
    return file, version, start


def rest(seconds: float) -> None:
    """Sleep; a thread that can be asked to stop brings a ``rest`` of its own, which is cut short then."""
    getattr(threading.current_thread(), "rest", time.sleep)(seconds)
