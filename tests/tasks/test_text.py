"""The text tasks on small real text: training, resume, loss, entropies, and mistakes."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from adaecho.config.schema import Config, from_plain, to_plain
from adaecho.datasets.tokens import PAD
from adaecho.errors import ConfigError, DataError, FolderError
from adaecho.tasks import build_task
from adaecho.tasks.text import entropies, evaluator, loss, weight
from adaecho.training.loader import make_loader
from adaecho.training.trial import run_trial
from tests.conftest import Compose
from tests.datasets.files import lines, texts, write_json_lines, write_text_table, write_texts
from tests.forks import FORKS
from tests.helpers import dying, metrics, summary

TINY = (
    "task.layers=1", "task.width=16", "task.feed_forward=32", "task.heads=2", "task.vocab_size=300",
    "task.block_size=16", "batch_size=8", "echo.shuffle_buffer=32", "evaluate.every_fresh_examples=64",
    "evaluate.max_examples=40", "precision=float32", "max_steps=12", "max_fresh_examples=null",
    "target.value=null", "optimizer.learning_rate=0.1",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAECHO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def _tiny(compose_config: Compose, task: str, folder: Path, *overrides: str) -> Config:
    """Each task on another form of data: text files, sentences in parquet, JSON lines."""
    if task == "small_text":
        write_texts(folder)
        overrides = ("data.validation_examples=2", *overrides)
    elif task == "lm1b":
        write_text_table(folder / "train-0.parquet", list(lines()[:600]))
        write_text_table(folder / "test-0.parquet", list(lines()[600:700]))
    else:
        for number, name in enumerate(("train.0", "train.1", "validation.0")):
            write_json_lines(folder / f"c4-{name}.jsonl", texts()[3 * number :][:3])
    return compose_config(f"task={task}", f"data.path={folder}", *TINY, *overrides)


TASKS = ["small_text", "lm1b", "common_crawl"]


@pytest.mark.parametrize("task", TASKS)
def test_each_task_trains_and_records_facts(compose_config: Compose, tmp_path: Path, task: str) -> None:
    overrides = ("max_steps=40", "echo=example_before_augmentation")
    ended = run_trial(_tiny(compose_config, task, tmp_path / "text", *overrides), tmp_path / "run")
    assert ended["status"] == "budget_spent"
    begun = metrics(tmp_path / "run")[0]["cross_entropy"]
    assert ended["final"]["cross_entropy"] < begun < 1.2 * math.log(300)
    assert ended["data"]["bigram_entropy"] < ended["data"]["unigram_entropy"] < math.log(300)
    assert len(ended["data"]["tokenizer_sha256"]) == 64
    assert ended["skipped_examples"] == (ended["data"].get("skipped", {}).get("too_short", 0))


def _run_until_killed(plain: dict[str, Any], folder: str, die_at: int) -> None:
    from adaecho.training import trainer

    trainer.Trainer._step = dying(trainer.Trainer._step, die_at, [0])  # type: ignore[method-assign]
    run_trial(from_plain(plain), Path(folder))


@pytest.mark.parametrize("task", TASKS)
def test_after_kills_metrics_and_weights_are_the_same(
    compose_config: Compose, tmp_path: Path, task: str
) -> None:
    overrides = ("checkpoint_every_s=0", "echo=example_before_augmentation", "echo.factor=1.5")
    config = _tiny(compose_config, task, tmp_path / "text", *overrides)
    whole, killed = tmp_path / "undisturbed", tmp_path / "killed"
    run_trial(config, whole)
    for die_at in (5, 6):
        process = FORKS.Process(target=_run_until_killed, args=(to_plain(config), str(killed), die_at))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    run_trial(config, killed)
    weights = [(one / "model" / "final.safetensors").read_bytes() for one in (whole, killed)]
    assert weights[0] == weights[1]
    assert metrics(whole) == metrics(killed) != []
    for key in ("final", "sample"):
        assert summary(whole)[key] == summary(killed)[key]


def test_echo_before_and_after_augmentation_are_the_same(
    compose_config: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = []
    for echo in ("example_before_augmentation", "example_after_augmentation"):
        config = _tiny(compose_config, "small_text", tmp_path / "text", f"echo={echo}", "echo.factor=2.5")
        with make_loader(config, build_task(config), torch.device("cpu")) as loader:
            found = iter(loader)
            batches.append(torch.stack([next(found)["tokens"].to(torch.int64) for _ in range(20)]))
        assert ("bit for bit" in capsys.readouterr().err) == (echo == "example_after_augmentation")
    assert torch.equal(*batches)


@pytest.mark.parametrize("change", ["files", "tokenizer"])
def test_a_checkpoint_of_other_tokens_is_refused(
    compose_config: Compose, tmp_path: Path, change: str
) -> None:
    config = _tiny(compose_config, "small_text", tmp_path / "text")
    run_trial(config, tmp_path / "run")
    if change == "files":
        (tmp_path / "text" / "more.py").write_text("def changed_between_two_runs():\n    return 1\n" * 9)
    else:
        (path,) = (tmp_path / "cache").glob("*/meta.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer sha256": "another"}))
    longer = from_plain({**to_plain(config), "max_steps": 20})
    with pytest.raises(FolderError, match=r"_sha256=.*, but now .*_sha256 is .*restart=true"):
        run_trial(longer, tmp_path / "run")


class _Table(nn.Module):
    """A table of logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


