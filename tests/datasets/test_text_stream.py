"""The stream of tokens against a slow version; resumed anywhere; disjoint over ranks."""

from pathlib import Path
from typing import Any

import pytest

from adaecho.datasets.documents import find_documents
from adaecho.datasets.tokens import END, PAD, TokenStream, train_tokenizer
from adaecho.errors import DataError
from tests.datasets.files import lines, texts, write_json_lines

BLOCK = 8
FILES = 3
DOCUMENTS = [*texts()[:3], "", *lines()[:20], "x"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(iter(texts()), 400)


@pytest.fixture
def stream(tmp_path: Path, tokenizer: Any) -> TokenStream:
    for number in range(FILES):
        write_json_lines(tmp_path / f"train-{number}.jsonl", DOCUMENTS[number::FILES])
    return TokenStream(find_documents(str(tmp_path)), "train", tokenizer, BLOCK)


def _slow(stream: TokenStream) -> list[list[int]]:
    examples = []
    for number in range(FILES):
        for text in DOCUMENTS[number::FILES]:
            ids = stream.tokenizer.encode(text).ids
            whole = [END, *ids, END]
            for begin in range(0, len(whole) - 1, BLOCK) if len(ids) >= 2 else ():
                part = whole[begin : begin + BLOCK + 1]
                examples.append(part + [PAD] * (BLOCK + 1 - len(part)))
    return examples


def _read(examples: Any) -> list[list[int]]:
    return [example["tokens"].tolist() for example in examples]


def test_every_token_of_every_document_is_predicted_once(stream: TokenStream) -> None:
    assert _read(stream) == _slow(stream)
    predicted = sum(token != PAD for example in _slow(stream) for token in example[1:])
    ids = [len(stream.tokenizer.encode(text).ids) for text in DOCUMENTS]
    assert predicted == sum(number + 1 for number in ids if number >= 2)


def test_it_resumes_at_any_position(stream: TokenStream) -> None:
    whole, iterator = _slow(stream), iter(stream)
    for count in range(1, len(whole)):
        next(iterator)
        if count % 37 == 0 or count > len(whole) - 3:
            assert _read(stream.iterate_from(iterator.position)) == whole[count:]


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_ranks_read_disjoint_shares_that_are_complete(stream: TokenStream, world: int) -> None:
    shared = []
    for rank in range(world):
        stream.set_share(rank, world)
        shared += _read(stream)
    assert sorted(shared) == sorted(_slow(stream))


def test_bad_documents_are_skipped_within_the_budget(tmp_path: Path, tokenizer: Any) -> None:
    file = write_json_lines(tmp_path / "train.jsonl", ["some words of text", 3, "half a character: \ud800"])
    file.write_text(file.read_text() + "{")
    documents = find_documents(str(tmp_path))

    def read(allowed: int) -> list[list[int]]:
        return _read(TokenStream(documents, "train", tokenizer, BLOCK, allowed))

    for allowed, message in enumerate(
        (
            r"train\.jsonl, document 1: 'text' is of type int",
            "document 2: .*surrogates not allowed",
            "document 3: not a JSON object",
        )
    ):
        with pytest.raises(DataError, match=message):
            read(allowed)
    assert len(read(3)) == 2
