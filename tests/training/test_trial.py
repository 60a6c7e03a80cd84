"""Ends of runs, their records and weights."""

import itertools
import json
import math
import os
import pickle
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from adaecho import evaluate
from adaecho.config.schema import Config
from adaecho.echo import EchoLoader
from adaecho.echo.stats import Timers
from adaecho.errors import FolderError
from adaecho.records.folder import RunFolder
from adaecho.tasks import build_task
from adaecho.training import checkpoint, trial
from adaecho.training.trainer import LOSS_CHECK_STEPS, Trainer
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.helpers import metrics, signal_at

FOLDER = Path("run")


def test_reaching_the_target_ends_the_run_and_is_read_off_there(compose_config: Compose) -> None:
    summary = run_trial(compose_config("target.value=0.8"), FOLDER)
    lines = metrics(FOLDER, clocks=True)
    assert summary["status"] == "reached"
    assert [line["accuracy"] >= 0.8 for line in lines] == [False] * (len(lines) - 1) + [True]
    assert summary["to_target"]["fresh_examples"] == lines[-1]["fresh_examples"] == summary["fresh_examples"]
    assert summary["to_target"]["steps"] == lines[-1]["steps"]
    assert summary["best"]["value"] == max(line["accuracy"] for line in lines)
    assert "final" not in summary
    assert json.loads((FOLDER / "summary.json").read_text()) == summary


