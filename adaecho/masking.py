"""What of a text is not shown: secrets of urls, and what a terminal would obey instead of showing it.

Of a url, user and password and its query (signatures, tokens) are nobody else's business. Nothing that is
kept or shown holds them: records, messages, logs and trackers get ``https://***@host/a.tar?***``. (What a
source of one's own tells of its position is kept as it is: it goes on from there.) Such a record is read
back as what this process knows in full: from its command line, from its launcher, or from the variable
``ADAECHO_URLS`` (several, by blanks).
"""

import os
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

VARIABLE = "ADAECHO_URLS"
MASK = "***"
# What follows the scheme of a url in a text; also of one without a scheme, and what scp takes, where these
# begin with user and password: names of files with : and @ in them are left alone. 255 keep it linear. Paths
# of folders make one slash of two.
_RUN = re.compile(
    r"""(?<=://)\S+
    |(?<=https:/)(?!/)\S+|(?<=http:/)(?!/)\S+
    |(?<=//)(?<![^\s'"=]//)(?=[^\s/:@]+:[^\s/@]{1,255}@)\S+
    |(?<![^\s'"=])(?=[^\s/:@'"=]+:[^\s/@]{1,255}@[\w.-]+:/)\S+""",
    re.VERBOSE,
)
# Of a header of HTTP (RFC 9110, 11.6.2), as commands are given it.
_HEADER = re.compile(r"(?i)(?<=authorization:)(\s*(?:[a-z]+\s+(?!\S*://))?)([^\s'\"\\]+)")
_TAIL = re.compile(r"[?#;]")  # a query, a fragment, parameters of a path: signatures and tokens
_AFTER_HEAD = re.compile(r"[/?#;]")
_SHORTEST = 4  # characters of a secret that is looked for by itself
_MASKED = re.compile(r"(?<![^\s'\"=/])\*{3}@|://\S*[?#;]\*{3}")
# C0 and C1 (ISO 6429), separators of lines, marks of direction (Unicode UAX 9), halves of no character.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

_whole: dict[str, str] = {}  # by what is shown of them; empty where that could be one of several
_secrets: set[str] = set()


def masked(value: Any) -> Any:
    """A text without the secrets of the urls in it, or dicts (their keys too), lists and tuples of such.

    It is the same in every process, so that a run has one identity.
    """
    if type(value) is dict:
        return {masked(key): masked(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(masked(item) for item in value)
    return shown(value) if isinstance(value, str) else value


def presentable(text: object) -> str:
    """A text as it may be printed: masked, and control characters, but newline and tab, written out.

    Libraries may name a secret that is known without its url. Text out of records, files' names and data may
    be anyone's: printed raw it could move the cursor, hide lines or turn the reading direction.
    """
    presented = shown(str(text))
    for secret in _secrets:
        presented = presented.replace(secret, MASK)
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), presented)


def secret_urls(value: Any) -> list[str]:
    """The texts in a tree of dicts and lists that hold a secret, each once."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return list(dict.fromkeys(url for item in value for url in secret_urls(item)))
    return [value] if isinstance(value, str) and masked(value) != value else []


def know(urls: Iterable[str]) -> None:
    """Remember urls in full, for ``whole`` and ``presentable``."""
    for url in secret_urls(list(urls)):
        kept = masked(url)
        # Where no place is left, another url is not this one signed anew.
        _whole[kept] = "" if f"@{MASK}" in kept and _whole.get(kept, url) != url else url
        _secrets.update(secrets_of(url))


def whole(text: str) -> str:
    """What a masked url stood for; any other text as it is.

    Raises:
        ValueError: nobody has told this process.
    """
    if _MASKED.search(text) is None:
        return text
    know(os.environ.get(VARIABLE, "").split())
    if not _whole.get(text):
        of = "several urls" if text in _whole else "a url"
        raise ValueError(
            f"{text} is what a record keeps of {of}, without user, password and query (in which / ? # @ are "
            "written %2F %3F %23 %40); give the whole url, in the command or in the environment as "
            f"{VARIABLE}"
        )
    return _whole[text]


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
    if not tail.startswith(MASK) or tail.strip("*:,;.'\")]}>"):  # no mask, with the rest of a sentence
        tail = MASK if tail else ""
    return ("" if user is None else f"{MASK}@") + place + mark + tail


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
