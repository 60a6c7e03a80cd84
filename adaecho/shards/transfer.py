"""Bytes of a file, an http(s) url or a url of fsspec's; a transfer that breaks is resumed at its byte."""

import base64
import threading
import time
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from adaecho.errors import redact_urls

_PIECE = 1 << 18  # bytes: the most that is asked for at once
_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # between tries
_TIMEOUT_S = 30.0  # of an http connection that gives nothing
_FINAL = FileNotFoundError, PermissionError
_FINAL_CODES = {*range(400, 500)} - {408, 429}  # of http


class Transfer:
    """A file from one byte on, in order.

    A broken connection, a 5xx, 408 or 429 is tried again after delays that double; an http server that
    ignores the range is read again up to the byte.

    Attributes:
        name: the url as it may be shown.
        byte: of the file, at which the next piece begins; may be set while it is closed.
    """

    def __init__(self, url: str) -> None:
        self.name, self.byte, self._url = redact_urls(url), 0, url
        self._stream: Any = None

    def read(self) -> bytes:
        """What there is next, at most 256 KiB; nothing at the end.

        Raises:
            ConnectionError: names url (without its secrets), byte and cause.
            OSError: a local file's own.
        """
        for tries, delay_s in enumerate((*_DELAYS_S, 0.0), start=1):
            try:
                self._stream = self._stream or _open_at(self._url, self.byte)
                # As soon as there is something; not every file of fsspec can do that.
                piece: bytes = getattr(self._stream, "read1", self._stream.read)(_PIECE)
                if not piece and (missing := getattr(self._stream, "length", None)):  # http.client is silent
                    raise ConnectionError(f"it ended {missing} bytes early")
                self.byte += len(piece)
                return piece
            except (OSError, HTTPException) as error:
                self.close()
                if "://" not in self._url:
                    raise
                cause = f"in try {tries} at byte {self.byte}: {type(error).__name__}: {error}"
                if isinstance(error, _FINAL) or getattr(error, "code", 0) in _FINAL_CODES:
                    break
            # A thread of an EchoLoader brings a sleep that ends with its loader.
            getattr(threading.current_thread(), "rest", time.sleep)(delay_s)
        raise ConnectionError(f"{self.name}: can't be read {redact_urls(cause)}")

    def close(self) -> None:
        """Let go of the connection or file; a later ``read`` opens it again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _open_at(url: str, byte: int) -> Any:
    if not url.startswith(("http://", "https://")):
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(url)
        file = filesystem.open(path, "rb")
        file.seek(byte)
        return file
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    headers = {"User-Agent": "adaecho"} | ({"Range": f"bytes={byte}-"} if byte else {})
    request = urllib.request.Request(parts._replace(netloc=host).geturl(), headers=headers)
    if user:  # not for a host that the server may send us on to
        basic = base64.b64encode(unquote_to_bytes(user)).decode()
        request.add_unredirected_header("Authorization", f"Basic {basic}")
    response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    if response.status != 206:  # the server has ignored the range
        while byte and (passed := response.read1(min(byte, _PIECE))):
            byte -= len(passed)
    return response
