"""``ages=True``: which use of its example each one in a batch is, and when it was read."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from adaecho import EchoLoader
from adaecho.echo.batch.ages import Ages
from tests.echo import reference
from tests.echo.sources import IDS, SOURCES, VARIANTS, Dataset, arrays, assert_same, reference_examples
from tests.helpers import through_torch_save

Pairs = list[tuple[int, int]]


def pairs(ages: Ages) -> Pairs:
    assert ages["echo_index"].dtype == ages["fresh_number"].dtype == torch.int64
    return list(zip(ages["echo_index"].tolist(), ages["fresh_number"].tolist(), strict=True))


def by_reference(kind: str, length: int, batches: int | None, **common: Any) -> list[tuple[Any, Pairs]]:
    ages: list[Pairs] = []
    made = reference.batches(reference_examples(kind, length), ages=ages, **common)
    return [(one, ages[number]) for number, (one, _) in enumerate(islice(made, batches))]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_equal_the_slow_reference(variant: dict[str, Any], kind: str, num_workers: int) -> None:
    make, augment, reference_augment, extra = SOURCES[kind]
    common: dict[str, Any] = {"batch_size": 6, "shuffle_buffer": 7, "seed": 5, **variant, **extra}
    expected = by_reference(kind, 23, 24, augment=reference_augment, **common)
    with EchoLoader(make(23), augment=augment, num_workers=num_workers, ages=True, **common) as loader:
        for (batch, ages), (one, own) in zip(loader, expected, strict=False):
            assert_same(batch, one)
            assert pairs(ages) == own


@pytest.mark.parametrize(
    ("place", "is_split"), [("encoded", False), ("augmented", False), ("augmented", True), ("decoded", True)]
)
def test_of_other_places_and_split_augmentation(place: str, is_split: bool) -> None:
    _, augment, _, extra = SOURCES["map"]
    common: dict[str, Any] = {
        "batch_size": 4, "shuffle_buffer": 9, "echo": "example_before_augmentation", "factor": 2.6, **extra,
    }  # fmt: skip
    expected = [own for _, own in by_reference("map", 19, 30, augment=lambda one, _: one, **common)]
    parts = (augment, augment) if is_split else augment
    with EchoLoader(Dataset(19), augment=parts, decode=dict, place=place, ages=True, **common) as loader:
        assert [pairs(ages) for _, ages in islice(loader, 30)] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_are_the_same_after_a_resume(variant: dict[str, Any], num_workers: int) -> None:
    common: dict[str, Any] = {
        "batch_size": 4, "shuffle_buffer": 9, "num_workers": num_workers, "ages": True, **variant,
    }  # fmt: skip
    with EchoLoader(arrays(19), **common) as loader:
        expected = [pairs(ages) for _, ages in islice(loader, 30)]
    for stop in (1, 7, 16):
        with EchoLoader(arrays(19), **common) as loader:
            list(islice(loader, stop))
            state = through_torch_save(loader.state_dict())
        with EchoLoader(arrays(19), **common) as resumed:
            resumed.load_state_dict(state)
            assert [pairs(ages) for _, ages in islice(resumed, 30 - stop)] == expected[stop:]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS, ids=IDS)
def test_of_passes_on_ranks(variant: dict[str, Any], rank: int) -> None:
    """Each pass empties the buffer; numbers go on, and are of this rank's reads."""
    common: dict[str, Any] = {"batch_size": 4, "shuffle_buffer": 6, "rank": rank, **variant}
    before = 0
    with EchoLoader(arrays(21), world_size=2, epochs=1, ages=True, **common) as loader:
        # Draws of an echo of batches are keyed by their number over all passes: the reference's by pass.
        for first_pass in range(1 if "batch_shuffle_buffer" in variant else 3):
            world = {"world": 2, "passes": 1, "first_pass": first_pass}
            expected = by_reference("arrays", 21, None, augment=lambda one, _: one, **common, **world)
            found = list(loader)
            assert [[(use, number - before) for use, number in pairs(ages)] for _, ages in found] == [
                own for _, own in expected
            ]
            before = loader.fresh_examples


