"""Load tables with Hugging Face's ``datasets``, report storage errors, and count unreadable examples."""

import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from adaecho.errors import DataError, warn

FILES = "files_sha256"
_LISTED = 20  # an error message lists at most this many bad examples
_REMEDY = "after fixing it, run the same command again: a run resumes from its checkpoint"


class Tables(NamedTuple):
    """The tables of a dataset, one for each split.

    Attributes:
        splits: a ``datasets.Dataset`` for each split name, such as "train".
        files: the local files of the tables.
    """

    splits: dict[str, Any]
    files: list[Path]


def load_tables(path: str, columns: tuple[str, ...], key: str = "data.path") -> Tables:
    """Load the given columns of a dataset, for each of its splits, with Hugging Face's ``datasets``."""
    # path is a local folder, or a hub id: owner/name, or owner/name/configuration. key is the config key that
    # contains the path, for messages. The splits keep the names that datasets gives them.
    import datasets  # imported here, because it takes most of a second

    datasets.disable_progress_bars()
    local = Path(path).expanduser()
    owner_name, configuration = "/".join(path.split("/")[:2]), "/".join(path.split("/")[2:]) or None
    if not local.exists() and ("://" in path or path.count("/") not in (1, 2)):
        raise DataError(f"{key}={path}: there is no such file or folder, and it is not a Hub ID (owner/name)")
    named = (str(local.resolve()), None) if local.exists() else (owner_name, configuration)
    try:
        # Always map the files, even if HF_DATASETS_IN_MEMORY_MAX_SIZE would load small tables into memory.
        splits = datasets.load_dataset(*named, keep_in_memory=False)
    except Exception as error:  # datasets raises many types of errors if tables cannot be loaded
        what = "cannot be loaded" if local.exists() else "no such folder, and the Hub ID cannot be loaded"
        raise DataError(
            f"{key}={path}: {what} ({type(error).__name__}: {error}). Check files, name, connection and "
            "access (HF_HUB_OFFLINE=1 reads only the cache)"
        ) from error
    for name, split in splits.items():
        if not {*columns} <= {*split.features}:
            raise DataError(
                f"{key}={path}: split {name} needs the columns {', '.join(columns)}, but has "
                f"{', '.join(split.features)}"
            )
        for column in columns:
            if isinstance(split.features[column], datasets.Image):
                split = split.cast_column(column, datasets.Image(decode=False))  # images stay encoded
        splits[name] = split.select_columns(list(columns))
    if local.exists():
        files = sorted(visible_files(local))
    else:
        files = [Path(file["filename"]) for split in splits.values() for file in split.cache_files]
    return Tables(dict(splits), files)


def visible_files(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, except hidden files and those in hidden folders."""
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if entry.name[0] != ".":
            yield from visible_files(folder / entry.name) if entry.is_dir() else [folder / entry.name]


@contextmanager
def storage_errors() -> Iterator[None]:
    """Convert storage errors in the ``with`` block to a ``DataError`` with cause and remedy."""
    try:
        yield
    except (ConnectionError, tarfile.TarError) as error:
        raise DataError(f"{error}; {_REMEDY}") from error
    except OSError as error:
        if error.filename is None:  # the error does not concern a file
            raise
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); {_REMEDY}") from error


def digest_of_files(files: Iterable[str | os.PathLike[str]]) -> dict[str, str]:
    """Return a hash of the names and sizes of files, as a dict with one item."""
    # Without files, the dict is empty. File contents are not read, and for a URL, only the name is hashed.
    names = sorted(map(str, files))
    if not names:
        return {}
    # A resumed run compares this digest to detect added, removed or replaced files.
    with storage_errors():
        lines = "\n".join(map(_name_and_size, names))
    return {FILES: hashlib.sha256(os.fsencode(lines)).hexdigest()[:16]}


def _name_and_size(name: str) -> str:
    path = Path(name.partition("?")[0])
    size = "" if "://" in name else os.stat(name).st_size
    return f"{path.parent.name}/{path.name} {size}"


class BadExampleBudget:
    """Collects bad examples that were skipped, and raises an error if there are too many.

    Args:
        budget: the maximum number of bad examples, ``data.max_bad_examples``.

    Attributes:
        found: one line for each skipped example, with its origin and the reason.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self.found = budget, list[str]()

    def add(self, *lines: str) -> None:
        """Record skipped examples, and print a warning for each one.

        Args:
            lines: one line per example, with the file and row, a colon, and the reason.

        Raises:
            DataError: there are now more bad examples than the budget allows.
        """
        self.found += lines
        if len(self.found) > self._budget:
            raise DataError(
                f"more bad examples ({len(self.found)}) than data.max_bad_examples={self._budget} allows; "
                "repair the files, or allow more:\n  " + "\n  ".join(self.found[:_LISTED])
            )
        for line in lines:
            warn(f"bad example skipped: {line}")
