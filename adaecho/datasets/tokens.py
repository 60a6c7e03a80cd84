"""Tokenize text, and read it as memory-mapped examples in the cache folder or as a stream of examples."""

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from adaecho.cache import cache_folder
from adaecho.config.schema import DataConfig
from adaecho.datasets.documents import Documents
from adaecho.datasets.split import split_indices
from adaecho.datasets.storage import BadExampleBudget, digest_of_files
from adaecho.errors import ConfigError, DataError

PAD, END = 0, 1  # special tokens: PAD pads short examples; END marks the beginning and end of a document
_VERSION = 5
_DOCUMENTS = 512  # number of documents that are encoded together


@dataclass(frozen=True)
class Packing:
    """How text documents are cut into training examples.

    Attributes:
        kind: ``packed`` joins all documents and cuts them into blocks. ``sentence`` makes each document one
            example, which is padded or truncated.
        block: number of tokens that are predicted in an example. An example has one more token.
        vocabulary: number of different tokens, including PAD and END.
    """

    kind: str
    block: int
    vocabulary: int


@dataclass(frozen=True)
class Tokens:
    """Tokenized examples, as read from the cache.

    Attributes:
        tokenizer: a tokenizer of the ``tokenizers`` library.
        train, validation: the examples as unsigned integers [n, block + 1], memory-mapped.
        meta: numbers of used and skipped documents, and the sha256 of the tokenizer.
    """

    tokenizer: Any
    train: NDArray[Any]
    validation: NDArray[Any]
    meta: dict[str, Any]


def cache_key(documents: Documents, *settings: Any) -> str:
    """Return a hash of the settings and of the name, size and modification time of each file."""
    times = [(str(file), file.stat().st_mtime_ns) for file in documents.files]
    digest = digest_of_files(documents.files)
    key = [times, digest, documents.column, documents.lines, *settings, _VERSION]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def tokenized(documents: Documents, packing: Packing, data: DataConfig) -> Tokens:
    """Return the tokenized examples of documents, from the cache if they were tokenized before."""
    settings = (data.validation_examples, data.split_seed, data.max_bad_examples)
    folder = cache_folder() / cache_key(documents, vars(packing), *settings)
    if not folder.exists():
        with _new_in_cache(folder) as new:
            new.mkdir()
            _make(new, documents, packing, data)
    meta = json.loads((folder / "meta.json").read_text())
    train, validation = (_examples(folder / f"{split}.bin", packing) for split in ("train", "validation"))
    return Tokens(_load_tokenizer(folder / "tokenizer.json"), train, validation, meta)


def cached_tokenizer(key: str, texts: Iterator[str], vocabulary: int) -> Any:
    """Return a tokenizer from the cache. If it is not there yet, train it first.

    Args:
        key: cache key of the texts; see ``cache_key``.
        texts: training texts, read only if the tokenizer is not in the cache.
        vocabulary: number of different tokens.
    """
    file = cache_folder() / f"{key}.tokenizer.json"
    if not file.exists():
        trained = train_tokenizer(texts, vocabulary).to_str()
        with _new_in_cache(file) as new:
            new.write_text(trained, "utf-8")
    return _load_tokenizer(file)