def test_a_pass_that_was_given_up_leaves_no_gap() -> None:
    """What a given-up pass would still have read doesn't count, as in ``fresh_examples``."""
    with EchoLoader(arrays(20), 4, epochs=1, ages=True) as loader:
        next(iter(loader))
        _, ages = next(iter(loader))
    assert ages["fresh_number"].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_of_whole_batches(factor: float) -> None:
    common: dict[str, Any] = {
        "batch_size": None, "echo": "batch", "factor": factor, "seed": 3, "batch_shuffle_buffer": 4,
        "ages": True,
    }  # fmt: skip
    numbered = ((number, number) for number in range(100))
    expected = []
    used: dict[int, int] = {}
    for number, _, _ in reference.shuffled(reference.echoed(numbered, 4, factor, 1), 4, 4):
        expected.append((number, used.setdefault(number, 0)))
        used[number] += 1

    def make() -> EchoLoader:
        rows = DataLoader(torch.arange(300), batch_size=3)  # type: ignore[arg-type]
        return EchoLoader(rows, **common)

    with make() as loader:
        for stop, ((batch, ages), (number, use)) in enumerate(zip(loader, expected[:60], strict=False), 1):
            assert batch.tolist() == [number * 3 + one for one in range(3)]
            assert pairs(ages) == [(use, number)] * 3
            if stop == 33:
                state = through_torch_save(loader.state_dict())
    with make() as resumed:
        resumed.load_state_dict(state)
        for (_, ages), (number, use) in zip(resumed, expected[33:60], strict=False):
            assert pairs(ages) == [(use, number)] * 3


@pytest.mark.parametrize("echo", ["example_before_augmentation", "batch"])
def test_while_the_factor_changes(echo: str) -> None:
    """Every use of an example is counted once and in order; none after its last."""
    with EchoLoader(Dataset(40), 4, echo=echo, factor="auto", shuffle_buffer=20, ages=True) as loader:
        ratios: Iterator[float] = iter([3.0, 1.5, 4.0, 2.3] * 10)
        loader.agree_on_R = lambda _: next(ratios)
        seen: dict[int, list[int]] = {}
        states = {}
        expected = []
        for step, (_, ages) in enumerate(islice(loader, 160), 1):
            expected.append(pairs(ages))
            for use, number in pairs(ages):
                seen.setdefault(number, []).append(use)
            if step in (55, 115):
                states[step] = through_torch_save(loader.state_dict())
        assert len(loader.factor_changes) > 2
    assert all(uses == list(range(len(uses))) for uses in seen.values())
    assert max(map(len, seen.values())) > 3
    for step, state in states.items():
        with EchoLoader(Dataset(40), 4, echo=echo, factor="auto", shuffle_buffer=20, ages=True) as resumed:
            resumed.load_state_dict(state)
            found = [pairs(ages) for _, ages in islice(resumed, 5)]  # up to the next look at R
            assert found == expected[step : step + 5]


def test_states_are_the_same_without() -> None:
    """One who resumes may begin to ask for ages, or leave off."""
    common: dict[str, Any] = {"echo": "example_after_augmentation", "factor": 2, "shuffle_buffer": 8}
    with EchoLoader(arrays(30), 4, **common) as plain, EchoLoader(arrays(30), 4, ages=True, **common) as aged:
        for batch, (other, _) in zip(islice(plain, 9), aged, strict=False):
            assert all(torch.equal(batch[name], other[name]) for name in batch)
        states = [loader.state_dict() for loader in (plain, aged)]
        following = [next(iter(aged))]
    assert states[0]["settings"] == states[1]["settings"]
    assert torch.equal(states[0]["examples"]["buffer"], states[1]["examples"]["buffer"])
    with EchoLoader(arrays(30), 4, ages=True, **common) as resumed:
        resumed.load_state_dict(states[0])
        assert pairs(next(iter(resumed))[1]) == pairs(following[0][1])


def test_each_batch_may_be_written_into() -> None:
    with EchoLoader(np.arange(6), 3, echo="batch", factor=3, ages=True) as loader:
        for _, ages in islice(loader, 6):
            assert ages["echo_index"].unique().tolist() in ([0], [1], [2])
            ages["echo_index"].fill_(9)
            ages["fresh_number"].fill_(9)


def test_peek_and_batches_without_fields() -> None:
    with EchoLoader(np.arange(6), 3, ages=True) as loader:
        ahead, ages = loader.peek()
        batch, same = next(iter(loader))
    assert torch.equal(ahead, batch)
    assert pairs(ages) == pairs(same) == [(0, 0), (0, 1), (0, 2)]


def test_the_trainer_of_hugging_face_hands_the_pair_on(tmp_path: Path) -> None:
    """It moves dicts, and can't move a named tuple."""
    transformers = pytest.importorskip("transformers", reason="trains the loop: pip install '.[trainers]'")
    rows = {"x": torch.randn(40, 4), "label": torch.randint(2, (40,))}
    seen: list[Pairs] = []

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            return EchoLoader(rows, 8, echo="batch", factor=2, epochs=1, ages=True)

        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
            batch, ages = inputs
            seen.append(pairs(ages))
            return torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"])

    arguments = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no"
    )
    Trainer(torch.nn.Linear(4, 2), arguments, train_dataset=list(range(40))).train()
    assert seen == [[(use, 8 * step + n) for n in range(8)] for step in range(5) for use in (0, 1)]
