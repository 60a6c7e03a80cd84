"""python -m adaecho.evaluate measures the saved weights of a run again."""

import json
import shutil
from pathlib import Path

import pytest

from adaecho import evaluate
from adaecho.errors import DataError
from adaecho.tasks.base import check_same_meaning
from adaecho.training.trial import run_trial
from tests.conftest import Compose, Refused
from tests.datasets.files import write_labeled
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
    recorded = summary(trained)
    (final,) = evaluate.evaluate(trained)
    assert final.metrics == final.recorded == recorded["final"]
    (best,) = evaluate.evaluate(trained, weights="best")
    line = next(one for one in metrics(trained) if one["steps"] == recorded["best"]["steps"])
    assert best.metrics == best.recorded == {name: line[name] for name in best.metrics}
    assert best.metrics != final.metrics
    evaluate.main([str(trained)])
    value = recorded["final"]["accuracy"]
    assert capsys.readouterr().out.splitlines()[0] == f"validation accuracy {value!r} (as recorded)"
    evaluate.main([str(trained), "--weights", "final", "evaluate.max_examples=99"])
    assert f"(recorded {recorded['final']['cross_entropy']!r})" in capsys.readouterr().out


def test_data_that_moved_and_data_with_other_classes(
    compose_config: Compose, tmp_path: Path, refused: Refused
) -> None:
    write_labeled("folders", tmp_path / "data")
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
    assert "the class names differ" in refused(evaluate.main, run, f"data.path={tmp_path / 'moved'}")


@pytest.mark.parametrize(
    ("damage", "typed", "message"),
    [
        ("config.yaml", "", "contains no config.yaml; pass the folder of a run"),
        ("model/final.safetensors", "", "final.safetensors: missing"),
        ("", "data.pth=x", "pth"),
        ("", "data.path", "data.path: expected key=value"),
        ("", "task.model=mlp", "does not fit the model for this data"),
        ("", "data.split_seed=1", "trained on these examples, because it used data.split_seed=0"),
        (
            "",
            "data.validation_examples=361",
            "trained on these examples, because it used data.validation_examples=360",
        ),
    ],
)
def test_an_ordinary_mistake_gets_one_message(
    trained: Path, tmp_path: Path, refused: Refused, damage: str, typed: str, message: str
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    if damage:
        (run / damage).unlink()
    assert message in refused(evaluate.main, run, *typed.split())
    assert refused(evaluate.main).strip().endswith("error: the following arguments are required: run")


def test_a_run_without_weights_is_refused(trained: Path, tmp_path: Path, refused: Refused) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "model")
    (run / "summary.json").write_text(json.dumps({**summary(run), "status": "diverged"}))
    assert "the status of this run is diverged" in refused(evaluate.main, run)


def test_training_images_of_the_run_are_not_a_validation_split(
    compose_config: Compose, tmp_path: Path, refused: Refused
) -> None:
    write_labeled("folders", tmp_path / "data")
    run_trial(compose_config(*TINY, f"data.path={tmp_path / 'data'}", "target.value=0"), tmp_path / "run")
    shutil.rmtree(tmp_path / "data" / "val")  # an incomplete copy
    message = refused(evaluate.main, tmp_path / "run", "data.validation_examples=3")
    assert "data.validation_examples=3: the run may have trained on these" in message


@pytest.mark.parametrize("key", ["class_names", "tokenizer_sha256"])
def test_numbers_that_mean_something_else_are_refused(key: str) -> None:
    for known in ({key: "here"}, {}):
        check_same_meaning(known, {key: "here"})
    with pytest.raises(DataError, match="outputs have a different meaning"):
        check_same_meaning({key: "there"}, {key: "here"})
