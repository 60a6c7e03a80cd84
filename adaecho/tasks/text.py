"""Language models on text: loss per token, evaluation, entropies to compare with, a sample."""

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from adaecho.config.schema import Config
from adaecho.datasets.documents import find_documents
from adaecho.datasets.split import refuse_number
from adaecho.datasets.text_stream import TokenStream
from adaecho.datasets.tokens import END, PAD, Packing, cached_tokenizer, dtype_of, key_of, tokenized
from adaecho.errors import DataError
from adaecho.ranks import SINGLE_PROCESS, DistributedContext
from adaecho.tasks.base import TOKENIZER, Batch, LossAndWeight, Split, Task
from adaecho.tasks.options import CommonCrawlOptions, TextOptions

_SAMPLE_TOKENS = 48


def build(config: Config, options: TextOptions) -> Task:
    """The tasks small_text, lm1b and common_crawl.

    Raises:
        DataError: the text is missing, too short, or has more bad documents than allowed.
        ConfigError: it doesn't support the vocabulary.
    """
    if config.data.path is None and options.needs:
        raise DataError(f"data.path=null: {options.name} needs {options.needs}")
    return _streamed(config, options) if isinstance(options, CommonCrawlOptions) else _cached(config, options)


def _cached(config: Config, options: TextOptions) -> Task:
    """A language model on text whose tokens are made once."""
    documents = find_documents(config.data.path, column=options.column, lines=options.lines)
    packing = Packing(options.packing, options.block, options.vocabulary)
    data = config.data
    found = tokenized(documents, packing, data.validation_examples, data.split_seed, data.max_bad_examples)
    validation, skipped = found.validation[: config.evaluate.max_examples], found.meta["skipped"]
    return language_model(
        config,
        options,
        {"tokens": found.train},
        lambda: validation,
        found.tokenizer,
        skipped_examples=skipped["bad"] + skipped["empty"] + skipped["too_short"],
        files=documents.files,
        facts={
            TOKENIZER: found.meta["tokenizer sha256"],
            "documents": found.meta["documents"],
            "held_out_of": found.meta["held_out_of"],
            "skipped": skipped,
            "train_examples": len(found.train),
            "validation_tokens": int((validation[:, 1:] != PAD).sum()),
        },
    )


def _streamed(config: Config, options: CommonCrawlOptions) -> Task:
    """A language model on documents that are never held together."""
    data = config.data
    refuse_number(data.validation_examples, "a stream")
    documents = find_documents(data.path, column=options.column, lines=options.lines)
    if documents.held_out is None:
        raise DataError(f"data.path={data.path}: needs files whose names hold validation, or such a split")
    first = (text for shard in documents.parts["train"] for _, text in documents.read(shard))
    texts = (text for text in islice(first, options.tokenizer_documents) if isinstance(text, str))
    key = key_of(documents, options.vocabulary, options.tokenizer_documents)
    tokenizer = cached_tokenizer(key, texts, options.vocabulary)
    settings = (tokenizer, options.block, dtype_of(options.vocabulary), data.max_bad_examples)
    held_out = TokenStream(documents, documents.held_out, *settings)

    def validation() -> Iterator[NDArray[Any]]:
        return (example["tokens"] for example in islice(held_out, config.evaluate.max_examples))

    return language_model(
        config,
        options,
        TokenStream(documents, "train", *settings),
        validation,
        tokenizer,
        files=documents.files,
        facts={
            TOKENIZER: hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
            "files": {part: len(shards) for part, shards in documents.parts.items()},
        },
    )