EXAMPLES = np.array([[1, 2, 3, 4], [1, 5, 1, PAD], [2, 2, PAD, PAD]], np.uint16)


def test_the_loss_counts_tokens_without_padding() -> None:
    model, batch = _Table(), {"tokens": torch.from_numpy(EXAMPLES)}
    log = model.table.log_softmax(-1)
    pairs = [(1, 2), (2, 3), (3, 4), (1, 5), (5, 1), (2, 2)]
    for share in (0.3, 0.0):
        expected = -sum((1 - share) * log[a, b].item() + share * log[a].mean().item() for a, b in pairs)
        total, number = loss(model, batch, label_smoothing=share)
        assert total.item() == pytest.approx(expected, rel=1e-5)
        assert number == weight(batch) == 6
    for size in (1, 2, 3, 50):
        metrics = evaluator(lambda: EXAMPLES, size)(model, "validation", device=torch.device("cpu"))
        assert metrics["cross_entropy"] == pytest.approx(total.item() / 6, rel=1e-5)


def test_entropies_are_of_the_predicted_tokens() -> None:
    found = entropies(EXAMPLES)  # predicted: 2, 3, 4, 5, 1, 2
    assert found["unigram_entropy"] == pytest.approx(4 / 6 * math.log(6) + 2 / 6 * math.log(3))
    # After 1 follows 2 or 5, after 2 follows 3 or 2; after 3 and after 5 one token alone.
    assert found["bigram_entropy"] == pytest.approx(4 / 6 * math.log(2))


def test_missing_data_is_named(compose_config: Compose, tmp_path: Path) -> None:
    for task in ("lm1b", "common_crawl"):
        with pytest.raises(DataError, match=f"data.path=null: {task} needs a folder"):
            build_task(compose_config(f"task={task}"))
    folder = write_texts(tmp_path / "text")
    with pytest.raises(DataError, match="needs files named validation"):
        build_task(compose_config("task=common_crawl", f"data.path={folder}"))
    with pytest.raises(ConfigError, match=r"data\.validation_examples=9: a stream has a validation split"):
        build_task(compose_config("task=common_crawl", f"data.path={folder}", "data.validation_examples=9"))
    with pytest.raises(DataError, match=r"data\.validation_examples=null: this data has no validation split"):
        build_task(compose_config("task=small_text", f"data.path={folder}", "data.validation_examples=null"))
