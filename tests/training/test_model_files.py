"""What is left of the model: its weights at the end and at the best evaluation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from adaecho.config.schema import Config
from adaecho.errors import FolderError
from adaecho.records.folder import RunFolder
from adaecho.tasks import build_task
from adaecho.training.trial import run_trial
from tests.conftest import Compose

FOLDER = Path("run")
RUN = ("task=digits_mlp", "precision=float32", "evaluate.every_fresh_examples=160")


def _accuracy(config: Config, path: Path) -> float:
    task = build_task(config)
    model = task.build_model()
    model.load_state_dict(load_file(path))
    with torch.inference_mode():
        return task.evaluate(model.eval(), "validation", device=torch.device("cpu"))["accuracy"]


def test_a_run_that_reaches_its_target_keeps_the_weights_that_reached_it(compose_config: Compose) -> None:
    config = compose_config(*RUN, "target.value=0.7")
    summary = run_trial(config, FOLDER)
    assert summary["status"] == "reached"
    assert summary["model"] == {"final": "model/final.safetensors", "best": "model/best.safetensors"}
    for path in summary["model"].values():
        assert _accuracy(config, FOLDER / path) == pytest.approx(summary["best"]["value"])
    with safe_open(FOLDER / summary["model"]["best"], "pt") as file:
        assert file.metadata() == {"steps": str(summary["to_target"]["steps"])}


def test_a_spent_budget_keeps_both_ends(compose_config: Compose) -> None:
    # A rate that soon does harm: the best evaluation is not the last.
    config = compose_config(*RUN, "optimizer.learning_rate=0.5", "max_steps=60", "target.value=null")
    summary = run_trial(config, FOLDER)
    best, final = summary["best"], summary["final"]["accuracy"]
    assert best["steps"] < summary["steps"]
    assert _accuracy(config, FOLDER / "model/best.safetensors") == pytest.approx(best["value"])
    assert _accuracy(config, FOLDER / "model/final.safetensors") == pytest.approx(final)


def test_killed_between_the_weights_and_the_summary_it_ends_the_same(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose_config(*RUN, "target.value=0.7")
    whole = run_trial(config, Path("whole"))
    write = RunFolder.write_summary

    def killed(self: RunFolder, summary: dict[str, Any]) -> None:
        if summary["status"] == "reached":
            raise FolderError("killed here")
        write(self, summary)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "write_summary", killed)
        with pytest.raises(FolderError, match="killed here"):
            run_trial(config, FOLDER)
    assert (FOLDER / "model/final.safetensors").exists()
    assert run_trial(config, FOLDER)["to_target"]["steps"] == whole["to_target"]["steps"]
    for path in whole["model"].values():
        assert (FOLDER / path).read_bytes() == (Path("whole") / path).read_bytes()
