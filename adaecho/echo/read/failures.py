"""Errors of reading: which are the example's and are counted, which the machine's; where a warning points."""

import errno
import http.client
import sys
import urllib.error
import warnings
from typing import Any

from adaecho.echo.order.stage import Fresh

_NEVER_THE_EXAMPLE = (
    ConnectionError, TimeoutError, MemoryError, FileNotFoundError, PermissionError, urllib.error.URLError,
    http.client.HTTPException,
)  # fmt: skip
# What a file of wrong content, or a wrong name, can cause by itself.
_OF_THE_EXAMPLE = (None, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG)
_NETWORK_CLIENTS = (
    "aiohttp.", "azure.core.", "botocore.", "gcsfs.", "google.api_core.", "google.auth.", "grpc.",
    "httpcore.", "httpx.", "huggingface_hub.", "requests.", "urllib3.",
)  # fmt: skip
_HOPELESS = 1000  # beyond the budget twice: bad examples one after another that are met again and again

NONE_SKIPPED = (
    "max_bad_examples=0 (data.max_bad_examples of a run) skips none; a larger budget skips and lists them in "
    "bad_examples"
)  # whoever reads it has made a loader, or has typed a run's command


def is_of_machine(error: Exception) -> bool:
    """Whether machine or network failed, so that the error is raised and never counted as a bad example.

    These are the built-in errors of connections, memory and missing files; an ``OSError`` with the number of
    a cause such as a full disk or too many open files (one that a decoder raises has none); and whatever is
    of a class of a network client, wrong values apart.
    """
    if isinstance(error, _NEVER_THE_EXAMPLE):
        return True
    if isinstance(error, OSError) and error.errno not in _OF_THE_EXAMPLE:
        return True
    of_client = any(f"{kind.__module__}.".startswith(_NETWORK_CLIENTS) for kind in type(error).__mro__)
    return of_client and not isinstance(error, ValueError)


class BadExamples:
    """Examples that could not be read or decoded: listed, and an error beyond the budget.

    A row of the source that is bad in every pass is listed once, where it was first met.

    Attributes:
        found: these.
        numbers: the local numbers of all, rising: what the stream has to know. Only appended to.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self._in_a_row = budget, 0
        self.found: list[dict[str, Any]] = []
        self.numbers: list[int] = []

    def add(self, chunk: Fresh) -> None:
        """List those of a chunk; raises the error of one beyond the budget."""
        self._in_a_row = 0 if len(chunk.serials) else self._in_a_row + len(chunk.bad)
        for bad in chunk.bad:
            if self._in_a_row > 2 * self._budget + _HOPELESS:
                raise bad.told(f"while reading {bad.origin}; the last {self._in_a_row} examples were all bad")
            self.numbers.append(bad.index)
            if bad.row is not None and any(known["row"] == bad.row for known in self.found):
                continue
            self.found.append({"index": bad.index, "origin": bad.origin, "error": bad.reason, "row": bad.row})
            if len(self.found) > self._budget:
                raise bad.told(f"while reading {bad.origin}; {self._explanation()}")

    def go_back(self, index: int) -> None:
        """Strike off those from a local number on: they were read ahead."""
        self.found = [bad for bad in self.found if bad["index"] < index]
        self.numbers = [number for number in self.numbers if number < index]

    def _explanation(self) -> str:
        if not self._budget:
            return NONE_SKIPPED
        others = ", ".join(bad["origin"] for bad in self.found[-6:-1])
        return f"more bad examples than max_bad_examples={self._budget} allows; the last before it: {others}"


def warn_caller(message: str) -> None:
    """Warn at the line outside this package that made the loader or asked for a batch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("adaecho."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
