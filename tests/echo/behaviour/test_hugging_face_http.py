"""A Hugging Face stream over http: ``datasets`` retries and gives up, the loader goes on from a state."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from adaecho import EchoLoader
from tests.shards.nginx import needs_nginx, nginx

datasets = pytest.importorskip("datasets")

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
