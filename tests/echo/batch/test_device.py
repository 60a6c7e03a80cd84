"""Batches on a device: torch's meta device stands in where there is no GPU."""

from collections import OrderedDict, UserDict
from itertools import islice
from types import MappingProxyType
from typing import Any

import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.batch.device import ToDevice
from tests.echo.sources import IDS, VARIANTS, Dataset, arrays

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


WHOLE = [{"x": torch.full((3,), row)} for row in range(9)]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    f"{'whole-' * (source is WHOLE)}{name}": (source, {**arguments, **variant})
    for source, arguments in (
        (arrays(20), {"batch_size": 4, "shuffle_buffer": 3}),
        (WHOLE, {"batch_size": None}),
    )
    for name, variant in zip(IDS, VARIANTS, strict=True)
    if source is not WHOLE or not name.startswith("example")
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_device_gives_the_batches_of_none(case: str, num_workers: int, device: str) -> None:
    source, given = CASES[case]
    with (
        EchoLoader(source, **given) as plain,
        EchoLoader(source, num_workers=num_workers, device=device, **given) as loader,
    ):
        for one, other in zip(islice(plain, 20), islice(loader, 20), strict=True):
            assert {tensor.device.type for tensor in other.values()} == {device}
            assert all(torch.equal(one[name], other[name].cpu()) for name in one)
            other["x"].fill_(-1)  # later repeats must not see it


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("source", [arrays(20), Dataset(20)], ids=["arrays", "map"])
def test_every_tensor_lies_on_the_device(source: Any, num_workers: int) -> None:
    with EchoLoader(source, 4, echo="batch", factor=2, num_workers=num_workers, device="meta") as loader:
        for batch in islice(loader, 5):
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


FOUND = {
    "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
    "xpu": torch.xpu.is_available(),
}  # fmt: skip


@pytest.mark.parametrize("device", ["mps", "xpu", "cuda", "cuda:1", torch.device("cuda")], ids=str)
def test_what_torch_does_not_find_is_refused(device: Any) -> None:
    kind = torch.device(device).type
    if FOUND[kind]:  # of the other kinds it is asked there, too
        pytest.skip(f"torch finds a {kind} device here; this asks what happens without one")
    told = f"device='{device}': torch finds no such device; pass None, or 'cpu'"
    with pytest.raises(ValueError, match=told):
        EchoLoader(arrays(4), 2, device=device)


class Encoding(UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: no dict, with attributes of its own."""

    def __init__(self, data: dict[str, Any], encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings


def test_mappings_that_are_no_plain_dicts_are_moved() -> None:
    one = Encoding({"x": torch.ones(2), "y": {"z": torch.ones(1)}}, "kept")
    moved = ToDevice("meta").move(one)
    assert type(moved) is Encoding
    assert moved.encodings == "kept"
    assert moved["x"].device.type == moved["y"]["z"].device.type == "meta"
    assert one["x"].device.type == "cpu"
    ordered = ToDevice("meta").move(OrderedDict(x=torch.ones(2)))
    assert type(ordered) is OrderedDict
    assert ordered["x"].device.type == "meta"
    with pytest.raises(ValueError, match="class mappingproxy has no method to"):
        ToDevice("meta").move(MappingProxyType({"x": torch.ones(2)}))


def test_only_tensors_on_the_cpu_are_pinned() -> None:
    assert ToDevice("meta")._copy(torch.ones(2, device="meta")).device.type == "meta"
