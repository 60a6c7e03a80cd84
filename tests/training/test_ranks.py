"""Runs on several ranks: equal to one process with the same batches, one record, and a common end."""

import copy
import errno
import functools
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from adaecho.config.schema import Config
from adaecho.echo import EchoLoader
from adaecho.errors import DataError
from adaecho.ranks import DistributedContext
from adaecho.tasks import build_task
from adaecho.training import trainer
from adaecho.training.distributed import share_of
from adaecho.training.loader import make_loader
from tests.conftest import Compose
from tests.datasets.files import write_texts
from tests.helpers import metrics, signal_at, summary
from tests.needs import first_form
from tests.training.several_ranks import needs_gloo, run_on

pytestmark = needs_gloo

RUN = (
    "batch_size=16", "precision=float32", "max_steps=24", "target.value=null", "echo.shuffle_buffer=40",
    "evaluate.every_fresh_examples=32", "schedule.shape=constant",
)  # fmt: skip
ECHOES = {
    "none": ("echo=none",),
    "batch": ("echo=batch", "echo.factor=1.5"),
    "before": ("echo=example_before_augmentation", "echo.factor=1.5"),
    "after": ("echo=example_after_augmentation", "echo.factor=2.5"),
    "on four ranks": ("echo=example_before_augmentation", "echo.factor=1.5", "max_steps=10"),
}
DIGITS = torch.device("cpu")
ENDED: list[tuple[int | None, str]] = [(0, "budget_spent")] * 2


def reference(config: Config, world_size: int) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The same training in one process: a replica and a loader for each rank, and a sum of gradients.

    Returns:
        Metrics and fresh examples of each evaluation; the final weights.
    """
    task = build_task(share_of(config, world_size))
    torch.manual_seed(config.seed)
    replicas = [task.build_model()]
    replicas += [copy.deepcopy(replicas[0]) for _ in range(world_size - 1)]
    momenta = [torch.zeros_like(parameter) for parameter in replicas[0].parameters()]
    shares = [DistributedContext(rank, world_size) for rank in range(world_size)]
    loaders = [make_loader(share_of(config, world_size), task, DIGITS, ranks) for ranks in shares]
    batches = [iter(loader) for loader in loaders]
    lines, due, fresh = [], config.evaluate.every_fresh_examples, 0
    for step in range(config.max_steps + 1):
        ahead = sum(loader.next_fresh_examples() for loader in loaders)
        if step and (ahead > due or step == config.max_steps):  # the end is evaluated, too
            lines.append({"fresh_examples": fresh, "steps": step, **_evaluate(task, replicas)})
        if ahead > due:
            every = config.evaluate.every_fresh_examples
            due = (ahead - 1) // every * every + every
        if step == config.max_steps:
            break
        fresh = ahead
        losses = []
        for mine, replica in zip(batches, replicas, strict=True):
            replica.train().zero_grad()
            losses.append(task.loss(replica, next(mine)))
        weight = sum(weight for _, weight in losses)
        for loss, _ in losses:
            (loss / weight).backward()
        gradients = zip(*([p.grad for p in replica.parameters()] for replica in replicas), strict=True)
        _sgd(config, replicas, [sum(parts[1:], parts[0]) for parts in gradients], momenta)
    for loader in loaders:
        loader.close()
    return lines, replicas[0].state_dict()


def _sgd(config: Config, replicas: list[Any], gradients: list[Any], momenta: list[torch.Tensor]) -> None:
    """Momentum as in torch: Nesterov or heavy-ball."""
    given = config.optimizer
    with torch.no_grad():
        for number, parameter in enumerate(replicas[0].parameters()):
            gradient = gradients[number].add(parameter, alpha=given.weight_decay)
            momenta[number].mul_(given.momentum).add_(gradient)
            step = gradient.add(momenta[number], alpha=given.momentum) if given.nesterov else momenta[number]
            parameter.add_(step, alpha=-given.learning_rate)
            for replica in replicas[1:]:
                list(replica.parameters())[number].copy_(parameter)


def _evaluate(task: Any, replicas: list[Any]) -> dict[str, float]:
    """Evaluate with the mean of the replicas' running statistics, which all replicas then use."""
    for buffers in zip(*(replica.named_buffers() for replica in replicas), strict=True):
        if "running" in buffers[0][0]:
            mean = sum(buffer for _, buffer in buffers[1:]) + buffers[0][1]
            for _, buffer in buffers:
                buffer.copy_(mean / len(replicas))
    with torch.inference_mode():
        return task.evaluate(replicas[0].eval(), "validation", device=DIGITS)


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Little text, whose tokens are soon made."""
    return f"data.path={write_texts(tmp_path / 'text')}"


TASKS = {
    "text": (
        "task=small_text", "task.vocab_size=300", "data.validation_examples=2",  # of the files ``text``
        "task.layers=1", "task.width=32", "task.feed_forward=64", "task.block_size=32",
        "echo=example_before_augmentation", "echo.factor=1.5", "evaluate.max_examples=32",
    ),
    "boxes": (
        "task=scenes", "echo=batch", "echo.factor=2", "data.validation_examples=20", "max_steps=8",
        "task.training_scenes=100", "optimizer.weight_decay=0", "optimizer.max_grad_norm=null",
        "channels_last=false",
        "evaluate.every_fresh_examples=16", "optimizer.learning_rate=0.001", "schedule.warmup_steps=0",
    ),
}  # fmt: skip


_whole: list[list[dict[str, Any]]] = []


@pytest.fixture
def config(compose_config: Compose) -> Config:
    """A run without echoing."""
    return compose_config(*RUN, "echo=none")


@pytest.fixture
def undisturbed(config: Config, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of a run on two ranks without echoing, trained once."""
    if not _whole:
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        assert run_on(2, config, folder) == ENDED
        _whole.append(metrics(folder))
    return _whole[0]


