"""Datasets and streams of Hugging Face in their formats; and over http, where it retries and gives up."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adaecho import EchoLoader
from tests.echo.sources import example, labels
from tests.shards.nginx import needs_nginx, nginx

datasets = pytest.importorskip("datasets")

LENGTH = 23


def hf() -> Any:
    examples = [example(row) for row in range(LENGTH)]
    return datasets.Dataset.from_dict({name: [one[name] for one in examples] for name in ("x", "label")})


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
def test_every_pass_gives_every_example_once_also_resumed(kind: str, num_workers: int) -> None:
    given: dict[str, Any] = {"echo": "example_before_augmentation", "factor": 2, "shuffle_buffer": 5}
    loader, resumed = (
        EchoLoader(SOURCES[kind](), 4, epochs=1, num_workers=workers, **given) for workers in (num_workers, 0)
    )
    with loader, resumed:
        for number in range(1, 3):
            passed, states = [], []
            for batch in loader:
                rows = torch.as_tensor(batch["label"])
                x = torch.stack(batch["x"], dim=1) if isinstance(batch["x"], list) else batch["x"]
                assert torch.equal(x.double(), torch.stack([rows, -rows], dim=1).double())
                passed.append(rows.tolist())
                states.append(loader.state_dict())
            assert sorted(row for batch in passed for row in batch) == sorted([*range(LENGTH)] * 2)
            assert loader.fresh_examples == number * LENGTH
            for position, state in enumerate(states[:-1], start=1):
                resumed.load_state_dict(state)
                assert labels(resumed, 2) == passed[position : position + 2]


def test_a_hugging_face_stream_is_shuffled_anew_for_each_pass() -> None:
    stream, loader = hf_stream(), EchoLoader(hf_stream(), 1, epochs=1)
    passes = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        passes.append([[one["label"]] for one in stream])
    assert [labels(loader) for _ in range(3)] == passes
    assert passes[0] != passes[1]


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


@needs_nginx
@pytest.mark.parametrize("num_workers", [0, 2])
def test_is_read_and_restored(server: str, num_workers: int) -> None:
    common: dict[str, Any] = {"shuffle_buffer": 5, "num_workers": num_workers}
    with EchoLoader(stream(server), 4, epochs=1, **common) as loader:
        for number in (1, 2):
            assert sorted(itertools.chain(*labels(loader))) == list(range(SHARD * SHARDS))
            assert loader.fresh_examples == number * SHARD * SHARDS
    with (
        EchoLoader(stream(server), 4, **common) as loader,
        EchoLoader(stream(server), 4, **common) as restored,
    ):
        labels(loader, 5)
        restored.load_state_dict(loader.state_dict())
        assert labels(restored, 8) == labels(loader, 8)


@needs_nginx
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_breaks_is_never_a_bad_example(server: str, tmp_path: Path, num_workers: int) -> None:
    fault = tmp_path / "server" / "503"
    common: dict[str, Any] = {"num_workers": num_workers, "prefetch": 0, "max_bad_examples": 100}
    with EchoLoader(stream(f"{server}faulty/"), 4, **common) as loader:
        seen = labels(loader, 1)
        state = loader.state_dict()
        fault.touch()
        with pytest.raises(Exception, match=r"503|Disconnected|\.jsonl") as caught:
            labels(loader, 20)
        assert "while reading example" in caught.value.__notes__[0]
        assert loader.bad_examples == []
        fault.unlink()
        loader.load_state_dict(state)
        seen += labels(loader, 8)
    assert list(itertools.chain(*seen)) == list(range(SHARD * SHARDS))
