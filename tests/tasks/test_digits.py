"""The digits task: the real images, the fixed split, and metrics."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, IterableDataset

from adaecho.errors import ConfigError, DataError
from adaecho.tasks import build_task, digits
from tests.conftest import Compose


class _Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


def test_images_and_labels_are_scikit_learns() -> None:
    bunch, examples = load_digits(), digits.read_digits()
    np.testing.assert_array_equal(examples["image"][..., 0], bunch.images)
    np.testing.assert_array_equal(examples["label"], bunch.target)
    assert examples["image"].dtype == np.uint8
    assert examples["label"].dtype == np.int64


def test_a_smaller_training_set_is_the_beginning_of_the_whole(compose_config: Compose) -> None:
    numbers = ("null", "100")
    whole, part = (build_task(compose_config(f"task.training_examples={number}")) for number in numbers)
    assert whole.source["image"].shape == (1797 - 360, 8, 8, 1)
    assert not whole.has_test_split
    assert (whole.epoch_examples, part.epoch_examples) == (1797 - 360, 100)
    columns = whole.source["image"], whole.source["label"]
    others = {"tuple": columns, "rows": [{"label": 1}] * 7, "stream": iter(())}
    others["of unknown length"] = DataLoader(_Endless(), batch_size=None)
    found = {name: replace(whole, source=one).epoch_examples for name, one in others.items()}
    assert found == {"tuple": 1797 - 360, "rows": 7, "stream": None, "of unknown length": None}
    assert replace(whole, num_examples=9).epoch_examples == 9
    for name, array in part.source.items():
        np.testing.assert_array_equal(array, whole.source[name][:100])
    with pytest.raises(
        ConfigError, match=r"task.training_examples=1438: only 1437 training examples are left"
    ):
        build_task(compose_config("task=digits", "task.training_examples=1438"))


def test_evaluate_reads_the_whole_validation_split_and_reports_every_metric(compose_config: Compose) -> None:
    task = build_task(compose_config("task=digits", "data.validation_examples=1796"))
    examples = digits.read_digits()
    model = task.build_model().eval()
    metrics = task.evaluate(model, "validation", device=torch.device("cpu"))
    assert metrics.keys() == task.metrics.keys()
    with torch.no_grad():
        right = model(torch.from_numpy(examples["image"])).argmax(1).numpy() == examples["label"]
    held_in = (model(torch.from_numpy(task.source["image"])).argmax(1).numpy() == task.source["label"]).sum()
    assert metrics["accuracy"] == pytest.approx((right.sum() - held_in) / 1796)


def test_evaluate_reads_max_examples(compose_config: Compose) -> None:
    seen = []
    for most in (7, 1000):
        task = build_task(compose_config("task=digits", f"evaluate.max_examples={most}"))
        model = task.build_model().eval()
        model.register_forward_hook(lambda _, __, logits: seen.append(len(logits)))
        task.evaluate(model, "validation", device=torch.device("cpu"))
    assert seen == [7, 360]


def test_the_error_without_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda name: None)  # noqa: ARG005
    with pytest.raises(DataError, match="pip install scikit-learn"):
        digits.read_digits()
