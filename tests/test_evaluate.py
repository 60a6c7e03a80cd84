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
from adaecho.tasks.base import check_same_meaning
from adaecho.training.trial import run_trial
from tests.conftest import Compose, Refused
from tests.datasets.test_labelled_images import folders, make
from tests.helpers import metrics, summary
from tests.tasks.test_imagenet import TINY


@pytest.fixture(scope="module")
def trained(compose_config: Compose, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was evaluated twice."""
    run = tmp_path_factory.mktemp("trained") / "run"
    run_trial(
        compose_config("task=digits", "max_steps=37", "target.value=null", "echo.shuffle_buffer=64"), run
    )
    return run


def test_the_weights_of_the_end_and_of_the_best_have_their_recorded_metrics(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = summary(trained)
    (final,) = evaluate.evaluate(trained)
    assert final.metrics == final.recorded == told["final"]
    (best,) = evaluate.evaluate(trained, weights="best")
    line = next(one for one in metrics(trained) if one["steps"] == told["best"]["steps"])
    assert best.metrics == best.recorded == {name: line[name] for name in best.metrics}
    assert best.metrics != final.metrics
    evaluate.main([str(trained)])
    value = told["final"]["accuracy"]
    assert capsys.readouterr().out.splitlines()[0] == f"validation accuracy {value!r} (as recorded)"
    # Fewer images have the recorded beside them.
    evaluate.main([str(trained), "--weights", "final", "evaluate.max_examples=99"])
    assert f"(recorded {told['final']['cross_entropy']!r})" in capsys.readouterr().out


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
    for split in (tmp_path / "moved").iterdir():
        (split / "class2").rename(split / "a class")  # which is label 0 then
    assert "its classes have other names" in refused(evaluate.main, run, f"data.path={tmp_path / 'moved'}")


@pytest.mark.parametrize(
    ("damage", "typed", "message"),
    [
        ("config.yaml", "", "holds no run"),
        ("model/final.safetensors", "", "final.safetensors: is missing"),
        ("", "data.pth=x", "pth"),
        ("", "data.path", "data.path: is no key=value"),
        ("", "data.path=[", "data.path=[: "),
        ("", "task.model=mlp", "doesn't fit the model for this data"),
        ("", "data.split_seed=1", "trained on these, as it held out others (data.split_seed=0)"),
        (
            "",
            "data.validation_examples=361",
            "trained on these, as it held out others (data.validation_examples=360)",
        ),
    ],
)
def test_what_can_not_be_measured_is_refused_in_one_message(
    trained: Path, tmp_path: Path, refused: Refused, damage: str, typed: str, message: str
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    if damage:
        (run / damage).unlink()
    assert message in refused(evaluate.main, run, *typed.split())
    assert refused(evaluate.main).strip().endswith("error: the following arguments are required: run")


def test_damaged_weights_are_refused(
    trained: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    run = shutil.copytree(trained, tmp_path / "run")
    file = run / "model" / "final.safetensors"
    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "load_file", refuse)
        assert refused(evaluate.main, run) == f"error: {file}: Input/output error\n"
    file.write_bytes(file.read_bytes()[:1000])
    assert f"{file}: is damaged" in refused(evaluate.main, run)
    shutil.rmtree(run / "model")
    (run / "summary.json").write_text(json.dumps({**summary(run), "status": "diverged"}))
    assert "this one's status is diverged" in refused(evaluate.main, run)


def test_a_model_beyond_its_weights_takes_no_memory(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "final.safetensors")
    task: Any = SimpleNamespace(build_model=lambda: torch.nn.Linear(10**6, 10**6))
    with pytest.raises(DataError, match=r"for this data \(3 numbers for 1,000,001,000,000\)"):
        evaluate._check_size(tmp_path / "final.safetensors", task)


def test_a_metric_that_the_run_did_not_know_is_not_recorded(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    known = [{name: value for name, value in line.items() if name != "accuracy"} for line in metrics(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in known))
    evaluate.main([str(run)])
    first, second = capsys.readouterr().out.splitlines()
    assert (first.endswith("(not recorded)"), second.endswith("(as recorded)")) == (True, True)


def test_what_is_held_out_of_changed_images_may_have_been_trained_on(
    compose_config: Compose, tmp_path: Path, refused: Refused
) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    folders(data, {".": range(9)})
    config = compose_config(*TINY, f"data.path={data}", "data.validation_examples=3", "target.value=0")
    run_trial(config, run)
    data = data.rename(tmp_path / "moved")
    moved = f"data.path={data}"
    (found,) = evaluate.evaluate(run, [moved])
    assert found.metrics == found.recorded
    (fewer,) = evaluate.evaluate(run, [moved, "evaluate.max_examples=2"])
    assert fewer.metrics != found.metrics
    firsts = [min(folder.iterdir()) for folder in data.iterdir()]
    lasts = [first.rename(first.with_name("z.jpg")) for first in firsts]
    assert (others := "data.path: other examples are held out of it") in refused(evaluate.main, run, moved)
    for first, last in zip(firsts, lasts, strict=True):
        last.rename(first)
    for first in firsts:
        shutil.copy(first, first.with_name("one more.jpg"))
    assert others in refused(evaluate.main, run, moved)
    folders(data, {"train": range(9), "val": range(9, 12)})
    assert evaluate.evaluate(run, [moved, "data.validation_examples=null"])[0].metrics


def test_what_another_split_or_a_form_without_names_means_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    task: Any = SimpleNamespace(facts={"held_out_sha256": "here"})
    config: Any = SimpleNamespace(data=SimpleNamespace(validation_examples=None))
    for of_run, told in (("here", False), ("there", True)):
        evaluate.check_held_out({}, {"data": {"held_out_sha256": of_run}}, config, task)
        assert ("its validation split is not that of the run" in capsys.readouterr().err) == told
    check_same_meaning({"class_names": "there"}, task.facts)
    assert "doesn't say which classes its numbers mean" in capsys.readouterr().err


def test_nothing_is_held_out_of_the_training_images_of_a_run_with_a_split_of_its_own(
    compose_config: Compose, tmp_path: Path, refused: Refused
) -> None:
    make("folders", tmp_path / "data")
    run_trial(compose_config(*TINY, f"data.path={tmp_path / 'data'}", "target.value=0"), tmp_path / "run")
    shutil.rmtree(tmp_path / "data" / "val")  # a copy that broke off, say
    message = refused(evaluate.main, tmp_path / "run", "data.validation_examples=3")
    assert "data.validation_examples=3: the run may have been trained on these" in message


@pytest.mark.parametrize("key", ["class_names", "tokenizer_sha256"])
def test_numbers_that_mean_something_else_are_refused(key: str) -> None:
    for known in ({key: "here"}, {}):
        check_same_meaning(known, {key: "here"})
    with pytest.raises(DataError, match="the same number means something else"):
        check_same_meaning({key: "there"}, {key: "here"})
