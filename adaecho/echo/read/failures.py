"""Errors of reading: which say nothing about the example at hand, how one is kept; where a warning points."""

import errno
import http.client
import sys
import traceback
import urllib.error
import warnings

from adaecho.echo.threads.seeded_process import ProcessDiedError

_NEVER_THE_EXAMPLE = (
    ConnectionError, TimeoutError, MemoryError, FileNotFoundError, PermissionError, urllib.error.URLError,
    http.client.HTTPException, ProcessDiedError,
)  # fmt: skip
# What a file of wrong content, or a wrong name, can cause by itself.
_OF_THE_EXAMPLE = (None, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG)
_NETWORK_CLIENTS = (
    "aiohttp.", "azure.core.", "botocore.", "gcsfs.", "google.api_core.", "google.auth.", "grpc.",
    "httpcore.", "httpx.", "huggingface_hub.", "requests.", "urllib3.",
)  # fmt: skip


NONE_SKIPPED = (
    "max_bad_examples=0 (data.max_bad_examples of a run) skips none; a larger budget skips and lists them in "
    "bad_examples"
)  # whoever reads it has made a loader, or has typed a run's command


def is_of_machine(error: Exception) -> bool:
    """Whether machine or network failed, so that the error is raised and never counted as a bad example.

    These are the built-in errors of connections, memory and missing files; a worker process that died; an
    ``OSError`` with the number of a cause such as a full disk or too many open files (one that a decoder
    raises has none); and whatever is of a class of a network client, wrong values apart.
    """
    if isinstance(error, _NEVER_THE_EXAMPLE):
        return True
    if isinstance(error, OSError) and error.errno not in _OF_THE_EXAMPLE:
        return True
    of_client = any(f"{kind.__module__}.".startswith(_NETWORK_CLIENTS) for kind in type(error).__mro__)
    return of_client and not isinstance(error, ValueError)


def without_frames(error: Exception) -> str:
    """Let an error, and those that led to it, go of their frames; the text of the traceback that it had."""
    text = "".join(traceback.format_exception(error)).rstrip()
    chain: list[BaseException] = [error]
    for link in chain:
        link.__traceback__ = None
        before = (link.__cause__, link.__context__)
        chain += [other for other in before if other is not None and other.__traceback__ is not None]
    return text


def warn_caller(message: str) -> None:
    """Warn at the line outside this package that made the loader or asked for a batch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("adaecho."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
