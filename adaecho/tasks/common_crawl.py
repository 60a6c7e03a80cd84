"""Common Crawl text with Transformer base, as in the paper's Table 1: 3.9 nats a token, within one epoch.

Documents are streamed, made into many examples each, and never held together: the paper's set is 6.7 TB. The
tokenizer is trained on the first of them and kept in the cache of ``adaecho.datasets.tokens``.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from adaecho.config.schema import Config
from adaecho.datasets.documents import Files, find_documents
from adaecho.datasets.text_stream import TokenStream
from adaecho.datasets.tokens import cached_tokenizer, dtype_of
from adaecho.errors import ConfigError, DataError
from adaecho.tasks.base import Task
from adaecho.tasks.options import CommonCrawlOptions as Options
from adaecho.tasks.text import language_model


def build(config: Config, options: Options) -> Task:
    """The common_crawl task.

    Raises:
        DataError: ``data.path`` is not set or holds no text, or no part of it is a validation split.
        ConfigError: the first documents don't support the vocabulary.
    """
    if config.data.path is None:
        raise DataError(
            "data.path=null: common_crawl needs a folder with C4's files (c4-train.*.json.gz and "
            "c4-validation.*.json.gz), parquet with a column of text, or a hub id, which is downloaded whole"
        )
    if config.data.validation_examples is not None:
        raise ConfigError(
            f"data.validation_examples={config.data.validation_examples}: a stream has no end to hold "
            "examples out of; name files validation-* and give null"
        )
    files = find_documents(config.data.path, column=options.column, lines=options.lines)
    if "validation" not in files.parts:
        raise DataError(f"data.path={config.data.path}: needs files whose names hold validation")
    tokenizer = cached_tokenizer(_key(files, options), _first(files, options), options.vocabulary)
    dtype, bad = dtype_of(options.vocabulary), config.data.max_bad_examples
    held_out = TokenStream(files, "validation", tokenizer, options.block, dtype, bad)

    def validation() -> Iterator[NDArray[Any]]:
        return (example["tokens"] for example in itertools.islice(held_out, config.evaluate.max_examples))

    tokenizer_sha256 = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    return language_model(
        config,
        options,
        TokenStream(files, "train", tokenizer, options.block, dtype, bad),
        validation,
        tokenizer,
        name="common_crawl",
        fingerprint={"tokenizer sha256": tokenizer_sha256},
        files=files.all(),
        facts={
            "tokenizer_sha256": tokenizer_sha256,
            "files": {part: len(shards) for part, shards in files.parts.items()},
        },
    )


def _key(files: Files, options: Options) -> str:
    return json.dumps([files.key(), options.vocabulary, options.tokenizer_documents])


def _first(files: Files, options: Options) -> Iterator[str]:
    """The readable ones of the first training documents."""
    read = (text for shard in files.parts["train"] for _, text in files.read(shard))
    return (text for text in itertools.islice(read, options.tokenizer_documents) if isinstance(text, str))
