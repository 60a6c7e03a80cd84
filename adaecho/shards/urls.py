"""What of a url may be shown: neither its user and password, nor query, parameters and fragment."""

import re
from urllib.parse import unquote

MASK = "***"
# What follows the scheme of a url in a text; also of one without a scheme, and what scp takes, where these
# begin with user and password: names of files with : and @ in them are left alone. 255 keep it linear.
_RUN = re.compile(
    r"""(?<=://)\S+
    |(?<=//)(?<![^\s'"=]//)(?=[^\s/:@]+:[^\s/@]{1,255}@)\S+
    |(?<![^\s'"=])(?=[^\s/:@'"=]+:[^\s/@]{1,255}@[\w.-]+:/)\S+""",
    re.VERBOSE,
)
# Of a header of HTTP (RFC 9110, 11.6.2), as commands are given it.
_HEADER = re.compile(r"(?i)(?<=authorization:)(\s*(?:[a-z]+\s+(?!\S*://))?)([^\s'\"\\]+)")
_TAIL = re.compile(r"[?#;]")  # a query, a fragment, parameters of a path: signatures and tokens
_AFTER_HEAD = re.compile(r"[/?#;]")
_SHORTEST = 4  # characters of a secret that is looked for by itself


def shown(text: str) -> str:
    """A text without the secrets of the urls in it: ``https://***@host/a.tar?***``.

    Nor with those of an address without a scheme, of one of scp, or of a header ``Authorization``. A user and
    a password may hold an unescaped ``/``, ``?`` or ``#``: they end at the last ``@`` wherever the url begins
    as theirs would, and where a query might lie among them, nothing else is shown.
    """
    if ":" not in text:
        return text
    return _HEADER.sub(rf"\1{MASK}", _RUN.sub(lambda found: _shown(found[0]), text))


def _shown(run: str) -> str:
    user, place, tail = _parts(run)
    mark = run[len(run) - len(tail) - 1] if tail and place else ""
    return ("" if user is None else f"{MASK}@") + place + mark + (MASK if tail else "")


def _parts(run: str) -> tuple[str | None, str, str]:
    """User and password (None where there are none), the place, and what follows it."""
    head = _AFTER_HEAD.split(run, maxsplit=1)[0]
    plain = "@" not in head and ":" not in head
    before = _TAIL.split(run, maxsplit=1)[0] if plain else run
    user = before.rpartition("@")[0] if "@" in before and (not plain or "://" in before) else None
    rest = run if user is None else run[len(user) + 1 :]
    if user is not None and _TAIL.search(user):
        return user, "", rest
    place, tail = _TAIL.split(rest, maxsplit=1) if _TAIL.search(rest[:-1]) else (rest, "")
    return user, place, tail


def secrets_of(text: str) -> set[str]:
    """The secrets of the urls in a text, as libraries may name them without their url."""
    parts = [part for run in _RUN.findall(text) for part in _parts(run)[::2] if part]
    parts += [part.partition(":")[2] for part in parts]
    parts += [secret for _, secret in _HEADER.findall(text)]
    return {one for part in parts for one in (part, unquote(part)) if len(one) >= _SHORTEST}


def without_secrets(text: str, url: str) -> str:
    """A message about a url, by whomever, as it may be shown."""
    text = shown(text)
    for secret in sorted(secrets_of(url), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text
