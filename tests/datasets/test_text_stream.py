"""Many examples of one document: against a slow version, resumed in the middle, disjoint over ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho.datasets.documents import find_documents
from adaecho.datasets.text_stream import TokenStream
from adaecho.datasets.tokens import END, PAD, train_tokenizer
from adaecho.errors import DataError
from tests.datasets.text_files import lines, texts

BLOCK = 8
FILES = 3
DOCUMENTS = [*texts()[:3], "", *lines()[:20], "x"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(iter(texts()), 400)


@pytest.fixture
def stream(tmp_path: Path, tokenizer: Any) -> TokenStream:
    for number in range(FILES):
        rows = [json.dumps({"text": text}) for text in DOCUMENTS[number::FILES]]
        (tmp_path / f"train-{number}.jsonl").write_text("\n".join(rows))
    return TokenStream(find_documents(str(tmp_path)), "train", tokenizer, BLOCK, np.uint16)


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


def test_it_goes_on_at_any_position(stream: TokenStream) -> None:
    whole, iterator = _slow(stream), iter(stream)
    for count in range(1, len(whole)):
        next(iterator)
        if count % 37 == 0 or count > len(whole) - 3:
            assert _read(stream.iterate_from(iterator.position)) == whole[count:]


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_ranks_share_it_without_overlap_or_loss(stream: TokenStream, world: int) -> None:
    shared = []
    for rank in range(world):
        stream.set_share(rank, world)
        shared += _read(stream)
    assert sorted(shared) == sorted(_slow(stream))


def test_bad_documents_are_counted_within_the_budget(tmp_path: Path, tokenizer: Any) -> None:
    half = json.dumps({"text": "half of a character: \ud800"})
    lines = ['{"text": "some words of text"}', '{"text": 3}', half, "{"]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    files = find_documents(str(tmp_path))
    with pytest.raises(DataError, match=r"train\.jsonl, document 1: 'text' is a int"):
        _read(TokenStream(files, "train", tokenizer, BLOCK, np.uint16))
    for allowed, told in ((1, "document 2: .*surrogates not allowed"), (2, "document 3: is no JSON object")):
        with pytest.raises(DataError, match=told):
            _read(TokenStream(files, "train", tokenizer, BLOCK, np.uint16, max_bad_examples=allowed))
    assert len(_read(TokenStream(files, "train", tokenizer, BLOCK, np.uint16, max_bad_examples=3))) == 2
