"""Files that are whole or absent, whenever the process is killed or the disk fills."""

import errno
import json
import math
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml  # type: ignore[import-untyped]

from adaecho.errors import DiskError, FolderError, UserError
from adaecho.masking import masked

# The parser and emitter in C where PyYAML has them: a trial may last a second.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_LARGEST = 1 << 29  # bytes of a record: a table of 100,000 trials has half as many
_MOST_BYTES, _MOST_LEVELS = 1 << 20, 50  # of YAML: a config has some 3,000, and five

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR)
_NOT_A_FOLDER = (errno.ENOTDIR, errno.EEXIST)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes what stands in two places twice: ``read_yaml`` takes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


@contextmanager
def folder_errors(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` inside into a ``DiskError`` that names ``path``, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        raise DiskError(_explain(path, error)) from error


@contextmanager
def record_errors(what: object, kind: type[UserError] = FolderError) -> Iterator[None]:
    """Tell of records that can't be used inside, whoever wrote them, by an error that names ``what``."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise kind(f"{what}: holds records of another form than adaecho writes ({error!r})") from error


def _explain(path: Path, error: OSError) -> str:
    if error.errno in _FULL:
        return (
            f"{path}: the disk is full; nothing was half-written. Free some space and run the same command "
            "again: a run continues from its last checkpoint"
        )
    if error.errno in _NOT_WRITABLE:
        return f"{path}: can't be written ({error.strerror}). Make it writable or choose another folder"
    if error.errno in _NOT_A_FOLDER:
        return f"{path}: a file stands where the run folder should be. Move it or choose another folder"
    return f"{path}: {error.strerror or error}"


@contextmanager
def atomic_file(
    path: Path, *, durable: bool = True, ready: Callable[[], None] | None = None
) -> Iterator[IO[bytes]]:
    """A binary file that becomes ``path`` when the block ends without an error, else leaves no trace.

    What writes files by name may write to ``Path(file.name)`` instead, in the block.

    Args:
        path: the file to write or replace; its folder must exist.
        durable: also survive a power cut (two fsyncs). A kill of the process never needs it.
        ready: called when the bytes are written, right before the rename; an error there calls it off.

    Raises:
        FolderError: the disk is full or the folder can't be written; the old file is as it was.
    """
    # Not named by process: those of two hosts, or containers, may have one number.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    with folder_errors(path):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            if ready is not None:
                ready()
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        if durable:
            sync_folder(path.parent)


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove what a killed ``atomic_file`` of this name left; nobody else may be writing one."""
    for leftover in folder.glob(f".{name}.*.tmp"):
        leftover.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the file system can (some network ones refuse)."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(
    path: Path, text: str, *, durable: bool = True, ready: Callable[[], None] | None = None
) -> None:
    """Replace ``path`` by ``text`` atomically; see ``atomic_file``."""
    with atomic_file(path, durable=durable, ready=ready) as file:
        file.write(text.encode())


def write_json(
    path: Path, value: Any, *, durable: bool = True, ready: Callable[[], None] | None = None
) -> None:
    """Replace ``path`` by indented JSON atomically; see ``atomic_file`` and ``dumps``."""
    write_text(path, dumps(value, indent=2) + "\n", durable=durable, ready=ready)


def open_regular(path: Path) -> IO[bytes]:
    """A file to read, whoever made it: a named pipe in its place would be waited for, for ever.

    Raises:
        OSError: it can't be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file; remove it", str(path))
    return os.fdopen(descriptor, "rb")


def check_no_link(path: Path) -> None:
    """Refuse a symbolic link: in what was received from others it may lead to anything of one's own.

    Raises:
        FolderError: it is one.
    """
    if path.is_symlink():
        raise FolderError(
            f"{path}: leads elsewhere by a symbolic link, through which nothing is read or written; put "
            "there what it leads to, or choose another folder"
        )


def read_bytes(path: Path) -> bytes:
    """What a regular file holds.

    Raises:
        OSError: see ``open_regular``; or it is larger than any record, as one of holes can be on any disk.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _LARGEST:
            raise OSError(errno.EFBIG, f"has {size:,} bytes and is no record; remove it", str(path))
        return file.read()


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        FolderError: it can't be read or is no JSON.
    """
    with folder_errors(path):
        data = read_bytes(path)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        raise FolderError(
            f"{path}: damaged, no JSON ({error}). Restore it, or start anew with fresh=true"
        ) from error


def read_yaml(path: Path) -> Any:
    """The value in a YAML file as ``yaml_text`` makes it; whoever wrote it.

    Raises:
        OSError: it can't be read.
        ValueError: it is no YAML, or refers to parts of itself (a few lines can stand for more than memory
            holds), names types (of what no record holds), is nested too deeply, or too large.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it has {path.stat().st_size:,} bytes")
    text = read_bytes(path).decode("utf-8")
    level = 0
    try:
        for event in yaml.parse(text, _Loader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"it holds an alias, *{event.anchor}")
            if getattr(event, "tag", None) is not None:
                raise ValueError(f"it holds a tag, {event.tag}")
            starts, ends = yaml.CollectionStartEvent, yaml.CollectionEndEvent
            level += isinstance(event, starts) - isinstance(event, ends)
            if level > _MOST_LEVELS:
                raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def yaml_text(value: Any) -> str:
    """Plain values as YAML, in their order, urls without their secrets."""
    text: str = yaml.dump(masked(value), Dumper=_Dumper, sort_keys=False)
    return text


def open_to_append(path: Path) -> int:
    """A descriptor of a file that is made if it is missing; neither a link nor a pipe in its place is used.

    Raises:
        OSError: it can't be written.
    """
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def append(path: Path, text: str, *, ready: Callable[[], None] | None = None) -> None:
    """Add ``text`` to the end of ``path`` with one write; if that fails the file keeps its old length.

    Args:
        path: the file; made if it is missing.
        text: what to add.
        ready: called when the file is open, right before the write; an error there calls it off. A folder
            that is renamed meanwhile takes the open file along.

    Raises:
        FolderError: the disk is full or the file can't be written.
    """
    data = text.encode()
    with folder_errors(path):
        descriptor = open_to_append(path)
        try:
            if ready is not None:
                ready()
            length = os.fstat(descriptor).st_size
            try:
                if os.write(descriptor, data) != len(data):  # a disk that fills takes a part
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(descriptor, length)
                raise
        finally:
            os.close(descriptor)


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that end in a newline; a torn last one is left out; none where the file is missing.

    Raises:
        FolderError: it can't be read.
    """
    if not path.exists():
        return []
    with folder_errors(path):
        lines = read_bytes(path).splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n")]


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: numbers of numpy and torch become plain, NaN and infinities (which JSON lacks) null.

    Urls lose their secrets, as in all that is kept.
    """
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {masked(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return masked(str(value))
    if isinstance(value, str):
        return masked(value)
    if not isinstance(value, int | float | None) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
