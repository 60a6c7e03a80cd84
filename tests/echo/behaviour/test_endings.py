"""How iterations end: after the last example, bad or not, and never by accident."""

from itertools import islice
from typing import Any

import pytest

from adaecho import EchoLoader
from tests.echo.sources import Dataset, Stream, labels
from tests.helpers import through_torch_save

WORKERS = pytest.mark.parametrize("num_workers", [0, 1])


class Bad:
    """A decode that some examples fail."""

    def __init__(self, *labels: int) -> None:
        self.labels = labels

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        if example["label"] in self.labels:
            raise ValueError(f"cannot decode {example['label']}")
        return example


@WORKERS
@pytest.mark.parametrize("echo", ["none", "batch", "example_before_augmentation"])
@pytest.mark.parametrize("source", [Dataset, Stream])
def test_bad_examples_at_the_end_of_a_pass_are_listed_and_counted(
    source: Any, echo: str, num_workers: int
) -> None:
    common: dict[str, Any] = {"order": "stored", "echo": echo, "epochs": 1, "num_workers": num_workers}
    bad = Bad(5, 6, 7, 8, 9)

    def make() -> EchoLoader:
        return EchoLoader(source(10), 2, decode=bad, max_bad_examples=10, **common)

    with make() as loader:
        batches = labels(loader)
        assert batches == [[0, 1], [2, 3], [4]]
        assert [example["index"] for example in loader.bad_examples] == [5, 6, 7, 8, 9]
        assert loader.fresh_examples == 10
        with make() as restored:
            restored.load_state_dict(through_torch_save(loader.state_dict()))
            assert (restored.fresh_examples, len(restored.bad_examples)) == (10, 5)
            assert labels(restored) == batches
            assert (restored.fresh_examples, len(restored.bad_examples)) == (20, 5)
    # After the last batch, the end not yet met: restoring meets it, and counts what the batches took.
    with make() as loader, make() as restored:
        list(islice(loader, 3))
        restored.load_state_dict(through_torch_save(loader.state_dict()))
        assert (restored.fresh_examples, len(restored.bad_examples)) == (5, 5)
        assert labels(restored) == batches


@WORKERS
@pytest.mark.parametrize("where", ["decode", "augment", "collate", "source"])
def test_a_stop_iteration_of_the_users_code_does_not_end_the_loop(where: str, num_workers: int) -> None:
    class Stopping(Dataset):
        def __getitem__(self, row: int) -> Any:
            return next(iter(())) if row == 5 else super().__getitem__(row)

    def stop(_: Any, rng: Any = None) -> Any:  # noqa: ARG001
        return next(iter(()))

    source = Stopping(10) if where == "source" else Dataset(10)
    stages = {} if where == "source" else {where: stop}
    with EchoLoader(source, 2, num_workers=num_workers, order="stored", **stages) as loader:  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
            for _ in islice(loader, 10):
                pass
        assert isinstance(caught.value.__cause__, StopIteration)
        with pytest.raises(RuntimeError, match="raised StopIteration"):  # the next batch is tried again
            next(iter(loader))
