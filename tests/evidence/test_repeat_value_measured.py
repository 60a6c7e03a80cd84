"""Noise between examples and within copies follows its definition; branches differ only in the echo."""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from adaecho.training.optimizer import make_optimizer
from experiments.repeat_value import equal_steps, measure


def slow_noise(gradients: list[list[list[float]]]) -> tuple[float, float, float]:
    """Unbiased estimates from pairs, without an estimated mean; gradients[example][copy][parameter]."""

    def mean_dot(pairs: Iterable[tuple[list[float], list[float]]]) -> float:
        dots = [sum(x * y for x, y in zip(a, b, strict=True)) for a, b in pairs]
        return sum(dots) / len(dots)

    of_two_examples = (
        pair for two in itertools.permutations(gradients, 2) for pair in itertools.product(*two)
    )
    square = mean_dot(of_two_examples)
    of_an_example = mean_dot(pair for copies in gradients for pair in itertools.permutations(copies, 2))
    in_all = mean_dot((copy, copy) for copies in gradients for copy in copies)
    return of_an_example - square, in_all - of_an_example, square


def test_the_split_of_noise_equals_a_slow_version_from_pairs() -> None:
    gradients = torch.from_numpy(np.random.default_rng(0).normal(1.0, 2.0, size=(7, 3, 5)))
    found = measure.split_noise([gradients[:4].float(), gradients[4:6].float(), gradients[6:].float()])
    assert found == pytest.approx(slow_noise(gradients.tolist()), rel=1e-5)


@pytest.fixture(scope="module")
def work() -> Any:
    return equal_steps.workload(equal_steps.SUBJECTS["digits"], [])


def test_gradients_of_examples_equal_those_of_single_examples(work: Any) -> None:
    torch.manual_seed(0)
    model = work.task.build_model()
    batch = {name: torch.from_numpy(column[:3]) for name, column in work.task.source.items()}
    found = measure.example_gradients(model, work.task.loss, batch)
    assert found.shape == (3, sum(parameter.numel() for parameter in model.parameters()))
    for number in range(3):
        alone = {name: part[number : number + 1] for name, part in batch.items()}
        parts = torch.autograd.grad(work.task.loss(model, alone)[0], list(model.parameters()))
        expected = torch.cat([part.flatten() for part in parts])
        torch.testing.assert_close(found[number], expected, rtol=1e-5, atol=1e-7)


def test_upcoming_rows_are_the_rest_of_an_epoch_then_the_next_epoch() -> None:
    rows = measure.upcoming(np.array([7, 3, 5]), 8, 10, np.random.default_rng(0))
    assert sorted(rows[:3]) == [3, 5, 7]
    assert len(set(rows[3:])) == 5
    assert sorted(measure.upcoming(np.arange(10), 10, 10, np.random.default_rng(0))) == list(range(10))


def a_start(work: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = work.task.build_model()
    optimizer = make_optimizer(work.config, model)
    work.train(model, optimizer, np.arange(64), seed=0)  # builds up momentum
    return model, optimizer


@pytest.mark.parametrize("echo", ["batch", "example_after_augmentation", "example_before_augmentation"])
def test_branches_use_each_fresh_example_equally_often_and_no_others(work: Any, echo: str) -> None:
    def taken(echo: str, factor: int) -> list[tuple[list[bytes], list[int]]]:
        batches = []

        def loss(model: Any, batch: Any) -> Any:
            batches.append(([image.tobytes() for image in batch["image"].numpy()], batch["label"].tolist()))
            return work.task.loss(model, batch)

        watched = measure.Workload(work.config, replace(work.task, loss=loss))
        watched.train(*a_start(work), rows, echo=echo, factor=factor, shuffle_buffer=128, seed=5)
        return batches

    rows = np.arange(100, 228)
    plain, echoed = taken("none", 1), taken(echo, 4)
    assert (len(plain), len(echoed)) == (4, 16)
    images, ours = (Counter(image for batch, _ in some for image in batch) for some in (plain, echoed))
    labels = Counter(label for _, batch in plain for label in batch)
    assert Counter(label for _, batch in echoed for label in batch) == Counter(
        {label: 4 * number for label, number in labels.items()}
    )
    if echo == "batch":
        assert echoed == [batch for batch in plain for _ in range(4)]
    elif echo == "example_after_augmentation":
        assert ours == Counter({image: 4 * number for image, number in images.items()})
    else:
        assert ours.keys() > images.keys()  # first uses have equal augmentations, repeats have others
