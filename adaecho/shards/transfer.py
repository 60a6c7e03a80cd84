"""Read the bytes of a file, an http(s) url or an fsspec url, and resume after a broken connection."""

import base64
import time
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from adaecho.errors import redact_urls

_PIECE = 1 << 18  # maximum number of bytes per read
_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # delays between attempts
_TIMEOUT_S = 30.0  # after this time without data, an http connection is considered broken
_FINAL = FileNotFoundError, PermissionError
_FINAL_CODES = {*range(400, 500)} - {408, 429}  # http statuses that are not retried


class Transfer:
    """A file or url that is read sequentially, starting at any byte.

    After a broken connection, or status 5xx, 408 or 429, reading is retried up to six times.

    Attributes:
        name: the url without secrets.
        byte: offset of the next byte to read. The caller may set it while the file is closed.
    """

    def __init__(self, url: str) -> None:
        self.name, self.byte, self._url = redact_urls(url), 0, url
        self._stream: Any = None

    def read(self) -> bytes:
        """Return the next bytes, at most 256 KiB, or empty bytes at the end of the file.

        Raises:
            ConnectionError: a url cannot be read, even after retries.
            OSError: a local file cannot be read.
        """
        for attempt, delay_s in enumerate((*_DELAYS_S, 0.0), start=1):
            try:
                self._stream = self._stream or _open_at(self._url, self.byte)
                # Prefer read1, which returns at once with the bytes available. Some fsspec files lack it.
                piece: bytes = getattr(self._stream, "read1", self._stream.read)(_PIECE)
                # Check the length, because http.client raises no error if a connection ends too early.
                if not piece and (missing := getattr(self._stream, "length", None)):
                    raise ConnectionError(f"ended {missing} bytes early")
                self.byte += len(piece)
                return piece
            except (OSError, HTTPException) as error:
                self.close()
                if "://" not in self._url:
                    raise
                cause = f"in attempt {attempt} at byte {self.byte}: {type(error).__name__}: {error}"
                if isinstance(error, _FINAL) or getattr(error, "code", 0) in _FINAL_CODES:
                    break
            time.sleep(delay_s)
        raise ConnectionError(f"{self.name}: cannot be read {redact_urls(cause)}")

    def close(self) -> None:
        """Close the connection or file. A later call to ``read`` reopens it."""
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
    if user:  # send the password only to this server, not to the target of a redirect
        basic = base64.b64encode(unquote_to_bytes(user)).decode()
        request.add_unredirected_header("Authorization", f"Basic {basic}")
    response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    if response.status != 206:  # the server ignored the range and sends the whole file
        while byte and (dropped := response.read1(min(byte, _PIECE))):
            byte -= len(dropped)
    return response
