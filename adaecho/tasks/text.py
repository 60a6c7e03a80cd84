"""The tasks small_text, lm1b and common_crawl, which train a Transformer language model on text."""

import hashlib
import math
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
from adaecho.datasets.tokens import END, PAD, Packing, TokenStream, cache_key, cached_tokenizer, tokenized
from adaecho.errors import DataError
from adaecho.ranks import SINGLE_PROCESS, DistributedContext
from adaecho.tasks.base import TOKENIZER, Batch, LossAndWeight, Metrics, Split, Task
from adaecho.tasks.options import CommonCrawlOptions, TextOptions

_SAMPLE_TOKENS = 48


def build(config: Config, options: TextOptions) -> Task:
    """Build the task. An example is an array of ``task.block_size`` + 1 tokens."""
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
    tokenizer, validation, facts = data.pop("tokenizer"), data.pop("validation"), data.pop("facts")
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
        at_end=_sampler(tokenizer, options.block_size, config.seed),
        **data,
    )


def _cached(config: Config, options: TextOptions, documents: Documents) -> dict[str, Any]:
    """Return the data of small_text and lm1b, whose text is tokenized once and then cached."""
    packing = Packing(options.packing, options.block_size, options.vocab_size)
    found = tokenized(documents, packing, config.data)
    validation, skipped = found.validation[: config.evaluate.max_examples], found.meta["skipped"]
    return {
        "source": {"tokens": found.train},
        "validation": lambda: validation,
        "tokenizer": found.tokenizer,
        "skipped_examples": skipped["bad"] + skipped["empty"] + skipped["too_short"],
        "facts": {
            TOKENIZER: found.meta["tokenizer sha256"],
            **{name: found.meta[name] for name in ("documents", "held_out_of", "skipped")},
            "train_examples": len(found.train),
            "validation_tokens": int((validation[:, 1:] != PAD).sum()),
        },
    }


def _streamed(config: Config, options: CommonCrawlOptions, documents: Documents) -> dict[str, Any]:
    """Return the data of common_crawl, whose documents are streamed to save memory."""
    refuse_number(config.data.validation_examples, "a stream")
    if documents.held_out is None:
        raise DataError(f"data.path={config.data.path}: needs files named validation, or a validation split")
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
        "tokenizer": tokenizer,
        "facts": {
            TOKENIZER: hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
            "files": {split: len(shards) for split, shards in documents.splits.items()},
        },
    }


def loss(model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> LossAndWeight:
    """Return the sum of the cross entropies in nats of all predicted tokens except PAD, and their number."""
    inputs, targets = _inputs_and_targets(batch["tokens"])
    logits = model(inputs).float().flatten(0, 1)
    total = functional.cross_entropy(
        logits, targets.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=label_smoothing
    )
    return total, (targets != PAD).sum()


def weight(batch: Batch) -> torch.Tensor:
    """Return the number of predicted tokens, not counting PAD."""
    return _inputs_and_targets(batch["tokens"])[1].ne(PAD).sum()


def _inputs_and_targets(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input tokens and the tokens to predict, each as int64 [N, block]."""
    whole = tokens.to(torch.int64)
    return whole[:, :-1], whole[:, 1:]


def evaluator(validation: Callable[[], Iterable[NDArray[Any]]], batch_size: int) -> Any:
    """Build the function ``evaluate(model, split, device=..., ranks=...)`` of a language-modeling task.

    It returns the mean cross entropy in nats per predicted token.

    Args:
        validation: a function that returns the validation examples, as an array or as a new iterator.
        batch_size: the number of examples in a batch.
    """

    def evaluate(
        model: nn.Module, _: Split, *, device: torch.device, ranks: DistributedContext = SINGLE_PROCESS
    ) -> Metrics:
        total, number = 0.0, 0
        examples = iter(validation())
        batches = iter(lambda: list(islice(examples, batch_size)), [])
        # A stream cannot be divided into equal parts, because its length is unknown, so each rank evaluates
        # every world_size-th batch.
        for batch in islice(batches, ranks.rank, None, ranks.world_size):
            tokens = torch.from_numpy(np.stack(batch).astype(np.int64)).to(device)
            batch_total, count = loss(model, {"tokens": tokens})
            total, number = total + batch_total.item(), number + int(count)
        total, predicted = ranks.sums([total, number])
        return {"cross_entropy": total / max(predicted, 1)}

    return evaluate


def entropies(examples: NDArray[Any]) -> dict[str, float]:
    """Return the unigram and bigram entropies of token sequences, in nats per predicted token.

    They are the cross entropies of a perfect unigram model and a perfect bigram model.
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


def _sampler(tokenizer: Any, block: int, seed: int) -> Callable[[nn.Module, torch.device], dict[str, Any]]:
    """Build the function ``Task.at_end`` of a language-modeling task, which generates a short text."""

    def sample(model: nn.Module, device: torch.device) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        tokens = [END]
        for _ in range(_SAMPLE_TOKENS):
            logits = model(torch.tensor([tokens[-block:]], device=device))[0, -1].float().cpu()
            logits[PAD] = -math.inf
            tokens.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
        return {"sample": tokenizer.decode(tokens[1:])}

    return sample
