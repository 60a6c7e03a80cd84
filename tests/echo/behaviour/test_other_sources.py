"""Less common sources keep values, types and counts; Hugging Face's in their formats, and over http, where it
retries and gives up.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from adaecho import EchoLoader
from tests.echo.sources import example, labels
from tests.servers import Quiet, serving


@pytest.mark.parametrize("base", [TensorDataset, object])
def test_a_dataset_that_keeps_tensors_gives_its_own_items(base: type) -> None:
    class Transformed(base):  # type: ignore[misc]
        def __init__(self, *tensors: torch.Tensor) -> None:
            self.tensors = tensors

        def __len__(self) -> int:
            return len(self.tensors[0])

        def __getitem__(self, row: int) -> Any:
            return tuple(tensor[row] + 100 for tensor in self.tensors)

    x, y = next(iter(EchoLoader(Transformed(torch.zeros(8, 2), torch.arange(8)), 4, order="stored")))
    assert x.tolist() == [[100, 100]] * 4
    assert y.tolist() == [100, 101, 102, 103]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_tensors_may_be_of_a_type_that_numpy_lacks(dtype: torch.dtype) -> None:
    rows = torch.arange(6).reshape(3, 2)
    for source in (rows.to(dtype), TensorDataset(rows.to(dtype), torch.arange(3))):
        batch = next(iter(EchoLoader(source, 3, order="stored")))
        found = batch if isinstance(batch, torch.Tensor) else batch[0]
        assert found.dtype == dtype
        assert found.float().tolist() == rows.tolist()


@pytest.mark.parametrize("size", [3, 100_000])
def test_numpy_scalars_keep_their_type_through_an_augmentation(size: int) -> None:
    examples = [{"x": np.zeros(size, np.uint8), "y": np.float32(0.1), "n": 3, "f": 0.1}] * 4
    seen = []

    def same(example: dict[str, Any], _: Any) -> dict[str, Any]:
        seen.append({name: type(value) for name, value in example.items()})
        return example

    batch, expected = next(iter(EchoLoader(examples, 2, augment=same))), next(iter(DataLoader(examples, 2)))  # type: ignore[arg-type]
    assert {name: part.dtype for name, part in batch.items()} == {
        name: part.dtype for name, part in expected.items()
    }
    assert seen[0] == {"x": np.ndarray, "y": np.float32, "n": int, "f": float}


LENGTH = 23


def library() -> Any:
    return pytest.importorskip("datasets", reason="pip install '.[trainers]'")


def hf() -> Any:
    examples = [example(row) for row in range(LENGTH)]
    return library().Dataset.from_dict({name: [one[name] for one in examples] for name in ("x", "label")})


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


class Failing(Quiet):
    """Answers 503 while the folder has a file of that name."""

    def do_HEAD(self) -> None:  # noqa: N802
        self._answer(super().do_HEAD)

    def do_GET(self) -> None:  # noqa: N802
        self._answer(super().do_GET)

    def _answer(self, answer: Callable[[], None]) -> None:
        if (Path(self.directory) / "503").exists():
            self.send_error(503)
        else:
            answer()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "*")
    for phase in ("READ", "OPEN"):
        monkeypatch.setattr(library().config, f"STREAMING_{phase}_MAX_RETRIES", 2)
        monkeypatch.setattr(library().config, f"STREAMING_{phase}_RETRY_INTERVAL", 0.01)
    root = tmp_path / "root"
    root.mkdir()
    for shard in range(SHARDS):
        rows = [{"label": row} for row in range(SHARD * shard, SHARD * (shard + 1))]
        (root / f"part-{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(root, Failing) as place:
        yield f"http://{place}/"


def stream(url: str) -> Any:
    files = [f"{url}part-{shard}.jsonl" for shard in range(SHARDS)]
    return library().load_dataset("json", data_files=files, streaming=True, split="train")


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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_breaks_is_never_a_bad_example(server: str, tmp_path: Path, num_workers: int) -> None:
    fault = tmp_path / "root" / "503"
    common: dict[str, Any] = {"num_workers": num_workers, "prefetch": 0, "max_bad_examples": 100}
    with EchoLoader(stream(server), 4, **common) as loader:
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
