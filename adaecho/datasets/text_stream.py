"""Text as a stream of examples: many of one document, told apart by position, disjoint over ranks."""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from adaecho.datasets.documents import Files
from adaecho.datasets.storage import SkippedExamples
from adaecho.datasets.tokens import END, sentence


class TokenStream:
    """Examples of ``block + 1`` tokens from documents read one after another; for ``EchoLoader``.

    A document, END before and after, is cut into blocks that overlap in one token; the last one is filled up
    with PAD. Where there are at least as many files as ranks, each rank reads files of its own; else all read
    all documents, and each makes examples of its own of them.

    Args:
        files: the documents.
        part: which of them.
        tokenizer: of the ``tokenizers`` library.
        block: predictions of an example.
        dtype: of token numbers.
        max_bad_examples: documents that can't be read to skip, in each pass.
    """

    def __init__(
        self, files: Files, part: str, tokenizer: Any, block: int, dtype: Any, max_bad_examples: int = 0
    ) -> None:
        self.files, self.part, self.tokenizer = files, part, tokenizer
        self.block, self.dtype, self.max_bad_examples = block, dtype, max_bad_examples
        self.rank, self.world = 0, 1

    def set_share(self, rank: int, world_size: int) -> None:
        """Give examples of this rank alone from here on."""
        self.rank, self.world = rank, world_size

    def __iter__(self) -> "TokenIterator":
        return self.iterate_from((0, 0, 0))

    def iterate_from(self, position: Sequence[int]) -> "TokenIterator":
        """Go on at an iterator's ``position``."""
        shard, document, block = (int(number) for number in position)
        return TokenIterator(self, shard, document, block)


class TokenIterator:
    """One pass over the documents.

    Attributes:
        position: (file, document of it, block of that) of the next example.
    """

    def __init__(self, stream: TokenStream, shard: int, document: int, block: int) -> None:
        self._stream, self.position = stream, (shard, document, block)
        self._examples = self._all(shard, document, block)
        self._bad = SkippedExamples(stream.max_bad_examples, at_once=True)

    def __iter__(self) -> "TokenIterator":
        return self

    def __next__(self) -> dict[str, NDArray[Any]]:
        self.position, example = next(self._examples)
        return {"tokens": example}

    def close(self) -> None:
        """Close the file that is open."""
        self._examples.close()

    def _all(
        self, shard: int, document: int, block: int
    ) -> Generator[tuple[tuple[int, int, int], NDArray[Any]], None, None]:
        stream = self._stream
        shards = stream.files.parts[stream.part]
        by_file = len(shards) >= stream.world
        for number in range(shard, len(shards)):
            if by_file and number % stream.world != stream.rank:
                continue
            first = document if number == shard else 0
            for row, (origin, text) in enumerate(stream.files.read(shards[number], first), first):
                if not by_file and row % stream.world != stream.rank:
                    continue
                if isinstance(text, Exception):
                    self._bad.add(origin, str(text))
                    continue
                start = block if (number, row) == (shard, document) else 0
                yield from self._of_one(number, row, text, start)

    def _of_one(
        self, shard: int, document: int, text: str, first: int
    ) -> Iterator[tuple[tuple[int, int, int], NDArray[Any]]]:
        """The examples of one document; none where it holds fewer than two tokens."""
        stream = self._stream
        encoded = stream.tokenizer.encode(text).ids if text.strip() else []
        if len(encoded) < 2:
            return
        whole = [END, *encoded, END]
        count = -(-(len(whole) - 1) // stream.block)
        for number in range(first, count):
            begin = number * stream.block
            after = (shard, document, number + 1) if number + 1 < count else (shard, document + 1, 0)
            yield after, sentence(whole[begin : begin + stream.block + 1], stream.block, stream.dtype)
