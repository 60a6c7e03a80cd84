"""Text as token numbers, made once: a tokenizer and memory-mapped examples, in a cache beside the data.

The cache is a folder named by text, tokenizer and packing: ``tokenizer.json``, ``train.bin``,
``validation.bin`` and, written last, ``meta.json``. It is made under another name and renamed when it is
whole, so that a process killed at any instant leaves none that looks whole. ``meta.json`` holds the sha256 of
each file and of itself: what was damaged since is made anew.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from adaecho.datasets.documents import Files
from adaecho.datasets.split import hold_out_rows
from adaecho.datasets.storage import SkippedExamples
from adaecho.errors import ConfigError, DataError, FolderError, warn
from adaecho.records.files import check_no_link, write_text
from adaecho.records.lock import alone

PAD, END = 0, 1  # numbers of the two special tokens: fills a short example; ends (and begins) a document
_VERSION = 4
_FILES = ("tokenizer.json", "train.bin", "validation.bin")
_DOCUMENTS = 512  # encoded at once


@dataclass(frozen=True)
class Packing:
    """How documents become examples of ``block`` predictions, so of ``block + 1`` tokens.

    Attributes:
        kind: ``packed`` joins documents, an END after each, and cuts the whole into blocks that overlap in
            one token; the tail is dropped. ``sentence`` makes one example of each document, END before and
            after, filled up with PAD; what is longer is cut.
        block: predictions of an example.
        vocabulary: token numbers, PAD and END among them.
    """

    kind: str
    block: int
    vocabulary: int


@dataclass(frozen=True)
class Tokens:
    """What the cache holds.

    Attributes:
        tokenizer: of the ``tokenizers`` library.
        train, validation: unsigned [n, block + 1], memory-mapped.
        meta: counts, and the sha256 of data and tokenizer.
    """

    tokenizer: Any
    train: NDArray[Any]
    validation: NDArray[Any]
    meta: dict[str, Any]


def cache_folder() -> Path:
    """``$ADAECHO_CACHE``, else ``adaecho`` in the user's cache folder."""
    own = os.environ.get("ADAECHO_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "adaecho"


def tokenized(
    files: Files, packing: Packing, num_validation: int | None, split_seed: int, max_bad_examples: int
) -> Tokens:
    """The examples of these documents, from the cache or made now.

    Args:
        files: the documents; those of a part ``validation`` (else ``test``) are held out where
            ``num_validation`` is None.
        packing: how they become examples.
        num_validation: documents to hold out of the training ones.
        split_seed: which of them.
        max_bad_examples: documents that can't be read to skip.

    Raises:
        DataError: more bad documents than allowed, too little text, or the cache can't be written.
        ConfigError: the data doesn't support so large a vocabulary.
    """
    text = files.key()
    parts = {
        "text": text,
        "packing": vars(packing),
        "held out": [num_validation, split_seed, max_bad_examples],
    }
    folder = cache_folder() / _sha256_of_content({**parts, "version": _VERSION})[:16]
    found = _open(folder, packing)
    if found is None:
        _make(folder, files, text, packing, num_validation, split_seed, SkippedExamples(max_bad_examples))
        found = _open(folder, packing)
    if found is None:
        raise DataError(
            f"{folder}: the cache of tokens was removed or damaged as soon as it was made; run the same "
            "command again, or set ADAECHO_CACHE to a folder where nothing else writes"
        )
    return found


def _open(folder: Path, packing: Packing) -> Tokens | None:
    """The cache in a folder; None where there is none, or one that is damaged."""
    try:
        return _read_cache(folder, packing)
    except ValueError as error:
        warn(f"{folder}: the cache of tokens {error} and is made anew")
        return None


def _read_cache(folder: Path, packing: Packing) -> Tokens | None:
    meta = _read_meta(folder)
    if meta is None:
        return None
    train, validation = (_blocks(folder / f"{part}.bin", packing) for part in ("train", "validation"))
    return Tokens(_read(folder.joinpath("tokenizer.json").read_text("utf-8")), train, validation, meta)


def _read_meta(folder: Path) -> dict[str, Any] | None:
    """What ``meta.json`` holds; None where there is no cache.

    Raises:
        ValueError: it or a file that it tells of is not as it was written.
    """
    try:
        meta = _unsealed((folder / "meta.json").read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise ValueError(f"is damaged (meta.json: {error})") from error
    digests = meta.get("sha256 of files")
    if not isinstance(digests, dict) or set(digests) != set(_FILES):
        raise ValueError("is damaged (meta.json: is not of its files)")
    for name, sha256 in digests.items():
        try:
            check_no_link(folder / name)
            found = _sha256_of_file(folder / name)
        except (OSError, FolderError) as error:
            raise ValueError(f"is damaged ({name}: {getattr(error, 'strerror', error)})") from error
        if found != sha256:
            raise ValueError(f"is damaged ({name} is not as it was written)")
    return meta


def _sha256_of_file(path: Path) -> str:
    about = path.stat()
    return _sha256_of_state(path, about.st_ino, about.st_size, about.st_mtime_ns)


@cache  # a sweep's worker opens one cache for each of its trials
def _sha256_of_state(path: Path, *_state_of_file: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sealed(content: dict[str, Any]) -> str:
    """JSON that holds its own digest."""
    return json.dumps({**content, "sha256": _sha256_of_content(content)}, indent=2)


def _unsealed(text: bytes) -> dict[str, Any]:
    """What was sealed.

    Raises:
        ValueError: the text is something else.
    """
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if not isinstance(content, dict) or content.pop("sha256", None) != _sha256_of_content(content):
        raise ValueError("is not as it was written")
    return content


def _sha256_of_content(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _blocks(file: Path, packing: Packing) -> NDArray[Any]:
    """Its examples; types and shapes are those asked for, whatever the file of a cache from others says.

    Raises:
        ValueError: the file is of another size.
    """
    dtype = dtype_of(packing.vocabulary)
    row_bytes = (packing.block + 1) * dtype.itemsize
    size = file.stat().st_size
    if size < row_bytes or size % (row_bytes if packing.kind == "sentence" else dtype.itemsize):
        raise ValueError(f"is damaged ({file.name} has {size} bytes)")
    flat = np.memmap(file, dtype, "r")
    if packing.kind == "sentence":
        return flat.reshape(-1, packing.block + 1)
    return np.lib.stride_tricks.sliding_window_view(flat, packing.block + 1)[:: packing.block]


def _make(
    folder: Path,
    files: Files,
    text: str,
    packing: Packing,
    num_validation: int | None,
    seed: int,
    bad: SkippedExamples,
) -> None:
    partial = _beside(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _begun(partial, folder):
            _Maker(partial, files, packing, bad).make(num_validation, seed)
            if files.key() != text:
                raise DataError(
                    f"data.path={files.root}: the text was written again while its tokens were made; run the "
                    "same command once nothing writes there"
                )
            _put(partial, folder, packing)
    except OSError as error:
        raise DataError(
            f"{folder}: the cache of tokens can't be written ({error.strerror or error}); nothing half-made "
            "is left. Free some space, or set ADAECHO_CACHE to a folder that can hold it"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    bad.report()


def _put(partial: Path, folder: Path, packing: Packing) -> None:
    """Rename a new cache into its place, in one step.

    One that another process has put there meanwhile stays: the workers of a sweep begin, and end, together.
    """
    try:
        partial.rename(folder)
    except OSError:  # something stands there
        if _is_whole(folder, packing):
            return
        damaged = _beside(folder)
        try:
            folder.rename(damaged)
            partial.rename(folder)
        finally:
            shutil.rmtree(damaged, ignore_errors=True)


def cached_tokenizer(key: str, texts: Iterator[str], vocabulary: int) -> Any:
    """The tokenizer of some texts, trained once.

    Args:
        key: says which texts these are; see ``Files.key``.
        texts: read where it isn't in the cache yet.
        vocabulary: of the tokenizer.
    """
    digest = hashlib.sha256(json.dumps([key, _VERSION]).encode()).hexdigest()[:16]
    path = cache_folder() / f"{digest}.tokenizer.json"
    try:
        return _read(_unsealed(path.read_bytes())["tokenizer"])
    except FileNotFoundError:
        pass
    except (ValueError, OSError) as error:
        warn(f"{path}: the tokenizer is damaged ({error}) and trained anew")
    tokenizer = train_tokenizer(texts, vocabulary)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, _sealed({"tokenizer": tokenizer.to_str()}), durable=False)
    except (OSError, FolderError) as error:
        raise DataError(f"the tokenizer can't be kept; set ADAECHO_CACHE ({error})") from error
    return tokenizer


def _read(text: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True  # not kept in it
    return tokenizer


def _is_whole(folder: Path, packing: Packing) -> bool:
    try:
        return _read_cache(folder, packing) is not None
    except ValueError:
        return False


def _prefix(folder: Path) -> str:
    """What names begin with that this host's processes make: a cache may be shared by many hosts."""
    return f".{folder.name}.{socket.gethostname()}."


def _beside(folder: Path) -> Path:
    """A new name. Not by process: those of two containers may have one number, and their hosts one name."""
    return folder.with_name(f"{_prefix(folder)}{uuid.uuid4().hex}.partial")


@contextmanager
def _begun(partial: Path, folder: Path) -> Iterator[None]:
    """Make the folder to build in, and hold its last file locked meanwhile; remove what killed ones left.

    A file system that locks nothing keeps what they left.
    """
    with alone(folder.parent):  # so that none that has just begun looks abandoned
        for path in folder.parent.glob(f"{_prefix(folder)}*.partial"):
            with suppress(OSError), (path / "meta.json").open("ab") as theirs:
                fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        partial.mkdir()
        lock = (partial / "meta.json").open("wb")
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock:
        yield


class _Maker:
    """Three passes over the documents: count them, train the tokenizer, write token numbers."""

    def __init__(self, folder: Path, files: Files, packing: Packing, bad: SkippedExamples) -> None:
        self.folder, self.files, self.packing, self.bad = folder, files, packing, bad
        self.counts = {"empty": 0, "too_short": 0, "cut": 0}
        self.dtype = dtype_of(packing.vocabulary)

    def make(self, num_validation: int | None, seed: int) -> None:
        sha256 = self.files.sha256()  # before anything is read of them
        number = sum(1 for text in self._texts("train", count=True) if text is not None)
        own = next((part for part in ("validation", "test") if part in self.files.parts), None)
        held_out: set[int] = set()
        if num_validation is not None or own is None:
            held_out = set(hold_out_rows(number, num_validation, seed=seed)[1].tolist())
        kept = (text for row, text in enumerate(self._texts("train")) if row not in held_out)
        tokenizer = train_tokenizer(kept, self.packing.vocabulary)
        # Its own save raises no OSError where the disk is full.
        (self.folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")
        documents = {"train": number - len(held_out), "validation": len(held_out)}
        with self._write("train") as train, self._write("validation") as validation:
            for row, encoded in enumerate(encode_all(tokenizer, self._texts("train"))):
                self._add(validation if row in held_out else train, encoded)
            if not held_out:
                assert own is not None
                for encoded in encode_all(tokenizer, self._texts(own, count=True)):
                    documents["validation"] += 1
                    self._add(validation, encoded)
        held_out_of = "train" if held_out else own
        self._finish({"data sha256": sha256, "documents": documents, "held_out_of": held_out_of})

    def _write(self, part: str) -> IO[bytes]:
        return (self.folder / f"{part}.bin").open("wb")

    def _texts(self, part: str, *, count: bool = False) -> Iterator[str]:
        """Usable documents; those that aren't are counted in one of the passes."""
        for shard in self.files.parts[part]:
            for origin, text in self.files.read(shard):
                if isinstance(text, Exception):
                    if count:
                        self.bad.add(origin, str(text))
                elif text.strip():
                    yield text
                elif count:
                    self.counts["empty"] += 1

    def _add(self, file: IO[bytes], encoded: list[int]) -> None:
        if len(encoded) < 2:
            self.counts["too_short"] += 1
            return
        if self.packing.kind == "packed":
            file.write(np.array([*encoded, END], self.dtype).tobytes())
            return
        whole = [END, *encoded, END]
        self.counts["cut"] += len(whole) > self.packing.block + 1
        file.write(sentence(whole, self.packing.block, self.dtype).tobytes())

    def _finish(self, meta: dict[str, Any]) -> None:
        for part in ("train", "validation"):
            if (self.folder / f"{part}.bin").stat().st_size < (self.packing.block + 1) * self.dtype.itemsize:
                raise DataError(
                    f"{self.files.root or 'the standard library'}: its {part} text gives not one example of "
                    f"task.block={self.packing.block} tokens; give more text or a smaller block"
                )
        digests = {name: _sha256_of_file(self.folder / name) for name in _FILES}
        meta |= {
            "tokenizer sha256": digests["tokenizer.json"],
            "sha256 of files": digests,
            "skipped": {**self.counts, "bad": self.bad.count},
        }
        (self.folder / "meta.json").write_text(_sealed(meta))
        for name in (*_FILES, "meta.json"):
            _sync(self.folder / name)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def dtype_of(vocabulary: int) -> np.dtype[Any]:
    """The smallest that holds token numbers."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)


def sentence(tokens: list[int], block: int, dtype: Any) -> NDArray[Any]:
    """``block + 1`` tokens: cut, or filled up with PAD."""
    row = np.full(block + 1, PAD, dtype)
    row[: len(tokens)] = tokens[: block + 1]
    return row


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer (Sennrich et al. 2016) of these texts: every text can be encoded.

    Raises:
        ConfigError: the texts have fewer subwords than ``vocabulary``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.encode_special_tokens = True  # "[PAD]" in a text is text
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["[PAD]", "[END]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with suppress(StopIteration):
        tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocabulary:
        raise ConfigError(
            f"task.vocabulary={vocabulary}: this text supports {found} subwords (the 256 bytes and two "
            f"special ones among them); set task.vocabulary={found} or less, or give more text"
        )
    return tokenizer


def encode_all(tokenizer: Any, texts: Iterator[str]) -> Iterator[list[int]]:
    """Token numbers of each text, in order."""
    while batch := list(islice(texts, _DOCUMENTS)):
        yield from (encoding.ids for encoding in tokenizer.encode_batch_fast(batch))
