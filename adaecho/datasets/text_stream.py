"""Text as a stream of examples: many of one document, told apart by position, disjoint over ranks."""

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from adaecho.datasets.documents import Documents
from adaecho.datasets.storage import SkippedExamples
from adaecho.datasets.tokens import END, sentence

Position = tuple[int, ...]
"""File, document of it, block of that."""


class TokenStream:
    """Examples of ``block + 1`` tokens from documents read one after another; for ``EchoLoader``.

    A document, END before and after, is cut into blocks that overlap in one token; the last one is filled up
    with PAD. Where there are at least as many files as ranks, each rank reads files of its own; else all read
    all documents, and each makes examples of its own of them.

    Args:
        documents: of which part ``part`` is read.
        tokenizer: of the ``tokenizers`` library.
        block: predictions of an example.
        dtype: of token numbers.
        max_bad_examples: documents that can't be read to skip, in each pass.
    """

    def __init__(
        self,
        documents: Documents,
        part: str,
        tokenizer: Any,
        block: int,
        dtype: Any,
        max_bad_examples: int = 0,
    ) -> None:
        self.documents, self.shards, self.tokenizer = documents, documents.parts[part], tokenizer
        self.block, self.dtype, self.max_bad_examples = block, dtype, max_bad_examples
        self.rank, self.world = 0, 1

    def set_share(self, rank: int, world_size: int) -> None:
        """Give examples of this rank alone from here on."""
        self.rank, self.world = rank, world_size

    def __iter__(self) -> "TokenIterator":
        return self.iterate_from((0, 0, 0))

    def iterate_from(self, position: Sequence[int]) -> "TokenIterator":
        """Go on at an iterator's ``position``."""
        return TokenIterator(self, position)

    def examples_from(self, shard: int, document: int, block: int) -> Iterator[tuple[Position, NDArray[Any]]]:
        """Each example from a position on, and the position after it."""
        bad, by_file = SkippedExamples(self.max_bad_examples), len(self.shards) >= self.world
        for number in range(shard, len(self.shards)):
            if by_file and number % self.world != self.rank:
                continue
            first = document if number == shard else 0
            for row, (origin, text) in enumerate(self.documents.read(self.shards[number], first), first):
                if not by_file and row % self.world != self.rank:
                    continue
                if isinstance(text, Exception):
                    bad.add(origin, str(text))
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
    """One pass over the documents.

    Attributes:
        position: of the next example.
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
