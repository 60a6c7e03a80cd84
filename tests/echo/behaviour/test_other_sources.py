"""Datasets and streams of Hugging Face in their formats; and over http, where it retries and gives up."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from adaecho import EchoLoader
from tests.echo.sources import example
from tests.shards.nginx import needs_nginx, nginx

datasets = pytest.importorskip("datasets")

LENGTH = 23


def hf() -> Any:
    examples = [example(row) for row in range(LENGTH)]
    columns = {"x": [one["x"].tolist() for one in examples], "label": [one["label"] for one in examples]}
    return datasets.Dataset.from_dict(columns)


def hf_stream() -> Any:
    return hf().to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=6)


SOURCES: dict[str, Callable[[], Any]] = {
    "hf": hf,
    "hf of numpy": lambda: hf().with_format("numpy"),
    "hf of torch": lambda: hf().with_format("torch"),
    "hf stream": hf_stream,
    "hf stream of torch": lambda: hf_stream().with_format("torch"),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_pass_gives_every_example_once(kind: str, num_workers: int) -> None:
    with EchoLoader(SOURCES[kind](), 4, shuffle_buffer=5, epochs=1, num_workers=num_workers) as loader:
        for number in range(1, 3):
            labels = []
            for batch in loader:
                rows = torch.as_tensor(batch["label"])
                x = torch.stack(batch["x"], dim=1) if isinstance(batch["x"], list) else batch["x"]
                assert torch.equal(x.double(), torch.stack([rows, -rows], dim=1).double())
                labels += rows.tolist()
            assert sorted(labels) == list(range(LENGTH))
            assert loader.fresh_examples == number * LENGTH


@pytest.mark.parametrize("kind", SOURCES)
def test_restores_at_every_batch(kind: str) -> None:
    common: dict[str, Any] = {
        "batch_size": 4, "echo": "example_before_augmentation", "factor": 1.5, "shuffle_buffer": 5,
    }  # fmt: skip
    with EchoLoader(SOURCES[kind](), **common) as loader:
        states, labels = [], []
        for batch in islice(loader, 10):  # into the second pass
            labels.append(batch["label"].tolist())
            states.append(loader.state_dict())
    for position, state in enumerate(states):
        with EchoLoader(SOURCES[kind](), num_workers=position % 2, **common) as restored:
            restored.load_state_dict(state)
            rest = [batch["label"].tolist() for batch in islice(restored, 2)]
        assert rest[: 9 - position] == labels[position + 1 : position + 3]


def test_a_hugging_face_stream_is_shuffled_anew_for_each_pass() -> None:
    stream = hf_stream()
    expected = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        expected.append([one["label"] for one in stream])
    loader = EchoLoader(hf_stream(), 5, epochs=1)
    assert [[label for batch in loader for label in batch["label"].tolist()] for _ in range(3)] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("kind", ["hf", "hf stream"])
def test_ranks_are_disjoint(kind: str) -> None:
    seen: list[int] = []
    for rank in range(3):
        loader = EchoLoader(SOURCES[kind](), 1, rank=rank, world_size=3)
        own = len(range(rank, LENGTH, 3))
        seen += [label for batch in islice(loader, own) for label in batch["label"].tolist()]
    assert sorted(seen) == list(range(LENGTH))


SHARD, SHARDS = 12, 3


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "*")
    for phase in ("READ", "OPEN"):
        monkeypatch.setattr(datasets.config, f"STREAMING_{phase}_MAX_RETRIES", 2)
        monkeypatch.setattr(datasets.config, f"STREAMING_{phase}_RETRY_INTERVAL", 0.01)
    root = tmp_path / "root"
    root.mkdir()
    for shard in range(SHARDS):
        rows = [{"label": row} for row in range(SHARD * shard, SHARD * (shard + 1))]
        (root / f"part-{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with nginx(tmp_path / "server", root) as url:
        yield url


def stream(url: str) -> Any:
    files = [f"{url}part-{shard}.jsonl" for shard in range(SHARDS)]
    return datasets.load_dataset("json", data_files=files, streaming=True, split="train")


def labels(batches: Any) -> list[int]:
    return [label for batch in batches for label in batch["label"].tolist()]


@needs_nginx
@pytest.mark.parametrize("num_workers", [0, 2])
def test_is_read_and_restored(server: str, num_workers: int) -> None:
    common: dict[str, Any] = {"shuffle_buffer": 5, "num_workers": num_workers}
    with EchoLoader(stream(server), 4, epochs=1, **common) as loader:
        for number in (1, 2):
            assert sorted(labels(loader)) == list(range(SHARD * SHARDS))
            assert loader.fresh_examples == number * SHARD * SHARDS
    with EchoLoader(stream(server), 4, **common) as loader:
        list(islice(loader, 5))
        state = loader.state_dict()
        expected = labels(islice(loader, 8))
    with EchoLoader(stream(server), 4, **common) as restored:
        restored.load_state_dict(state)
        assert labels(islice(restored, 8)) == expected


@needs_nginx
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_breaks_is_never_a_bad_example(server: str, tmp_path: Path, num_workers: int) -> None:
    fault = tmp_path / "server" / "503"
    common: dict[str, Any] = {"num_workers": num_workers, "prefetch": 0, "max_bad_examples": 100}
    with EchoLoader(stream(f"{server}faulty/"), 4, **common) as loader:
        seen = labels(islice(loader, 1))
        state = loader.state_dict()
        fault.touch()
        with pytest.raises(Exception, match=r"503|Disconnected|\.jsonl") as caught:
            list(islice(loader, 20))
        assert "while reading example" in caught.value.__notes__[0]
        assert loader.bad_examples == []
        fault.unlink()
        loader.load_state_dict(state)
        seen += labels(islice(loader, 8))
    assert seen == list(range(SHARD * SHARDS))
