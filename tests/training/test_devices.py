"""Compiled models, fused optimizers, and steps that do not wait for the GPU."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from adaecho.training import trainer
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.helpers import metrics
from tests.needs import needs

RUN = (
    "task=digits_mlp", "precision=float32", "max_steps=20", "target.value=null",
    "evaluate.every_fresh_examples=128",
)  # fmt: skip


def losses(folder: str) -> list[float]:
    return [line["cross_entropy"] for line in metrics(folder)]


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",  # traces graphs without the slow compiler
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.other_forms,
                needs("g++", present=shutil.which("g++") is not None, remedy="apt-get install g++"),
            ],
        ),
    ],
)
def test_a_compiled_model_takes_the_same_steps(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    from torch._dynamo.utils import counters  # takes as long to import as torch

    run_trial(compose_config(*RUN, "device=cpu"), Path("eager"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    compiled = counters["stats"]["unique_graphs"]
    run_trial(compose_config(*RUN, "device=cpu", "compile=default"), Path("compiled"))
    assert counters["stats"]["unique_graphs"] > compiled
    assert losses("compiled") == pytest.approx(losses("eager"), rel=1e-4)


@pytest.mark.parametrize("more", [(), ("adascale=on", "adascale.num_gradients_to_accumulate=2")], ids=str)
def test_a_fused_optimizer_takes_the_same_steps(compose_config: Compose, more: tuple[str, ...]) -> None:
    run_trial(compose_config(*RUN, "device=cpu", *more), Path("plain"))
    run_trial(compose_config(*RUN, "device=cpu", *more, "optimizer.fused=true"), Path("fused"))
    assert losses("fused") == pytest.approx(losses("plain"), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_a_step_never_waits_for_the_gpu(compose_config: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    step = trainer.Trainer._step

    def watched(self: trainer.Trainer, batch: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if self.progress.steps > 2 else "default")
        try:
            step(self, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(trainer.Trainer, "_step", watched)
    run_trial(compose_config(*RUN, "device=cuda", "optimizer.fused=true"), Path("run"))