@pytest.mark.parametrize(
    "echo", first_form("before", "boxes", also=["none", "batch", "after", "text", "on four ranks"])
)
def test_ranks_equal_one_process_fed_all_their_batches(compose_config: Compose, text: str, echo: str) -> None:
    """Compare weights bit for bit, also if losses have different weights (masked tokens, matched boxes).

    With four ranks the order of sums differs.
    """
    world_size = 4 if echo == "on four ranks" else 2
    config = compose_config(*RUN, *{**ECHOES, **TASKS}[echo], *([text] if echo == "text" else []))
    assert run_on(world_size, config, "run") == ENDED[:1] * world_size
    lines, weights = reference(config, world_size)
    assert len(lines) > 1
    for line, expected in zip(metrics("run"), lines, strict=True):
        exact = expected.keys() & {"fresh_examples", "steps", *(("accuracy",) if world_size == 2 else ())}
        assert {key: line[key] for key in exact} == {key: expected[key] for key in exact}
        for key in expected.keys() - exact if world_size == 2 else ():
            # Each rank evaluates its images in separate batches.
            assert line[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-9)
    found = safetensors.torch.load_file("run/model/final.safetensors")
    assert found.keys() == weights.keys()
    tolerance = {"rtol": 0.0, "atol": 0.0} if world_size == 2 else {"rtol": 1e-4, "atol": 1e-5}
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, **tolerance)
    assert summary("run")["ranks"] == world_size
    assert summary("run")["fresh_examples"] >= lines[-1]["fresh_examples"]


