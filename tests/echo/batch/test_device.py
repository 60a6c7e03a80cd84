"""Batches on a device. The meta device of torch replaces a GPU where there is none."""

from collections import UserDict
from itertools import islice
from typing import Any

import pytest
import torch

from adaecho import EchoLoader
from adaecho.echo.batch.device import ToDevice
from tests.echo.sources import IDS, VARIANTS, arrays

needs_cuda = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


WHOLE = [{"x": torch.full((3,), row)} for row in range(9)]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    f"{'whole-' * (source is WHOLE)}{name}": (source, {**arguments, **variant})
    for source, arguments in (
        (arrays(20), {"batch_size": 4, "shuffle_buffer": 3}),
        (WHOLE, {"batch_size": None}),
    )
    for name, variant in zip(IDS[::2], VARIANTS[::2], strict=True)
    if source is not WHOLE or not name.startswith("example")
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_device_does_not_change_the_batches(case: str, num_workers: int, device: str) -> None:
    source, given = CASES[case]
    with (
        EchoLoader(source, **given) as plain,
        EchoLoader(source, num_workers=num_workers, device=device, **given) as loader,
    ):
        for one, other in zip(islice(plain, 20), islice(loader, 20), strict=True):
            assert {tensor.device.type for tensor in other.values()} == {device}
            assert all(torch.equal(one[name], other[name].cpu()) for name in one)
            other["x"].fill_(-1)  # must not reach later repeats


def test_batch_echoing_moves_each_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[Any] = []
    original = ToDevice.move

    def counted(self: ToDevice, batch: Any) -> Any:
        moves.append(batch)
        return original(self, batch)

    monkeypatch.setattr(ToDevice, "move", counted)
    batches = [torch.zeros(3), torch.ones(3)]
    with EchoLoader(batches, None, echo="batch", factor=4, device="meta", order="sequential") as loader:
        assert [batch.device.type for batch in islice(loader, 8)] == ["meta"] * 8
    assert len(moves) == 2


class Encoding(UserDict[str, Any]):
    """Like BatchEncoding of Hugging Face: a mapping with further attributes."""

    def __init__(self, data: dict[str, Any], encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings


def test_mappings_other_than_dict_are_moved() -> None:
    one = Encoding({"x": torch.ones(2), "y": {"z": torch.ones(1)}}, "kept")
    moved = ToDevice("meta").move(one)
    assert type(moved) is Encoding
    assert moved.encodings == "kept"
    assert moved["x"].device.type == moved["y"]["z"].device.type == "meta"
    assert one["x"].device.type == "cpu"
