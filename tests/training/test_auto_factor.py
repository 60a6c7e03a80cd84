"""``echo.factor=auto`` in a run: every change of the factor is in its records, once, also after a resume."""

import itertools
from pathlib import Path

import pytest

from adaecho.echo.threads.timers import Timers
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.helpers import metrics, signal_at


def test_every_change_is_in_the_metrics_once(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = itertools.cycle([1.5, 3.0, 2.0, 4.0])
    monkeypatch.setattr(Timers, "ratio", property(lambda _: next(measured)))
    config = compose_config(
        "task=digits", "echo=batch", "echo.factor=auto", "max_steps=400", "target.value=null",
        "evaluate.every_fresh_examples=800", "checkpoint_every_s=1000000",
    )  # fmt: skip
    folder = Path("run")
    with monkeypatch.context() as patched:
        signal_at(patched, 230)  # between two evaluations
        assert run_trial(config, folder)["status"] == "preempted"
    before = metrics(folder)
    summary = run_trial(config, folder)
    assert summary["status"] == "budget_spent"

    after = metrics(folder)
    assert after[: len(before)] == before
    recorded = [change for line in after for change in line["echo_factor_changes"]]
    assert len(recorded) > 10
    assert any(len(line["echo_factor_changes"]) > 1 for line in after)
    # The last changes may come after the last evaluation.
    assert summary["echo_factor_changes"][: len(recorded)] == recorded
    assert len(recorded) >= len(summary["echo_factor_changes"]) - 4
    numbers = [number for number, _ in recorded]
    assert numbers == sorted(set(numbers))


def test_a_fixed_factor_has_no_changes_to_record(compose_config: Compose) -> None:
    config = compose_config("task=digits", "echo=batch", "echo.factor=2", "max_steps=20", "target.value=null")
    summary = run_trial(config, Path("run"))
    assert not any("echo_factor_changes" in record for record in (summary, *metrics(Path("run"))))
