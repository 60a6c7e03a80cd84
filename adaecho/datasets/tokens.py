"""Text as token numbers, made once: a tokenizer and memory-mapped examples in the cache folder."""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from adaecho.cache import cache_folder
from adaecho.datasets.documents import Documents
from adaecho.datasets.split import hold_out_rows
from adaecho.datasets.storage import SkippedExamples, fingerprint_of
from adaecho.errors import ConfigError, DataError

PAD, END = 0, 1  # numbers of the two special tokens: fills a short example; ends (and begins) a document
_VERSION = 5
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
        meta: counts, and the sha256 of the tokenizer.
    """

    tokenizer: Any
    train: NDArray[Any]
    validation: NDArray[Any]
    meta: dict[str, Any]


def key_of(documents: Documents, *others: Any) -> str:
    """Names what is made of documents; another where a file was written since, or others are asked for."""
    times = [(str(file), file.stat().st_mtime_ns) for file in documents.files]
    told = [times, fingerprint_of(documents.files), documents.column, documents.lines, *others, _VERSION]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def tokenized(
    documents: Documents,
    packing: Packing,
    num_validation: int | None,
    split_seed: int,
    max_bad_examples: int,
) -> Tokens:
    """The examples of these documents, from the cache or made now.

    Args:
        documents: where ``num_validation`` is None their part ``validation`` (else ``test``) is held out.
        packing: how they become examples.
        num_validation: documents to hold out of the training ones.
        split_seed: which of them.
        max_bad_examples: documents that can't be read to skip.

    Raises:
        DataError: more bad documents than allowed, too little text, or the cache can't be written.
        ConfigError: the data doesn't support so large a vocabulary.
    """
    folder = cache_folder() / key_of(documents, vars(packing), num_validation, split_seed, max_bad_examples)
    if not folder.exists():
        bad = SkippedExamples(max_bad_examples)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: a process may be killed at any instant.
            with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as made:
                _make(Path(made), documents, packing, num_validation, split_seed, bad)
                _put(Path(made), folder)
        except OSError as error:
            raise _cant_be_written(folder, error) from error
    meta = json.loads((folder / "meta.json").read_text())
    train, validation = (_blocks(folder / f"{part}.bin", packing) for part in ("train", "validation"))
    return Tokens(_from_text((folder / "tokenizer.json").read_text("utf-8")), train, validation, meta)


def _put(made: Path, place: Path) -> None:
    """Rename what was made into its place; what another process has put there meanwhile stays."""
    try:
        made.rename(place)
    except OSError:
        if not place.exists():
            raise


def _cant_be_written(place: Path, error: OSError) -> DataError:
    return DataError(
        f"{place}: the cache of tokens can't be written ({error.strerror or error}); free some space, or "
        "set ADAECHO_CACHE to a folder that can hold it"
    )


def _blocks(file: Path, packing: Packing) -> NDArray[Any]:
    """Its examples [n, block + 1]."""
    flat = np.memmap(file, dtype_of(packing.vocabulary), "r")
    if packing.kind == "sentence":
        return flat.reshape(-1, packing.block + 1)
    return np.lib.stride_tricks.sliding_window_view(flat, packing.block + 1)[:: packing.block]


def cached_tokenizer(key: str, texts: Iterator[str], vocabulary: int) -> Any:
    """The tokenizer of some texts, trained once.

    Args:
        key: names these texts; see ``key_of``.
        texts: read where it isn't in the cache yet.
        vocabulary: of the tokenizer.
    """
    path = cache_folder() / f"{key}.tokenizer.json"
    if not path.exists():
        trained = train_tokenizer(texts, vocabulary).to_str()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as made:
                Path(made, path.name).write_text(trained, "utf-8")
                Path(made, path.name).replace(path)
        except OSError as error:
            raise _cant_be_written(path, error) from error
    return _from_text(path.read_text("utf-8"))


def _from_text(text: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True  # not kept in it
    return tokenizer


def _make(
    folder: Path,
    documents: Documents,
    packing: Packing,
    num_validation: int | None,
    seed: int,
    bad: SkippedExamples,
) -> None:
    """Three passes over the documents: count them, train the tokenizer, write token numbers."""
    counts, dtype = {"empty": 0, "too_short": 0, "cut": 0}, dtype_of(packing.vocabulary)

    def texts(part: str, *, count: bool = False) -> Iterator[str]:
        """Usable documents; those that aren't are counted in one of the passes."""
        for shard in documents.parts[part]:
            for origin, text in documents.read(shard):
                if isinstance(text, Exception):
                    if count:
                        bad.add(origin, str(text))
                elif text.strip():
                    yield text
                elif count:
                    counts["empty"] += 1

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
    own, held_out = documents.held_out, set[int]()
    if num_validation is not None or own is None:
        held_out = set(hold_out_rows(number, num_validation, seed=seed)[1].tolist())
    kept = (text for row, text in enumerate(texts("train")) if row not in held_out)
    tokenizer = train_tokenizer(kept, packing.vocabulary)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")
    sizes = {"train": number - len(held_out), "validation": len(held_out)}
    with (folder / "train.bin").open("wb") as train, (folder / "validation.bin").open("wb") as validation:
        for row, encoded in enumerate(encode_all(tokenizer, texts("train"))):
            write(validation if row in held_out else train, encoded)
        if not held_out:
            assert own is not None
            for encoded in encode_all(tokenizer, texts(own, count=True)):
                sizes["validation"] += 1
                write(validation, encoded)
    for part in ("train", "validation"):
        if (folder / f"{part}.bin").stat().st_size < (packing.block + 1) * dtype.itemsize:
            raise DataError(
                f"data.path: its {part} text gives not one example of task.block={packing.block} tokens; "
                "give more text or a smaller block"
            )
    meta = {
        "documents": sizes,
        "held_out_of": "train" if held_out else own,
        "tokenizer sha256": hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        "skipped": {**counts, "bad": bad.count},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))


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
    with suppress(StopIteration):  # of no text at all
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