def language_model(
    config: Config,
    options: TextOptions,
    source: Any,
    validation: Callable[[], Iterable[NDArray[Any]]],
    tokenizer: Any,
    *,
    facts: dict[str, Any],
    files: Sequence[Path],
    skipped_examples: int = 0,
) -> Task:
    """A task whose examples are tokens, neither decoded nor augmented.

    Args:
        source: of examples with ``tokens`` [block + 1].
        validation: the held-out ones, anew at each call: in memory or a stream.
        tokenizer: for the sample at the end.
        facts, files, skipped_examples: as in ``Task``; the entropies of the held-out tokens are added to the
            facts, and a checkpoint is only continued with the same tokenizer.
    """
    if config.echo.variant == "example_after_augmentation":
        print(
            "note: text is not augmented, so echo=example_after_augmentation gives the batches of "
            "echo=example_before_augmentation, bit for bit",
            file=sys.stderr,
        )
    return Task(
        name=options.name,
        metrics={"cross_entropy": "min"},
        source=source,
        build_model=options.build_model,
        loss=partial(loss, label_smoothing=options.label_smoothing),
        weight=weight,
        evaluate=evaluator(validation, config.evaluate.batch_size),
        skipped_examples=skipped_examples,
        fingerprint={TOKENIZER: facts[TOKENIZER]},
        files=files,
        facts={**facts, **entropies(np.stack(list(validation())))},
        at_end=_sampler(tokenizer, options.block, config.seed),
    )


def loss(model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> LossAndWeight:
    """Sum of the cross entropies of all predicted tokens in nats, and their number; PAD isn't predicted."""
    inputs, targets = _split(batch["tokens"])
    logits = model(inputs).float().flatten(0, 1)
    total = functional.cross_entropy(
        logits, targets.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=label_smoothing
    )
    return total, (targets != PAD).sum()


def weight(batch: Batch) -> torch.Tensor:
    """The weight that ``loss`` returns."""
    return _split(batch["tokens"])[1].ne(PAD).sum()


def _split(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is seen and what is predicted, int64 [N, block] each."""
    whole = tokens.to(torch.int64)
    return whole[:, :-1], whole[:, 1:]


def evaluator(validation: Callable[[], Iterable[NDArray[Any]]], batch_size: int) -> Any:
    """``Task.evaluate``: mean cross entropy over tokens, whatever the batches.

    Args:
        validation: as for ``language_model``.
        batch_size: examples at once.
    """

    def evaluate(
        model: nn.Module,
        split: Split,  # noqa: ARG001
        *,
        device: torch.device,
        ranks: DistributedContext = SINGLE_PROCESS,
    ) -> dict[str, float]:
        total, number = 0.0, 0
        # A stream doesn't tell its length: each rank takes every world_size-th batch of it.
        batches = islice(_batches(iter(validation()), batch_size), ranks.rank, None, ranks.world_size)
        for rows in batches:
            sum_, count = loss(model, {"tokens": torch.from_numpy(rows.astype(np.int64)).to(device)})
            total, number = total + sum_.item(), number + int(count)
        total, predicted = ranks.sums([total, number])
        return {"cross_entropy": total / max(predicted, 1)}

    return evaluate


def _batches(examples: Iterator[NDArray[Any]], batch_size: int) -> Iterator[NDArray[Any]]:
    while batch := list(islice(examples, batch_size)):
        yield np.stack(batch)


def entropies(examples: NDArray[Any]) -> dict[str, float]:
    """Nats per predicted token: what the best unigram and the best bigram model of them would reach.

    They are of the counts of these very tokens, so the bigram's is optimistic on few of them.
    """
    pairs = np.stack([examples[:, :-1].ravel(), examples[:, 1:].ravel()]).astype(np.int64)
    pairs = pairs[:, pairs[1] != PAD]
    unigram = _entropy(np.unique(pairs[1], return_counts=True)[1])
    joint = _entropy(np.unique(pairs[0] << 32 | pairs[1], return_counts=True)[1])
    context = _entropy(np.unique(pairs[0], return_counts=True)[1])
    return {"unigram_entropy": unigram, "bigram_entropy": joint - context}


def _entropy(counts: NDArray[np.int64]) -> float:
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _sampler(tokenizer: Any, block: int, seed: int) -> Callable[[nn.Module, torch.device], dict[str, Any]]:
    """``Task.at_end``: some tokens drawn from the model, from the beginning of a document on."""

    def sample(model: nn.Module, device: torch.device) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        tokens = [END]
        for _ in range(_SAMPLE_TOKENS):
            logits = model(torch.tensor([tokens[-block:]], device=device))[0, -1].float().cpu()
            logits[PAD] = -math.inf
            tokens.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
        return {"sample": tokenizer.decode(tokens[1:])}

    return sample
