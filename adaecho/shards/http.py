"""A file over http(s), from a byte on."""

import base64
import http.client
import io
import re
import socket
import time
import urllib.error
import urllib.request
from email.message import Message
from email.utils import mktime_tz, parsedate_tz
from functools import cache
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

_MOST_LINES = 100
_NOT_IN_URLS = re.compile(r"[\x00-\x20\x7f]")


def open_http(url: str, start: int, end: int | None, timeout_s: float) -> tuple[Any, int, Message, int]:
    """A stream, bytes of the whole file (-1: not known), headers, and the byte at which the stream begins."""
    headers = {"User-Agent": "adaecho", "Accept-Encoding": "identity"}
    if start or end is not None:
        headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
    url, user = _without_user(url)
    request = urllib.request.Request(url, headers=headers)
    if user:  # not for a host that the server may send us on to
        request.add_unredirected_header("Authorization", user)
    try:
        response: http.client.HTTPResponse = _opener().open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        # Content-Range: bytes */1234: nothing is left of so many, or there are fewer (RFC 9110, 15.5.17).
        length = _length(error.headers.get("Content-Range", "").removeprefix("bytes */"))
        if error.code == 416 and length >= 0:
            return io.BytesIO(), length, error.headers, start
        raise
    except ValueError:  # UnicodeError is one
        raise http.client.InvalidURL(
            "it is no url, or sends on to what is none; a letter beyond ASCII is written %C3%A9"
        ) from None
    if response.status != 206:
        said = response.headers.get("Content-Length")
        if said is not None and _length(said) < 0:
            response.close()
            raise ConnectionError(f"its Content-Length is {said[:40]!r}, no number of bytes")
        return response, -1 if said is None else _length(said), response.headers, 0
    # Content-Range: bytes 0-499/1234, or /* where the length is not known (RFC 9110, 14.4).
    span, _, whole = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
    first = span.partition("-")[0]
    if first != str(start):
        response.close()
        raise ConnectionError(f"asked for bytes from {start}, the server gives {span or 'no Content-Range'}")
    return response, _length(whole), response.headers, start


def _length(text: str) -> int:
    """Bytes, as a header tells them; -1 where it doesn't."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else -1


def _without_user(url: str) -> tuple[str, str]:
    """The url without ``user:password@``, and these as a header (RFC 7617); empty where it has none."""
    try:
        parts = urlsplit(url)
        possible = parts.port != 0 and not _NOT_IN_URLS.search(url)
    except ValueError:  # which repeats what may be a part of a password
        possible = False
    if not possible:
        raise http.client.InvalidURL(
            "it is no url, or its port no number; a blank is written %20, and in a user or password "
            "/ is %2F, ? is %3F, # is %23, @ is %40"
        )
    user, at, host = parts.netloc.rpartition("@")
    basic = f"Basic {base64.b64encode(unquote_to_bytes(user)).decode()}" if at else ""
    return parts._replace(netloc=host).geturl() if at else url, basic


def asked_to_wait_s(error: Exception) -> float:
    """Seconds after which a server says it may be asked again (RFC 9110, 10.2.3); 0 where it doesn't."""
    text = error.headers.get("Retry-After", "") if isinstance(error, urllib.error.HTTPError) else ""
    if re.fullmatch("[0-9]{1,9}", text):
        return float(text)
    try:
        date = parsedate_tz(text)
        return 0.0 if date is None else max(0.0, mktime_tz(date) - time.time())
    except (ValueError, OverflowError):
        return 0.0


class _Head:
    """The lines of an answer's head, all of which must come within a time."""

    def __init__(self, file: Any, limit_s: float) -> None:
        self._file, self._limit_s, self._begun = file, limit_s, time.monotonic()
        self.close = file.close

    def readline(self, limit: int) -> bytes:
        line = b""
        while len(line) < limit and not line.endswith(b"\n"):
            if time.monotonic() - self._begun > self._limit_s:
                raise TimeoutError(f"no whole header within {self._limit_s:g} s")
            seen = self._file.peek()  # waits once for the connection, whose own limit is the same
            if not seen:
                break
            line += self._file.read(min((seen.find(b"\n") + 1) or len(seen), limit - len(line)))
        return line


class _Lines:
    """The file of an answer in chunks: each of its lines must come within a time, and a trailer has few.

    http.client reads the lines between chunks within one read, where no other limit is asked.
    """

    def __init__(self, file: Any, limit_s: float) -> None:
        self._file, self._limit_s, self._in_a_row = file, limit_s, 0

    def __getattr__(self, name: str) -> Any:
        self._in_a_row = 0
        return getattr(self._file, name)

    def readline(self, limit: int) -> bytes:
        self._in_a_row += 1
        if self._in_a_row > _MOST_LINES:
            raise ConnectionError(f"more than {_MOST_LINES} lines between two chunks, or after the last")
        return _Head(self._file, self._limit_s).readline(limit)


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._limit_s = sock.gettimeout() or float("inf")

    def begin(self) -> None:
        file: Any = self.fp
        self.fp: Any = _Head(file, self._limit_s)
        try:
            super().begin()
        finally:
            self.fp = self.fp and file  # None where it has been closed
        if self.fp and self.chunked:
            self.fp = _Lines(file, self._limit_s)


class _Connection(http.client.HTTPConnection):
    response_class = _Response


class _SecureConnection(http.client.HTTPSConnection):
    response_class = _Response


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, req)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Goes on to http(s) alone, and names the user to the same host alone."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        fp.close()  # unread: its length is the server's choice
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if after.scheme not in ("http", "https") or "@" in after.netloc:
            reason = "it sends on to what is no http(s) url, or to one with a user"
            raise urllib.error.HTTPError(req.full_url, code, reason, headers, fp)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        user = req.get_header("Authorization")
        if request is not None and user and before[:2] == after[:2]:
            request.add_unredirected_header("Authorization", user)
        return request


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Handler, _Redirects)
