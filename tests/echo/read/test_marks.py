"""Where a source that can begin in the middle of a pass begins again."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest

from adaecho import EchoLoader
from adaecho.echo.read.sequential import Mark, needed_marks, thinned
from tests.echo.others import plain
from tests.echo.sources import held_serials
from tests.helpers import through_torch_save


class Seekable:
    """Numbers, from any of them on; tells its position in NumPy's integers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> "SeekablePass":
        return self.iterate_from([0])

    def iterate_from(self, position: Sequence[int]) -> "SeekablePass":
        return SeekablePass(position[0], self.length)


class SeekablePass:
    def __init__(self, next_: int, length: int) -> None:
        self._next, self._length = next_, length

    @property
    def position(self) -> Any:
        return np.array([self._next], dtype=np.int32)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next >= self._length:
            raise StopIteration
        self._next += 1
        return np.array(self._next - 1)


@pytest.mark.parametrize(
    ("batch_size", "buffer", "num_workers", "steps", "length"),
    [(1, 1000, 0, 9000, 700), (32, 5000, 8, 700, 1 << 40)],
    ids=["short passes", "one long pass"],
)
def test_a_large_buffer_is_restored_after_a_long_run(
    batch_size: int, buffer: int, num_workers: int, steps: int, length: int
) -> None:
    common: dict[str, Any] = {"batch_size": batch_size, "shuffle_buffer": buffer, "num_workers": num_workers}
    with EchoLoader(Seekable(length), **common) as loader:
        iterator = iter(loader)
        for _ in range(4):  # marks are thinned as states are asked for
            list(islice(iterator, steps // 4))
            state = loader.state_dict()
        expected = plain(list(islice(iterator, 5)))
    with EchoLoader(Seekable(length), **common) as restored:
        restored.load_state_dict(through_torch_save(state))
        needed = state["next_index"] - min(held_serials(restored))
        assert plain(list(islice(restored, 5))) == expected
        assert needed > 3 * buffer
        assert needed <= restored.reread_examples <= 1.2 * needed + 2 * batch_size


def test_marks_stay_few_and_near() -> None:
    now = 100_000
    marks: list[Mark] = []
    for count in range(now):
        marks = thinned([*marks, Mark(0, 0, count, (count,))])
    for oldest in (0, 1, 1000, now // 2, now - 5000, now - 100, now - 1):  # each forgets what came before
        found = needed_marks(marks, oldest, now, now)
        assert len(found) == 1
        assert oldest - max(2, (now - oldest) // 8) <= found[0].count <= oldest


def test_a_position_must_be_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeekablePass, "position", (0.5,))
    with pytest.raises(TypeError, match="float"):
        list(islice(EchoLoader(Seekable(10), 2), 2))