def test_the_last_of_consecutive_evaluations_sets_the_cost(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = iter([0.9, 0.1, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9, *[0.9] * 9])
    measured = {"cross_entropy": 1.0}
    monkeypatch.setattr(Trainer, "measure", lambda *_: {**measured, "accuracy": next(accuracies)})
    summary = run_trial(compose_config("target.value=0.8", "target.consecutive=3"), FOLDER)
    lines = metrics(FOLDER, clocks=True)
    assert [line["accuracy"] for line in lines] == [0.9, 0.1, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9]
    assert summary["status"] == "reached"
    assert summary["to_target"]["fresh_examples"] == lines[-1]["fresh_examples"] == summary["fresh_examples"]
    assert summary["target"] == {"metric": "accuracy", "value": 0.8, "in_a_row": 3}


def test_a_resumed_run_counts_consecutive_evaluations_across_the_interruption(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "measure", lambda *_: {"cross_entropy": 1.0, "accuracy": 0.9})
    goal = ("target.value=0.8", "target.consecutive=4", "evaluate.every_fresh_examples=160")
    whole = run_trial(compose_config(*goal), Path("whole"))
    run_trial(compose_config(*goal, f"max_fresh_examples={whole['fresh_examples'] - 161}"), FOLDER)
    assert len(metrics(FOLDER, clocks=True)) == 3, "the continued run drops the evaluation at the first end"
    continued = run_trial(compose_config(*goal), FOLDER)
    assert continued["to_target"]["fresh_examples"] == whole["to_target"]["fresh_examples"]


@pytest.mark.parametrize(
    "echo", ["none", "batch", "example_before_augmentation", "example_after_augmentation"]
)
def test_evaluations_fall_on_the_same_grid_for_every_arm(compose_config: Compose, echo: str) -> None:
    run_trial(compose_config(f"echo={echo}", "max_fresh_examples=1600", "target.value=null"), FOLDER)
    read = [line["fresh_examples"] for line in metrics(FOLDER, clocks=True)]
    cells = [math.ceil(fresh_examples / 160) for fresh_examples in read]
    assert cells == sorted(set(cells)), "one evaluation for each multiple"
    assert cells[-1] == 1600 // 160
    # Batches of 32 divide 160: an arm that reads whole batches is measured on the multiple itself.
    if echo in ("none", "batch"):
        assert all(fresh_examples % 160 == 0 for fresh_examples in read)
    assert max(read) <= 1600


def test_batch_echoing_takes_every_repeat_before_an_evaluation(compose_config: Compose) -> None:
    echo = ("echo=batch", "echo.factor=3", "echo.shuffle_buffer=1")
    summary = run_trial(compose_config(*echo, "max_fresh_examples=1600", "target.value=null"), FOLDER)
    lines = metrics(FOLDER, clocks=True)
    # A buffer of one holds one example more than was trained on.
    assert all(line["steps"] == 3 * ((line["fresh_examples"] - 1) // 32) for line in lines)
    assert summary["steps"] == 3 * ((1600 - 1) // 32)


def test_a_budget_ends_the_run_and_is_never_exceeded(compose_config: Compose) -> None:
    steps, fresh, time = (
        run_trial(compose_config(f"max_{budget}", "target.value=null"), Path(budget))
        for budget in ("steps=7", "fresh_examples=1000", "train_time_s=0.05")
    )
    assert [one["status"] for one in (steps, fresh, time)] == ["budget_spent"] * 3
    assert (steps["steps"], steps["to_target"]) == (7, None)
    assert 1000 - 32 < fresh["fresh_examples"] <= 1000
    assert time["train_time_s"] >= 0.05


def test_a_finished_run_is_not_run_again(compose_config: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    def files() -> dict[Path, tuple[int, bytes]]:
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in FOLDER.glob("model/*")}

    first, before = run_trial(compose_config("max_steps=5"), FOLDER), files()
    monkeypatch.setattr(Trainer, "train", lambda _: pytest.fail("trained again"))
    assert run_trial(compose_config("max_steps=5"), FOLDER) == first
    assert files() == before != {}


@pytest.mark.parametrize("overrides", [("max_loss=0.001",), ("optimizer.learning_rate=1e30",)], ids=str)
def test_divergence_is_an_outcome(compose_config: Compose, overrides: tuple[str, ...]) -> None:
    summary = run_trial(compose_config(*overrides), FOLDER)
    assert summary["status"] == "diverged"
    assert summary["steps"] <= 2 * LOSS_CHECK_STEPS
    assert not (FOLDER / "metrics.jsonl").exists(), "no evaluation of a broken model is recorded"
    assert run_trial(compose_config(*overrides), FOLDER) == summary


def test_no_better_than_chance_after_a_share_of_the_budget_has_diverged(compose_config: Compose) -> None:
    rule = ("target.chance_level=0.3", "target.chance_share=0.25", "max_fresh_examples=4000")
    stuck = run_trial(compose_config("optimizer.learning_rate=1e-9", *rule), FOLDER)
    assert (stuck["status"], stuck["fresh_examples"]) == ("diverged", pytest.approx(1000, abs=160))
    assert run_trial(compose_config("max_steps=60", *rule), Path("learns"))["status"] != "diverged"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: {**state, "model": {}}, "restart=true"),
        (
            lambda state: {**state, "made_with": {**state["made_with"], "precision": "other"}},
            "precision=other",
        ),
    ],
    ids=["another model", "another number format"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(compose_config: Compose, change: Any, says: str) -> None:
    config = compose_config("max_steps=5", "precision=auto", "device=cpu")
    run_trial(config, FOLDER)
    run = RunFolder(FOLDER)
    with run.lock():
        checkpoint.save(run, change(checkpoint.load(run)))
    for _ in range(2):  # the refusal changes nothing
        with pytest.raises(FolderError, match=says):
            run_trial(compose_config("max_steps=9", "precision=auto", "device=cpu"), FOLDER)
    assert run_trial(config, FOLDER)["status"] == "budget_spent", "the outcome is still there"


def test_a_checkpoint_is_never_unpickled_and_a_missing_one_costs_only_time(compose_config: Compose) -> None:
    run_trial(compose_config("max_steps=5"), FOLDER)
    last = FOLDER / "checkpoint/last.pt"
    last.write_bytes(pickle.dumps(print, protocol=2))
    with pytest.raises(pickle.UnpicklingError):
        run_trial(compose_config("max_steps=9"), FOLDER)
    last.unlink()
    run_trial(compose_config("max_steps=9"), FOLDER)
    run_trial(compose_config("max_steps=9"), Path("whole"))
    assert metrics(FOLDER) == metrics("whole")


@pytest.mark.parametrize("allowed", [False, True])
def test_changed_data_is_refused_unless_allowed(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    for number, budget in enumerate((5, 9)):
        data = {"files_sha256": str(number)}
        build = lambda config, data=data: replace(build_task(config), fingerprint=data)  # noqa: E731
        monkeypatch.setattr(trial, "build_task", build)
        config = compose_config(f"max_steps={budget}", f"data.allow_changed={allowed}")
        if number and not allowed:
            with pytest.raises(
                FolderError, match=r"files_sha256=0, but now files_sha256 is 1.*allow_changed=true"
            ):
                run_trial(config, FOLDER)
        else:
            assert run_trial(config, FOLDER)["steps"] == budget


def test_equal_seeds_repeat_and_others_differ(compose_config: Compose) -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        run_trial(compose_config("max_steps=5", f"seed={seed}"), Path(folder))
    a, b, c = (Path(folder, "model/final.safetensors").read_bytes() for folder in "abc")
    assert a == b != c


def test_a_recorded_outcome_stays_if_the_command_fails_later(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose_config("task=digits_mlp", "max_steps=1")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(EchoLoader, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_trial(config, FOLDER)
    assert json.loads((FOLDER / "summary.json").read_text())["status"] == "budget_spent"


def test_a_signal_in_the_last_evaluation_is_told_to_the_caller_alone(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is over, but a worker has to hear that it may not begin another."""
    config, measure = compose_config("task=digits_mlp", "max_steps=1"), Trainer.measure

    def signalled(*arguments: Any) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return measure(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "measure", signalled)
        summary = run_trial(config, FOLDER)
    assert (summary.pop("signal"), summary["status"]) == ("SIGTERM", "budget_spent")
    assert json.loads((FOLDER / "summary.json").read_text()) == summary
    assert run_trial(config, FOLDER) == summary


def test_a_pruned_trial_stops_at_an_evaluation(compose_config: Compose) -> None:
    config = compose_config("target.value=1.0", "max_fresh_examples=3200")
    summary = run_trial(config, FOLDER, prune=lambda fresh_examples: fresh_examples >= 480)
    assert (summary["status"], summary["fresh_examples"]) == ("pruned", 480)
    assert run_trial(config, FOLDER) == summary


_ENDS = ("task=digits_mlp", "target.value=null", "evaluate.every_fresh_examples=320", "echo.shuffle_buffer=1")


def test_the_end_of_a_budget_is_evaluated_once_and_may_meet_the_target(
    compose_config: Compose,
) -> None:
    summary = run_trial(compose_config(*_ENDS, "max_fresh_examples=800"), FOLDER)
    lines = metrics(FOLDER)
    assert [line["fresh_examples"] for line in lines] == [289, 609, 769]
    assert summary["best"]["value"] == max(line["accuracy"] for line in lines)
    met = lines[-1]["cross_entropy"]
    goal = ("target.metric=cross_entropy", f"target.value={met}", "max_fresh_examples=800")
    reached = run_trial(compose_config(*_ENDS[:1], *_ENDS[2:], *goal), Path("met"))
    assert reached["status"] == "reached"
    assert (reached["to_target"]["fresh_examples"], reached["best"]["value"]) == (769, met)
    just_evaluated = run_trial(compose_config(*_ENDS, "max_fresh_examples=640"), Path("just evaluated"))
    assert [line["fresh_examples"] for line in metrics(Path("just evaluated"))] == [289, 609]
    assert just_evaluated["final"]["accuracy"] == lines[1]["accuracy"]


def test_a_run_whose_budget_grew_is_the_run_that_had_it_from_the_start(compose_config: Compose) -> None:
    """The continued run drops the evaluation at the first end."""
    for budget in (800, 1000):
        run_trial(compose_config(*_ENDS, f"max_fresh_examples={budget}"), FOLDER)
    run_trial(compose_config(*_ENDS, "max_fresh_examples=1000"), Path("at once"))
    assert metrics(FOLDER) == metrics(Path("at once"))
    assert [line["fresh_examples"] for line in metrics(FOLDER)] == [289, 609, 929, 993]


FOLDER = Path("run")
WEIGHTS = ("task=digits_mlp", "precision=float32", "evaluate.every_fresh_examples=160")


def _accuracy(config: Config, path: Path) -> float:
    task = build_task(config)
    model = task.build_model()
    model.load_state_dict(load_file(path))
    with torch.inference_mode():
        return task.evaluate(model.eval(), "validation", device=torch.device("cpu"))["accuracy"]


def test_at_end_of_a_task_cannot_replace_fields_of_the_records(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned = {"steps": 50, "to_target": {}, "final": {"accuracy": 1.0}, "status": "reached", "note": 1}

    def build(config: Config) -> Any:
        return replace(build_task(config), at_end=lambda _model, _device: returned)

    monkeypatch.setattr(trial, "build_task", build)
    summary = run_trial(compose_config("max_steps=7", "target.value=null"), FOLDER)
    assert (summary["steps"], summary["status"], summary["to_target"]) == (7, "budget_spent", None)
    assert summary["note"] == 1
    assert summary["final"]["accuracy"] == metrics(FOLDER)[-1]["accuracy"]


@pytest.mark.parametrize(
    ("overrides", "status"),
    [
        (("target.value=0.7",), "reached"),
        # A learning rate that soon does harm: the best evaluation is not the last.
        (("target.value=null", "optimizer.learning_rate=0.5", "max_steps=60"), "budget_spent"),
    ],
    ids=["best at the end", "best before the end"],
)
def test_a_run_keeps_the_weights_of_its_best_evaluation_and_of_its_end(
    compose_config: Compose, overrides: tuple[str, ...], status: str
) -> None:
    config = compose_config(*WEIGHTS, *overrides)
    summary = run_trial(config, FOLDER)
    kept, best = summary["model"], summary["best"]
    assert summary["status"] == status
    assert (best["steps"] == summary["steps"]) == (status == "reached")
    assert kept == {"final": "model/final.safetensors", "best": "model/best.safetensors"}
    final = best["value"] if status == "reached" else summary["final"]["accuracy"]
    accuracies = [_accuracy(config, FOLDER / kept[name]) for name in ("best", "final")]
    assert accuracies == pytest.approx([best["value"], final])
    with safe_open(FOLDER / kept["best"], "pt") as file:
        assert file.metadata() == {"steps": str(best["steps"])}


def test_metrics_hold_every_change_of_the_factor_once(
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
    fixed = run_trial(
        compose_config("echo=batch", "echo.factor=2", "max_steps=20", "target.value=null"), Path("fixed")
    )
    assert not any("echo_factor_changes" in record for record in (fixed, *metrics(Path("fixed"))))


AVERAGED = ("task=digits", "target.value=null", "echo.shuffle_buffer=64", "optimizer.ema_decay=0.9")


def test_the_average_is_that_of_torch(compose_config: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_config(*AVERAGED, "max_steps=7")
    trainer = Trainer(config, build_task(config))
    theirs = AveragedModel(trainer.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    update = trainer._update

    def both() -> None:
        update()
        theirs.update_parameters(trainer.model)

    monkeypatch.setattr(trainer, "_update", both)
    with trainer.loader:
        trainer.train()
    assert trainer.progress.steps == 7
    average, expected = trainer.evaluated.state_dict(), theirs.module.state_dict()
    assert all(torch.equal(average[name], value) for name, value in expected.items())
    assert any(not torch.equal(average[name], value) for name, value in trainer.model.state_dict().items())
    assert all(torch.equal(average[name], value) for name, value in trainer.weights().items())


def test_the_average_is_saved_and_does_not_change_training(compose_config: Compose) -> None:
    run_trial(compose_config(*AVERAGED, "max_steps=30"), Path("whole"))
    (found,) = evaluate.evaluate(Path("whole"))
    assert found.metrics == found.recorded
    run_trial(compose_config(*AVERAGED[:-1], "max_steps=30"), Path("plain"))
    losses = [[line["train_loss"] for line in metrics(name)] for name in ("plain", "whole")]
    assert losses[0] == losses[1], "training itself is the same"
    assert metrics("plain") != metrics("whole")


@pytest.mark.parametrize("counts", ["steps", "fresh_examples"])
def test_a_warm_up_counts_updates_for_any_buffer(
    compose_config: Compose, tmp_path: Path, counts: str
) -> None:
    warm_up = (f"schedule.unit={counts}", "schedule.warmup_steps=40", "echo.shuffle_buffer=1000")
    config = compose_config("task=digits", "max_steps=20", "target.value=null", *warm_up)
    run_trial(config, tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert len(lines) > 1
    for line in lines:
        risen = min(line["steps"] + 1, 40) / 40
        assert line["learning_rate"] == pytest.approx(config.optimizer.learning_rate * risen)