@contextmanager
def _new_in_cache(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to ``path`` at the end of the ``with`` block."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as folder:
            new = Path(folder, path.name)
            yield new
            _move(new, path)
    except OSError as error:
        raise DataError(
            f"{path}: the token cache cannot be written ({error.strerror or error}); free some space, or set "
            "ADAECHO_CACHE to a folder with space"
        ) from error


def _move(new: Path, path: Path) -> None:
    """Rename a folder to ``path``, or keep the folder that another process has created there."""
    try:
        new.rename(path)
    except OSError:
        if not path.exists():
            raise


def _examples(file: Path, packing: Packing) -> NDArray[Any]:
    """Memory-map the examples in a file, as an array [n, block + 1]."""
    flat = np.memmap(file, _dtype(packing.vocabulary), "r")
    if packing.kind == "sentence":
        return flat.reshape(-1, packing.block + 1)
    return np.lib.stride_tricks.sliding_window_view(flat, packing.block + 1)[:: packing.block]


def _load_tokenizer(file: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(file.read_text("utf-8"))
    tokenizer.encode_special_tokens = True  # set it again, because the file does not store this setting
    return tokenizer


def _make(folder: Path, documents: Documents, packing: Packing, data: DataConfig) -> None:
    """Write a tokenizer that is trained on the documents, and the tokenized examples, to a folder."""
    counts, dtype = {"empty": 0, "too_short": 0, "cut": 0}, _dtype(packing.vocabulary)
    bad = BadExampleBudget(data.max_bad_examples)

    def texts(split: str, *, count: bool = False) -> Iterator[str]:
        """Yield the usable documents. If ``count`` is set, count the empty and unreadable ones."""
        for shard in documents.splits[split]:
            for origin, text in documents.read(shard):
                if isinstance(text, str) and text.strip():
                    yield text
                elif count and isinstance(text, str):
                    counts["empty"] += 1
                elif count:
                    bad.add(f"{origin}: {text}")

    def write(file: IO[bytes], encoded: list[int]) -> None:
        whole = [END, *encoded, END]
        if len(encoded) < 2:
            counts["too_short"] += 1
        elif packing.kind == "packed":
            file.write(np.array(whole[1:], dtype).tobytes())
        else:
            counts["cut"] += len(whole) > packing.block + 1
            file.write(sentence(whole, packing.block, dtype).tobytes())

    number = sum(1 for _ in texts("train", count=True))
    own, held_out = documents.held_out or "", set[int]()
    # If validation_examples is None, use the documents' own validation or test split.
    if data.validation_examples is not None or not own:
        held_out.update(split_indices(number, data.validation_examples, seed=data.split_seed)[1].tolist())
    kept = (text for row, text in enumerate(texts("train")) if row not in held_out)
    tokenizer = train_tokenizer(kept, packing.vocabulary)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")
    sizes = {"train": number - len(held_out), "validation": len(held_out)}
    with (folder / "train.bin").open("wb") as train, (folder / "validation.bin").open("wb") as validation:
        for row, encoded in enumerate(_encode_all(tokenizer, texts("train"))):
            write(validation if row in held_out else train, encoded)
        for encoded in () if held_out else _encode_all(tokenizer, texts(own, count=True)):
            sizes["validation"] += 1
            write(validation, encoded)
    for split in sizes:
        if (folder / f"{split}.bin").stat().st_size < (packing.block + 1) * dtype.itemsize:
            raise DataError(
                f"data.path: its {split} text is too short for one example of "
                f"task.block_size={packing.block} tokens; add text, or reduce the block size"
            )
    meta = {
        "documents": sizes,
        "held_out_of": "train" if held_out else own,
        "tokenizer sha256": hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        "skipped": {**counts, "bad": len(bad.found)},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))


def _dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the smallest unsigned type that can represent all token numbers."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)


def sentence(tokens: list[int], block: int, dtype: Any) -> NDArray[Any]:
    """Return the first ``block + 1`` tokens as an array, padded to this length."""
    row = np.full(block + 1, PAD, dtype)
    row[: len(tokens)] = tokens[: block + 1]
    return row


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> Any:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016), which can encode any text.

    Raises:
        ConfigError: the texts have fewer subwords than ``vocabulary``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.encode_special_tokens = True  # the letters "[PAD]" in a text are not the special token
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["[PAD]", "[END]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with suppress(StopIteration):  # the trainer raises it if there is no text
        tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocabulary:
        raise ConfigError(
            f"task.vocab_size={vocabulary}: this text supports {found} subwords, including 256 bytes and two "
            f"special tokens; set task.vocab_size={found} or less, or add text"
        )
    return tokenizer


def _encode_all(tokenizer: Any, texts: Iterator[str]) -> Iterator[list[int]]:
    """Yield the token numbers of each text, in order."""
    while batch := list(islice(texts, _DOCUMENTS)):
        yield from (encoding.ids for encoding in tokenizer.encode_batch_fast(batch))


Cursor = tuple[int, ...]
"""A position in a stream: the index of a file, of a document in the file, and of a block in the document."""


class TokenStream:
    """A stream of tokenized text examples for training a language model.

    An example is ``{"tokens": array}`` with ``block + 1`` tokens. Each document is cut into examples that
    overlap by one token. The last example of a document is padded.

    Args:
        documents: the text documents.
        split: the split to read.
        tokenizer: a tokenizer of the ``tokenizers`` library.
        block: number of tokens that are predicted in an example.
        max_bad_examples: number of unreadable documents that may be skipped in each pass.
    """

    def __init__(
        self, documents: Documents, split: str, tokenizer: Any, block: int, max_bad_examples: int = 0
    ) -> None:
        self.documents, self.shards, self.tokenizer = documents, documents.splits[split], tokenizer
        self.block, self.max_bad_examples = block, max_bad_examples
        self.dtype = _dtype(tokenizer.get_vocab_size())
        self.rank, self.world = 0, 1

    def set_share(self, rank: int, world_size: int) -> None:
        """Yield only this rank's examples from now on. Each example belongs to exactly one rank."""
        self.rank, self.world = rank, world_size

    def __iter__(self) -> "TokenIterator":
        return self.iterate_from((0, 0, 0))

    def iterate_from(self, position: Sequence[int]) -> "TokenIterator":
        """Return an iterator that starts at the ``position`` of another iterator."""
        return TokenIterator(self, position)

    def examples_from(self, shard: int, document: int, block: int) -> Iterator[tuple[Cursor, NDArray[Any]]]:
        """Yield the examples from a position on, each together with the position after it."""
        bad, by_file = BadExampleBudget(self.max_bad_examples), len(self.shards) >= self.world
        for number in range(shard, len(self.shards)):
            if by_file and number % self.world != self.rank:
                continue
            first = document if number == shard else 0
            for row, (origin, text) in enumerate(self.documents.read(self.shards[number], first), first):
                if not by_file and row % self.world != self.rank:
                    continue
                if not isinstance(text, str):
                    bad.add(f"{origin}: {text}")
                    continue
                encoded = self.tokenizer.encode(text).ids if text.strip() else []
                if len(encoded) < 2:
                    continue
                whole, given = [END, *encoded, END], block if (number, row) == (shard, document) else 0
                for index, begin in [*enumerate(range(0, len(whole) - 1, self.block))][given:]:
                    is_last = begin + self.block >= len(whole) - 1
                    after = (number, row + 1, 0) if is_last else (number, row, index + 1)
                    yield after, sentence(whole[begin : begin + self.block + 1], self.block, self.dtype)


class TokenIterator:
    """An iterator over the examples of a ``TokenStream``, for one pass over the documents.

    Attributes:
        position: the position of the next example in the stream (see ``Cursor``).
    """

    def __init__(self, stream: TokenStream, position: Sequence[int]) -> None:
        self.position = tuple(int(number) for number in position)
        self._examples: Any = stream.examples_from(*self.position)

    def __iter__(self) -> "TokenIterator":
        return self

    def __next__(self) -> dict[str, NDArray[Any]]:
        self.position, example = next(self._examples)
        return {"tokens": example}

    def close(self) -> None:
        """Close the file that is open."""
        self._examples.close()
