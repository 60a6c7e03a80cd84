"""A buffer that can't fit is refused before anything is read or allocated."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader
from adaecho.echo.memory import pool as budget
from adaecho.echo.memory.pool import ResidentPool
from adaecho.echo.memory.pytree import Columns, TreeSpec
from adaecho.echo.order.stage import EchoStage, FreshBlock
from adaecho.echo.order.stream import Factor, Stream
from tests.echo import sources
from tests.echo.sources import Dataset, arrays


@pytest.mark.parametrize("make", [Dataset, sources.Stream, arrays])
def test_a_buffer_beyond_all_memory(make: Any) -> None:
    source = make(9)
    with pytest.raises(ValueError, match=r"needs 14,901\.2 GiB, .* reduce shuffle_buffer"):
        EchoLoader(source, 3, shuffle_buffer=10**12, epochs=1)  # endless, so many passes are refused first
    assert getattr(source, "reads", 0) == 0
    with pytest.raises(ValueError, match=r"^batch_shuffle_buffer: needs .* reduce batch_shuffle"):
        EchoLoader(source, 3, echo="batch", factor=2, batch_shuffle_buffer=10**12, epochs=1)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("batch_size", "buffer"),
    [
        (3, {"shuffle_buffer": 100}),
        *((size, {"echo": "batch", "batch_shuffle_buffer": 120}) for size in (3, None)),
    ],
    ids=["examples", "batches", "whole batches"],
)
def test_what_does_not_fit_is_noticed_at_the_first(
    batch_size: int | None, buffer: dict[str, Any], num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "free_bytes", lambda: 2000)
    source = Dataset(50, lambda _: np.zeros(10))
    name = list(buffer)[-1]
    with (
        EchoLoader(source, batch_size, num_workers=num_workers, **buffer) as loader,
        pytest.raises(ValueError, match=f"^{name}: .* reduce {name}"),
    ):
        next(iter(loader))
    assert num_workers or source.reads <= 103


def test_one_ragged_example_does_not_keep_the_chunks_of_others() -> None:
    def ragged() -> Iterator[Any]:
        yield np.zeros(999, np.uint8)
        while True:
            yield np.zeros(4096, np.uint8)

    loader = EchoLoader(ragged, 64, shuffle_buffer=300, collate=list)
    list(islice(iterator := iter(loader), 50))
    held = [example for example in loader._pipeline.run._batches._pool._singles if example is not None]  # type: ignore[union-attr]
    assert len(held) >= 300
    assert all(example.base is None for example in held)
    del iterator  # with it goes what the buffer holds


def test_a_memory_map_is_known_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "free_bytes", lambda: 5 * 800)
    mapped = sources.memory_map({"x": np.zeros((10, 100))})["x"]
    with pytest.raises(ValueError, match="reduce shuffle_buffer"):
        EchoLoader(mapped, 2, shuffle_buffer=5)
    EchoLoader(mapped, 2, shuffle_buffer=4)


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    def write(folder: str, **files: str) -> None:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / folder / name.replace("_", ".", 1)).write_text(text)

    free = budget.free_bytes(tmp_path)
    assert free is None or free > 0, "where nothing tells, the machine is asked"
    write("proc", meminfo="MemTotal: 9 kB\nMemAvailable:   4000 kB\n")
    write("proc/self", cgroup="0::/job/step\n")
    assert budget.free_bytes(tmp_path) == 4000 * 1024
    write("sys/fs/cgroup/job", memory_max="9000\n", memory_current="8000\n", memory_stat="anon 7\n")
    assert budget.free_bytes(tmp_path) == 1000
    write("sys/fs/cgroup/job", memory_stat="anon 7\ninactive_file 500\nfile 3\n")
    assert budget.free_bytes(tmp_path) == 1500
    write("sys/fs/cgroup/job/step", memory_max="max\n", memory_current="1\n", memory_stat="")
    assert budget.free_bytes(tmp_path) == 1500


def test_rows_beyond_32_bits() -> None:
    first = (1 << 31) - 2
    source = np.broadcast_to(np.zeros(1, np.uint8), (first + 50,))  # of one byte
    numbers = np.arange(50)
    fresh = iter([FreshBlock(numbers, first + numbers, 50)])
    pool = ResidentPool(Columns(TreeSpec("array"), [source]))
    stream = Stream(0, 8, Factor(0, 1), rank=0, world=1, begin=0, bad=[])
    stage = EchoStage(lambda _: next(fresh, None), pool, stream)
    assert sorted(stage.take(50).rows) == list(range(first, first + 50))