@pytest.mark.parametrize(("world_size", "passes"), [(2, 2), (2, 1), (3, 1)])
def test_adascale_takes_ranks_times_accumulation_as_its_micro_batches(
    compose_config: Compose, monkeypatch: pytest.MonkeyPatch, world_size: int, passes: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    config = compose_config(
        *RUN, "task=digits_mlp", "adascale=on", "echo=none", "optimizer.momentum=0.9", "max_steps=12",
        f"batch_size={8 * world_size * passes}", f"adascale.num_gradients_to_accumulate={passes}",
    )  # fmt: skip
    monkeypatch.delenv("WORLD_SIZE")
    assert run_on(world_size, config, "run") == ENDED[:1] * world_size
    gains = [line["gain"] for line in metrics("run")]
    assert all(1 <= gain <= world_size * passes for gain in gains)
    assert gains[-1] > 1.05


def on(victim: int, do: Callable[..., None], *given: Any) -> Callable[[int], None]:
    """A ``before`` of ``run_on`` that calls ``do`` on one rank."""
    return functools.partial(_on, victim, do, given)


def _on(victim: int, do: Callable[..., None], given: tuple[Any, ...], rank: int) -> None:
    if rank == victim:
        do(*given)


def _dies(at_step: int) -> None:
    """Kill the process before this step."""
    step = trainer.Trainer._step

    def dying(self: trainer.Trainer, batch: Any) -> None:
        if self.progress.steps == at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, batch)

    trainer.Trainer._step = dying  # type: ignore[method-assign]


def _fails(error: Exception) -> None:
    def failing(_: EchoLoader) -> int:
        raise error

    EchoLoader.next_fresh_examples = failing  # type: ignore[method-assign]


def _fails_at(victim: int, error: Exception, rank: int) -> None:
    _on(victim, _fails, (error,), rank)


def _hangs() -> None:
    """Hang until rank 0 has ended."""

    def hanging(*_: object) -> None:
        while not Path("run.rank0").exists():
            time.sleep(0.05)

    trainer.Trainer._step = hanging  # type: ignore[method-assign]


def _is_signalled(number: int, at_step: int) -> None:
    signal_at(pytest.MonkeyPatch(), at_step, signal.Signals(number))


@pytest.mark.parametrize(
    "form",
    first_form(
        # Sums of three ranks depend on the order, which DistributedDataParallel changes after two passes.
        (3, 18, ("echo=batch", "echo.factor=1.5")),
        also=[
            (2, 16, ("echo=example_before_augmentation", "echo.factor=1.5")),
            (2, 16, ("echo=none", "adascale=on", "adascale.num_gradients_to_accumulate=2",
                     "optimizer.zero_redundancy=true")),
        ],
    ),
    ids=["batch", "before", "adascale_zero"],
)  # fmt: skip
def test_after_a_rank_is_killed_the_same_command_continues_exactly(
    compose_config: Compose, form: tuple[int, int, tuple[str, ...]]
) -> None:
    world_size, batch_size, more = form
    config = compose_config(*RUN, *more, f"batch_size={batch_size}", "checkpoint_every_s=0")
    assert run_on(world_size, config, "whole") == ENDED[:1] * world_size
    for victim, at_step in ((1, 0), (0, 5), (1, 13)):
        ends = run_on(world_size, config, "killed", on(victim, _dies, at_step))
        assert ends.pop(victim) == (-signal.SIGKILL, "")
        assert all(code == 2 and "another rank failed, hung or exited" in said for code, said in ends)
    assert run_on(world_size, config, "killed") == ENDED[:1] * world_size
    assert metrics("killed") == metrics("whole")
    killed, whole = (Path(name, "model/final.safetensors").read_bytes() for name in ("killed", "whole"))
    assert killed == whole


def _noted(error: Exception) -> Exception:
    error.add_note("while reading example 3")
    return error


@pytest.mark.parametrize(
    "form",
    first_form(
        (1, 1, _noted(ValueError("shard 7 is torn"))),
        (1, 2, DataError("disk of this host: full")),
        also=[(0, 1, _noted(ValueError("shard 7 is torn")))],
    ),
    ids=["a crash", "the user's", "a crash of rank 0"],
)
def test_all_ranks_report_an_error_of_one_rank(config: Config, form: tuple[int, int, Exception]) -> None:
    victim, code, error = form
    ends = run_on(2, config, "run", functools.partial(_fails_at, victim, error))
    assert ends[victim] == (code, f"{type(error).__name__}: {error}")
    assert ends[1 - victim][0] == 2
    assert "another rank failed" in ends[1 - victim][1]
    assert summary("run")["status"] == "failed"
    assert run_on(2, config, "run") == ENDED


def _disk_fills_up() -> None:
    """Fill the disk after the first checkpoints."""
    fsync, calls = os.fsync, itertools.count()

    def full(file: int) -> None:
        if next(calls) > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    os.fsync = full


