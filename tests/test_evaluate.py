"""python -m adaecho.evaluate: a run's saved weights measured again."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import save_file

from adaecho import evaluate
from adaecho.errors import DataError
from adaecho.training.trial import run_trial
from tests.conftest import Compose, Refused
from tests.datasets.test_labelled_images import make
from tests.helpers import metrics
from tests.tasks.test_imagenet import TINY

DIGITS = ("task=digits", "max_steps=37", "target.value=null", "echo.shuffle_buffer=64")


def test_the_weights_of_the_end_and_of_the_best_have_their_recorded_metrics(
    compose_config: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    summary = run_trial(compose_config(*DIGITS), run)
    (final,) = evaluate.evaluate(run)
    assert final.metrics == final.recorded == summary["final"]
    (best,) = evaluate.evaluate(run, weights="best")
    line = next(one for one in metrics(run) if one["steps"] == summary["best"]["steps"])
    assert best.metrics == best.recorded == {name: line[name] for name in best.metrics}
    assert best.metrics != final.metrics
    evaluate.main([str(run)])
    value = summary["final"]["accuracy"]
    assert capsys.readouterr().out.splitlines()[0] == f"validation accuracy {value!r} (as recorded)"


def test_a_run_that_reached_its_target_and_one_on_images_that_moved(
    compose_config: Compose, tmp_path: Path, refused: Refused
) -> None:
    make("folders", tmp_path / "data")
    config = compose_config(*TINY, f"data.path={tmp_path / 'data'}", "channels_last=true", "target.value=0")
    run = tmp_path / "run"
    assert run_trial(config, run)["status"] == "reached"
    (tmp_path / "data").rename(tmp_path / "moved")
    assert f"data.path={tmp_path / 'data'}" in refused(evaluate.main, run)
    (found,) = evaluate.evaluate(run, [f"data.path={tmp_path / 'moved'}"])
    last = metrics(run)[-1]
    assert found.metrics == found.recorded == {name: last[name] for name in ("accuracy", "cross_entropy")}


def test_other_images_have_other_metrics_and_the_recorded_ones_beside_them(
    compose_config: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    recorded = run_trial(compose_config(*DIGITS), run)["final"]["cross_entropy"]
    evaluate.main([str(run), "data.split_seed=1"])
    assert f"(recorded {recorded!r})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "damage", "message"),
    [
        ((), "config.yaml", "holds no run"),
        ((), "model/final.safetensors", "final.safetensors: is missing"),
        (("data.pth=x",), None, "pth"),
        (("data.path",), None, "data.path: is no key=value"),
        (("data.path=[",), None, "data.path=[: "),
        (("task.model=mlp",), None, "doesn't fit the model for this data"),
    ],
)
def test_what_can_not_be_measured_is_refused_in_one_message(
    compose_config: Compose, tmp_path: Path, refused: Refused, typed: tuple[str, ...], damage: str | None,
    message: str,
) -> None:  # fmt: skip
    run = tmp_path / "run"
    run_trial(compose_config(*DIGITS[:1], "max_steps=1", "target.value=null", "echo.shuffle_buffer=1"), run)
    if damage is not None:
        (run / damage).unlink()
    assert message in refused(evaluate.main, run, *typed)


def test_damaged_weights_are_refused(
    compose_config: Compose, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_trial(compose_config(*DIGITS[:1], "max_steps=1", "target.value=null"), tmp_path / "run")
    file = tmp_path / "run" / "model" / "final.safetensors"

    def refuse(_: Path) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "load_file", refuse)
        assert refused(evaluate.main, tmp_path / "run") == f"error: {file}: Input/output error\n"
    file.write_bytes(file.read_bytes()[:1000])
    assert f"{file}: is damaged" in refused(evaluate.main, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    summary = tmp_path / "run" / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "status": "diverged"}))
    assert "this one's status is diverged" in refused(evaluate.main, tmp_path / "run")


def test_without_a_run_it_asks_for_that_alone(refused: Refused) -> None:
    assert refused(evaluate.main).strip().endswith("error: the following arguments are required: run")


def test_a_model_beyond_its_weights_takes_no_memory(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "final.safetensors")
    task: Any = SimpleNamespace(build_model=lambda: torch.nn.Linear(10**6, 10**6))
    with pytest.raises(DataError, match=r"for this data \(3 numbers for 1,000,001,000,000\)"):
        evaluate._check_size(tmp_path / "final.safetensors", task)
