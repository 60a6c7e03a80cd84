"""Batches on a device: torch's meta device stands in where there is no GPU."""

from collections import namedtuple
from itertools import islice
from typing import Any

import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.device import ToDevice, on_tensors
from tests.echo.sources import VARIANTS, Dataset, arrays

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def take(number: int, source: Any = None, **arguments: Any) -> list[Any]:
    settings: dict[str, Any] = {"shuffle_buffer": 3, **arguments}
    with EchoLoader(arrays(20) if source is None else source, 4, **settings) as loader:
        return list(islice(loader, number))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cpu_changes_nothing(variant: dict[str, Any], num_workers: int) -> None:
    ones = take(7, **variant)
    others = take(7, **variant, num_workers=num_workers, device="cpu")
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one["x"], other["x"])
        assert torch.equal(one["label"], other["label"])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("source", [arrays(20), Dataset(20)], ids=["arrays", "map"])
def test_every_tensor_lies_on_the_device(source: Any, num_workers: int) -> None:
    for batch in take(5, source, echo="batch", factor=2, num_workers=num_workers, device="meta"):
        assert {tensor.device.type for tensor in batch.values()} == {"meta"}


def test_whole_batches_are_moved_and_a_batch_echo_moves_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[Any] = []
    original = ToDevice.move

    def counted(self: ToDevice, batch: Any) -> Any:
        moves.append(batch)
        return original(self, batch)

    monkeypatch.setattr(ToDevice, "move", counted)
    batches = [torch.zeros(3), torch.ones(3)]
    with EchoLoader(batches, None, echo="batch", factor=4, device="meta", order="stored") as loader:
        assert [batch.device.type for batch in islice(loader, 8)] == ["meta"] * 8
    assert len(moves) == 2


def test_forms_stay() -> None:
    pair = namedtuple("pair", "a b")
    batch = {"x": [torch.ones(2), "text"], "y": pair(torch.ones(1), 3), "z": (torch.zeros(1),)}
    moved = on_tensors(batch, lambda tensor: tensor + 1)
    assert moved["x"][0].tolist() == [2, 2]
    assert moved["x"][1] == "text"
    assert type(moved["y"]) is pair
    assert moved["y"].b == 3
    assert moved["z"][0].tolist() == [1]


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="device='gpu'"):
        EchoLoader(arrays(4), 2, device="gpu")


@needs_cuda
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda_gives_the_batches_of_the_cpu(variant: dict[str, Any], num_workers: int) -> None:
    ones = take(20, **variant)
    settings: dict[str, Any] = {"shuffle_buffer": 3, "num_workers": num_workers, "device": "cuda", **variant}
    with EchoLoader(arrays(20), 4, **settings) as loader:
        for one, other in zip(ones, islice(loader, 20), strict=True):
            assert other["x"].device.type == "cuda"
            assert torch.equal(one["x"], other["x"].cpu())
            other["x"].fill_(-1)  # later repeats must not see it
