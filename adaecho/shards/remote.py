"""Bytes of files: local, over http(s), or on any store that fsspec reaches; broken transfers are resumed.

Not ``obstore`` (tried at 0.12), which streams faster: it refuses servers that ignore ranges, and waits inside
of a read, where neither Ctrl-C nor the end of a loader is heard before its own time limit.
"""

import base64
import hashlib
import http.client
import io
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.message import Message
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

_PIECE = 1 << 16  # bytes of one read: what a connection that breaks can lose
_SKIP_BY_READING = 1 << 20  # bytes: a longer gap is worth a new request; in a local file, _PIECE
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
        timeout_s: an http connection that gives nothing for so long has stalled; stores of fsspec have
            timeouts of their own.
    """

    tries: int = 6
    delay_s: float = 0.5
    longest_delay_s: float = 16.0
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ValueError(f"tries={self.tries}: must be at least 1")
        for name in ("delay_s", "longest_delay_s", "timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: must be seconds, more than 0")

    def wait(self, failures: int) -> None:
        """Wait before the next try, after so many."""
        rest(min(self.delay_s * 2.0 ** (failures - 1), self.longest_delay_s))


class TransferError(ConnectionError):
    """A file could not be read: url, byte offset and cause. Says nothing about any one example."""


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

    def lasting(self, url: str) -> "Version":
        """What of it may be kept beyond this process: copies of a local file have new times."""
        return self if is_remote(url) else Version(self.length)


def digest_of(text: str) -> int:
    """48 bits of a text, which any format of a state can hold; 0 for none."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") if text else 0


class Transfer:
    """A file from one byte to another, in order.

    A dropped, stalled or truncated connection, a 5xx, 408 or 429 is tried again after a delay that doubles,
    and resumed at its byte; a server that ignores the range is read again up to it. Any other 4xx fails at
    once, and so does a file that has changed in between.

    Args:
        url: a path, or ``http://``, ``https://``, or a protocol of fsspec (``s3://``, ``gs://``, ...).
        start, end: bytes; None reads to the end of the file.
        retries: when to give up.
        version: what the file must be, as far as it is known.

    Attributes:
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
        self.url, self.offset = url, start
        self.version = version or Version()
        self._asked_end, self._retries = end, retries
        self._stream: Any = None  # what bytes come from: a file, a response, or a file of fsspec
        self._piece, self._at = b"", 0  # what was read last, and how much of it has been given
        self._slow_s, self._slow_bytes = 0.0, 0

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

    def _read_piece(self) -> bytes:
        """What comes next, once all that was read before has been given; nothing at the end."""
        failures = 0
        while True:
            try:
                return self._try_piece()
            except Exception as error:
                self.close()
                failures += 1
                if isinstance(error, ImportError) or (isinstance(error, OSError) and not is_remote(self.url)):
                    raise
                if failures >= self._retries.tries or not _may_pass(error):
                    raise self._given_up(error, failures) from error
                self._retries.wait(failures)

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
        if self._slow_bytes >= _SLOW_BYTES:
            self._slow_s, self._slow_bytes = 0.0, 0
        elif self._slow_s > _SLOW_S:
            rest(0)
        return piece

    def _open(self) -> Any:
        stream, found, offset = open_stream(self.url, self.offset, self._asked_end, self._retries.timeout_s)
        try:
            if self.version.differs(found):
                raise _ChangedError(
                    f"the file has changed: it was {self.version}, and is {found}. Put back the one that was "
                    "there, or begin anew, with a new index= if there is one"
                )
            if self.version == Version():
                self.version = found
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

    def _given_up(self, error: Exception, failures: int) -> TransferError:
        tries = "" if failures == 1 else f" after {failures} tries"
        own = isinstance(error, _EndedError | _ChangedError)
        cause = str(error) if own else f"{type(error).__name__}: {error}"
        return TransferError(f"{self.url}: reading at byte {self.offset} failed{tries}: {cause}")


class _EndedError(Exception):
    """A transfer was cut short."""


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


def open_stream(url: str, start: int, end: int | None, timeout_s: float) -> tuple[Any, Version, int]:
    """A stream, what the file is, and the byte at which the stream begins, at most ``start``."""
    if url.startswith(("http://", "https://")):
        return _open_http(url, start, end, timeout_s)
    if is_remote(url):
        return _open_fsspec(url, start, end)
    stream = open(url.removeprefix("file://"), "rb")  # noqa: SIM115 (the Transfer closes it)
    stream.seek(start)
    about = os.fstat(stream.fileno())
    return stream, Version(about.st_size, modified=digest_of(str(about.st_mtime_ns))), start


def _open_http(url: str, start: int, end: int | None, timeout_s: float) -> tuple[Any, Version, int]:
    headers = {"User-Agent": "adaecho", "Accept-Encoding": "identity"}
    if start or end is not None:
        headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
    url, user = _without_user(url)
    request = urllib.request.Request(url, headers=headers)
    if user:  # not for a host that the server may send us on to
        request.add_unredirected_header("Authorization", user)
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        # Content-Range: bytes */1234: nothing is left of so many, or there are fewer (RFC 9110, 15.5.17).
        length = error.headers.get("Content-Range", "").removeprefix("bytes */")
        if error.code == 416 and length.isdigit():
            return io.BytesIO(), _http_version(int(length), error.headers), start
        raise
    if response.status != 206:
        whole = int(response.headers.get("Content-Length", -1))
        return response, _http_version(whole, response.headers), 0
    # Content-Range: bytes 0-499/1234, or /* where the length is not known (RFC 9110, 14.4).
    span, _, length = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
    first = span.partition("-")[0]
    if first != str(start):
        response.close()
        raise ConnectionError(f"asked for bytes from {start}, the server gives {span or 'no Content-Range'}")
    version = _http_version(int(length) if length.isdigit() else -1, response.headers)
    return response, version, start


def _without_user(url: str) -> tuple[str, str]:
    """The url without ``user:password@``, and these as a header (RFC 7617); empty where it has none."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    basic = f"Basic {base64.b64encode(unquote_to_bytes(user)).decode()}" if at else ""
    return parts._replace(netloc=host).geturl() if at else url, basic


def _http_version(length: int, headers: Message) -> Version:
    return Version(length, digest_of(headers.get("ETag", "")), digest_of(headers.get("Last-Modified", "")))


def _open_fsspec(url: str, start: int, end: int | None) -> tuple[Any, Version, int]:
    protocol = url.partition("://")[0]
    try:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ImportError(
            f"{url}: reading {protocol}:// needs fsspec and its package for that protocol "
            f"(for s3:// pip install fsspec s3fs, for gs:// pip install fsspec gcsfs): {error}"
        ) from error
    if end is not None:  # a file opened would read megabytes ahead
        return io.BytesIO(filesystem.cat_file(path, start=start, end=end)), Version(), start
    about: dict[str, Any] = filesystem.info(path)
    file = filesystem.open(path, "rb")
    file.seek(start)
    tag = str(about.get("ETag") or about.get("etag") or "")
    modified = str(about.get("LastModified") or about.get("mtime") or "")
    size = about.get("size")
    return file, Version(-1 if size is None else size, digest_of(tag), digest_of(modified)), start


def rest(seconds: float) -> None:
    """Sleep; a thread that can be asked to stop brings a ``rest`` of its own, which is cut short then."""
    getattr(threading.current_thread(), "rest", time.sleep)(seconds)
