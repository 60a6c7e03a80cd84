"""Language models on text: loss per token, evaluation, and entropies for comparison."""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from adaecho.config.schema import Config
from adaecho.datasets.documents import Documents, find_documents
from adaecho.datasets.split import refuse_number
from adaecho.datasets.tokens import PAD, Packing, TokenStream, cache_key, cached_tokenizer, tokenized
from adaecho.errors import DataError
from adaecho.ranks import SINGLE_PROCESS, DistributedContext
from adaecho.tasks.base import TOKENIZER, Batch, LossAndWeight, Metrics, Split, Task
from adaecho.tasks.options import CommonCrawlOptions, TextOptions


def build(config: Config, options: TextOptions) -> Task:
    """The tasks small_text, lm1b and common_crawl. Their examples are tokens ``[block + 1]``.

    Raises:
        DataError: the text is missing, too short, or has more bad documents than allowed.
        ConfigError: the text supports fewer subwords than ``task.vocab_size``.
    """
    if config.data.path is None and options.needs:
        raise DataError(f"data.path=null: {options.name} needs {options.needs}")
    if config.echo.variant == "example_after_augmentation":
        print(
            "note: text has no augmentation, so echo=example_after_augmentation gives the same batches as "
            "echo=example_before_augmentation, bit for bit",
            file=sys.stderr,
        )
    documents = find_documents(config.data.path, column=options.column, lines=options.sample_by == "line")
    if isinstance(options, CommonCrawlOptions):
        data = _streamed(config, options, documents)
    else:
        data = _cached(config, options, documents)
    validation, facts = data.pop("validation"), data.pop("facts")
    return Task(
        name=options.name,
        metrics={"cross_entropy": "min"},
        build_model=options.build_model,
        loss=partial(loss, label_smoothing=options.label_smoothing),
        weight=weight,
        evaluate=evaluator(validation, config.evaluate.batch_size),
        fingerprint={TOKENIZER: facts[TOKENIZER]},
        files=documents.files,
        facts={**facts, **entropies(np.stack(list(validation())))},
        **data,
    )


def _cached(config: Config, options: TextOptions, documents: Documents) -> dict[str, Any]:
    """Tokens that are made once."""
    packing = Packing(options.packing, options.block_size, options.vocab_size)
    found = tokenized(documents, packing, config.data)
    validation, skipped = found.validation[: config.evaluate.max_examples], found.meta["skipped"]
    return {
        "source": {"tokens": found.train},
        "validation": lambda: validation,
        "skipped_examples": skipped["bad"] + skipped["empty"] + skipped["too_short"],
        "facts": {
            TOKENIZER: found.meta["tokenizer sha256"],
            **{name: found.meta[name] for name in ("documents", "held_out_of", "skipped")},
            "train_examples": len(found.train),
            "validation_tokens": int((validation[:, 1:] != PAD).sum()),
        },
    }


def _streamed(config: Config, options: CommonCrawlOptions, documents: Documents) -> dict[str, Any]:
    """Documents that need not fit in memory."""
    refuse_number(config.data.validation_examples, "a stream")
    if documents.held_out is None:
        raise DataError(f"data.path={config.data.path}: needs files named validation, or such a split")
    first = (text for shard in documents.splits["train"] for _, text in documents.read(shard))
    texts = (text for text in islice(first, options.tokenizer_documents) if isinstance(text, str))
    key = cache_key(documents, options.vocab_size, options.tokenizer_documents)
    tokenizer = cached_tokenizer(key, texts, options.vocab_size)
    settings = (tokenizer, options.block_size, config.data.max_bad_examples)
    held_out = TokenStream(documents, documents.held_out, *settings)

    def validation() -> Iterator[NDArray[Any]]:
        return (example["tokens"] for example in islice(held_out, config.evaluate.max_examples))

    return {
        "source": TokenStream(documents, "train", *settings),
        "validation": validation,
        "facts": {
            TOKENIZER: hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
            "files": {split: len(shards) for split, shards in documents.splits.items()},
        },
    }


def loss(model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> LossAndWeight:
    """Sum of the cross entropies of all predicted tokens in nats, and their number, without PAD."""
    inputs, targets = _inputs_and_targets(batch["tokens"])
    logits = model(inputs).float().flatten(0, 1)
    total = functional.cross_entropy(
        logits, targets.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=label_smoothing
    )
    return total, (targets != PAD).sum()


def weight(batch: Batch) -> torch.Tensor:
    """The weight that ``loss`` returns."""
    return _inputs_and_targets(batch["tokens"])[1].ne(PAD).sum()


def _inputs_and_targets(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [N, block] each."""
    whole = tokens.to(torch.int64)
    return whole[:, :-1], whole[:, 1:]


def evaluator(validation: Callable[[], Iterable[NDArray[Any]]], batch_size: int) -> Any:
    """``Task.evaluate``: mean cross entropy over tokens, independent of the batches.

    Args:
        validation: returns the held-out examples, in memory or as a new stream.
        batch_size: examples at once.
    """

    def evaluate(
        model: nn.Module, _: Split, *, device: torch.device, ranks: DistributedContext = SINGLE_PROCESS
    ) -> Metrics:
        total, number = 0.0, 0
        examples = iter(validation())
        batches = iter(lambda: list(islice(examples, batch_size)), [])
        # A stream has no length, so each rank evaluates every world_size-th batch.
        for batch in islice(batches, ranks.rank, None, ranks.world_size):
            tokens = torch.from_numpy(np.stack(batch).astype(np.int64)).to(device)
            batch_total, count = loss(model, {"tokens": tokens})
            total, number = total + batch_total.item(), number + int(count)
        total, predicted = ranks.sums([total, number])
        return {"cross_entropy": total / max(predicted, 1)}

    return evaluate


def entropies(examples: NDArray[Any]) -> dict[str, float]:
    """Nats per predicted token of the best unigram model and the best bigram model of these examples.

    Both use the counts of these examples, so the bigram entropy of few examples is too low.
    """
    pairs = np.stack([examples[:, :-1].ravel(), examples[:, 1:].ravel()]).astype(np.int64)
    pairs = pairs[:, pairs[1] != PAD]
    return {
        "unigram_entropy": _entropy(pairs[1]),
        "bigram_entropy": _entropy(pairs[0] << 32 | pairs[1]) - _entropy(pairs[0]),
    }


def _entropy(values: NDArray[np.int64]) -> float:
    counts = np.unique(values, return_counts=True)[1]
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())