def test_a_full_disk_under_rank_0_which_alone_writes_ends_all_and_loses_nothing(
    compose_config: Compose, undisturbed: list[dict[str, Any]]
) -> None:
    config = compose_config(*RUN, "echo=none", "checkpoint_every_s=0")
    (code, said), (other_code, other_said) = run_on(2, config, "run", on(0, _disk_fills_up))
    assert code == other_code == 2
    assert "No space left on device" in said
    assert "another rank failed" in other_said
    assert 0 < summary("run")["steps"] < 24
    assert run_on(2, config, "run") == ENDED
    assert metrics("run") == undisturbed


def test_a_rank_that_hangs_ends_the_run_within_the_stated_time(compose_config: Compose) -> None:
    # On a busy machine the ranks may start seconds apart.
    config = compose_config(*RUN, "echo=none", "rank_timeout_s=12")
    code, said = run_on(2, config, "run", on(1, _hangs))[0]
    assert code == 2
    assert "another rank failed, hung or exited" in said
    assert summary("run")["status"] == "failed"


def test_a_rank_with_a_different_config_is_named(config: Config, compose_config: Compose) -> None:
    other = compose_config(*RUN, "echo=none", "optimizer.learning_rate=0.123")
    for code, said in run_on(2, config, "run", others={1: other}):
        assert code == 2
        assert said.startswith("RankError: rank 1 has a different config than rank 0: ")
        assert "same command, code and data" in said


@pytest.mark.parametrize("victim", first_form(1, also=[0]))
def test_a_signal_to_any_rank_ends_all_at_the_same_step(
    config: Config, undisturbed: list[dict[str, Any]], victim: int
) -> None:
    assert run_on(2, config, "run", on(victim, _is_signalled, signal.SIGUSR2, 7)) == [(0, "preempted")] * 2
    assert (summary("run")["steps"], summary("run")["signal"]) == (7, "SIGUSR2")
    ((code, said),) = run_on(1, config, "run")
    assert code == 2
    assert "made with world_size=2, but now world_size is 1" in said
    assert run_on(2, config, "run") == ENDED
    assert metrics("run") == undisturbed


def _first_batch_never_comes() -> None:
    """A signal comes during the wait."""

    def wait(_: EchoLoader) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(0.01)

    EchoLoader.next_fresh_examples = wait  # type: ignore[method-assign]


def test_a_signal_ends_the_wait_for_the_first_batch_on_all_ranks(config: Config) -> None:
    assert run_on(2, config, "run", on(1, _first_batch_never_comes)) == [(0, "preempted")] * 2
    assert (summary("run")["steps"], summary("run")["signal"]) == (0, "SIGTERM")
    assert run_on(2, config, "run") == ENDED


def test_a_batch_that_cannot_be_split_evenly_is_refused(compose_config: Compose) -> None:
    for code, said in run_on(2, compose_config(*RUN, "batch_size=15"), "run"):
        assert code == 2
        assert "batch_size=15" in said
        assert "use a multiple of 2" in said


def test_a_restart_by_torchrun_continues_a_fresh_run(compose_config: Compose) -> None:
    config = compose_config(*RUN, "echo=none", "restart=true", "checkpoint_every_s=0")
    run_on(2, config, "run", on(1, _dies, 9))
    assert run_on(2, config, "run", variables={"TORCHELASTIC_RESTART_COUNT": "1"}) == ENDED
    assert not Path("run.old-1").exists()


def test_the_factor_follows_the_mean_of_the_ranks_ratios(compose_config: Compose) -> None:
    config = compose_config(*RUN, "echo=batch", "echo.factor=auto", "max_steps=45")
    assert run_on(2, config, "run", _different_ratios) == ENDED
    assert metrics("run")[-1]["echo_factor"] == 3.0


def _different_ratios(rank: int) -> None:
    from adaecho.echo.stats import Timers

    Timers.ratio = property(lambda _: 2.0 + 2 * rank)  # type: ignore[method-assign, assignment]
