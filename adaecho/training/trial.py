"""One run from config to summary, in one folder, from wherever the folder stands."""

import hashlib
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

from adaecho.config.identity import BUDGETS, changes
from adaecho.config.launch_env import was_restarted
from adaecho.config.schema import Config, to_plain, value_at
from adaecho.datasets.storage import storage_errors
from adaecho.errors import ChangedDataError, FolderError, UserError, warn, with_notes
from adaecho.masking import masked
from adaecho.ranks import ALONE, Ranks, explained
from adaecho.records.environment import environment
from adaecho.records.folder import RunFolder
from adaecho.records.lock import FolderInUseError
from adaecho.records.outcome import untold
from adaecho.records.status import FINISHED, Status
from adaecho.tasks import build_task
from adaecho.tasks.base import Task
from adaecho.training import checkpoint
from adaecho.training.callbacks import Callbacks
from adaecho.training.device import choose_device
from adaecho.training.interrupt import Interrupt
from adaecho.training.parallel import share_of
from adaecho.training.progress import is_finished
from adaecho.training.trainer import Line, Trainer

if TYPE_CHECKING:
    from adaecho.training.display import Display  # imports rich, which a sweep's workers never show

_CLOSE_WAIT_S = 5.0  # after a signal: threads may be in a call of a source that never answers


def run_trial(
    config: Config,
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    begun: Callable[[], object] = lambda: None,
    display: "Display | None" = None,
    prune: Callable[[int], bool] | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Train until a stop rule holds, or continue what ``folder`` holds; returns the summary.

    A finished run returns its summary unchanged. Diverging is an outcome like reaching the target; a signal
    ends the run as ``preempted`` with a checkpoint, and the next call continues it. One that came when the
    outcome was decided changes nothing but what is returned: its name is under ``signal``.

    Args:
        config: a validated config.
        folder: the run's own folder; made if absent.
        overrides: what was typed, for the record.
        begun: called on the first rank once the folder is this run's, if there is something left to do.
        display: shown how far the run is.
        prune: see ``Trainer``: a search's way to stop a trial that can't be its best any more.
        ranks: this process among those that train the run; all call this, and rank 0 alone writes.

    Raises:
        UserError: config, data or folder can't be used as they are.
        Exception: the run crashed; its status is ``failed`` and its traceback is in the folder.
    """
    trial = _Trial(config, RunFolder(folder), display, prune, ranks)
    with ExitStack() as stack:
        found = ranks.from_first(lambda: trial.open(stack, overrides))
        if isinstance(found, FolderInUseError):
            raise found  # on all ranks, which can go on with something else
        if found is not None:
            return found
        if ranks.is_first:
            begun()
        try:
            with storage_errors(), Interrupt() as interrupt:
                return trial.run(interrupt)
        except (Exception, KeyboardInterrupt) as error:
            reason = explained(error)
            if ranks.is_first:
                trial.record_failure(reason)
            if isinstance(error, FolderInUseError) and not ranks.is_alone:
                reason = FolderError(str(error))  # the other ranks were in the middle of it
            if reason is not error:
                raise reason from error
            raise


@dataclass
class _Trial:
    """The trainer and the folder that records it.

    Attributes:
        callbacks: on rank 0, once it runs.
        last_checkpoint: when that was, or the run began.
        skipped_told: how many bad examples have been told of.
    """

    config: Config
    run_folder: RunFolder
    display: "Display | None"
    prune: Callable[[int], bool] | None
    ranks: Ranks
    callbacks: Callbacks | None = None
    last_checkpoint: float = field(default_factory=time.monotonic)
    skipped_told: int = 0

    def open(self, stack: ExitStack, overrides: Sequence[str]) -> FolderInUseError | dict[str, Any] | None:
        """Make the folder this run's; the summary if nothing is left to do, an error if it is in use."""
        run, config, plain = self.run_folder, self.config, to_plain(self.config)
        # Started again by torchrun after a failure, the command still says fresh=true.
        fresh = config.fresh and not was_restarted()
        summary, recorded = run.read_summary(), run.read_config()
        if summary and recorded and not fresh and is_finished(summary, config):
            recorded |= summary.get("budgets", {})  # a larger one may have been refused since
            if not changes(recorded, plain):
                return summary
        try:
            stack.enter_context(run.lock())
        except FolderInUseError as error:
            return error
        run.start(plain, overrides, environment(), fresh=fresh)
        if run.moved_to is not None and self.display is not None:
            self.display.say(f"old run kept in {run.moved_to}")
        return None

    def record_failure(self, error: BaseException) -> None:
        """Leave status and traceback in the folder, as far as the disk still allows; an outcome stays one."""
        status = Status.PREEMPTED if isinstance(error, KeyboardInterrupt) else Status.FAILED
        try:
            self.run_folder.write_traceback(traceback.format_exc())
            earlier = self.run_folder.read_summary() or _describe(self.config)
            if earlier["status"] not in FINISHED:
                text = masked(f"{type(error).__name__}: {with_notes(error)}")
                self.run_folder.write_summary({**earlier, "status": status, "error": text})
        except FolderError:
            if not isinstance(error, UserError):  # e.g. the full disk that is being reported already
                raise

    def run(self, interrupt: Interrupt) -> dict[str, Any]:
        """Build the task, train, and record the outcome."""
        if self.ranks.is_first:
            self.callbacks = Callbacks(self.config, self.run_folder.path, choose_device(self.config))
        task = build_task(share_of(self.config, self.ranks.world_size))
        self.ranks.check_same(self._what_is_seen(task))
        trainer = Trainer(
            self.config,
            task,
            record=lambda line: self.record(line, trainer),
            interrupt=interrupt,
            checkpoint_due=lambda: time.monotonic() - self.last_checkpoint >= self.config.checkpoint_every_s,
            between_steps=self.between_steps,
            prune=self.prune,
            ranks=self.ranks,
        )
        interrupt.has_begun = True
        try:
            summary = self._train(trainer)
        finally:
            trainer.loader.close(_CLOSE_WAIT_S if interrupt.signal else None)
        late = [int(number) for (number,) in self.ranks.gather([interrupt.signal]) if number]
        return {**summary, "signal": signal.Signals(late[0]).name} if late else summary

    def _what_is_seen(self, task: Task) -> dict[str, str]:
        """What must be the same on every rank: name of a thing, what this rank sees of it."""
        config = hashlib.sha256(repr(to_plain(self.config)).encode()).hexdigest()[:12]
        examples = str(task.epoch_examples)
        return {
            "config": config,
            "torch": torch.__version__,
            "number of examples": examples,
            **task.fingerprint,
        }

    def _train(self, trainer: Trainer) -> dict[str, Any]:
        self._resume(trainer)
        self._write_summary(self._summary(trainer, Status.RUNNING))
        with nullcontext() if self.display is None else self.display.showing(trainer):
            status = trainer.train()
        self._tell_skipped(trainer)
        if status in (Status.PREEMPTED, Status.BUDGET_SPENT):
            # Before the evaluation of the end: with a larger budget there is none at this place.
            self._checkpoint(trainer)
        if status == Status.BUDGET_SPENT:
            status = trainer.evaluate_end()
        summary = self._summary(trainer, status)
        if status == Status.PREEMPTED:
            summary["signal"] = signal.Signals(trainer.signal).name
        if status == Status.BUDGET_SPENT:
            last = self.ranks.from_first(lambda: self.run_folder.read_metrics()[-1])
            summary["final"] = {name: last[name] for name in trainer.task.metrics}
        if status in (Status.REACHED, Status.BUDGET_SPENT):
            if trainer.task.has_test_split:
                summary["test"] = trainer.measure("test")
            summary = {**trainer.at_end(), **summary}  # what a task tells takes no place of the records
            summary["model"] = self.ranks.from_first(lambda: self._keep_model(trainer))
        summary["eval_time_s"] = trainer.clocks.eval_time_s
        if self.callbacks and status != Status.PREEMPTED:
            self.callbacks.on_end(summary)  # before the folder says so: a kill in it doesn't lose it
        self._write_summary(summary)
        return self.ranks.from_first(lambda: summary)

    def _write_summary(self, summary: dict[str, Any]) -> None:
        if self.ranks.is_first:
            self.run_folder.write_summary(summary)

    def _keep_model(self, trainer: Trainer) -> dict[str, str]:
        """Write the weights of the end and of the best evaluation; where each is, within the folder."""
        best = trainer.progress.best
        ends = {"final": (trainer.weights(), trainer.progress.steps)}
        if best is not None and trainer.best_model is not None:
            ends["best"] = (trainer.best_model, best["steps"])
        paths = {}
        for name, (weights, steps) in ends.items():
            data = safetensors.torch.save(weights, {"steps": str(steps)})  # of several keys the order varies
            paths[name] = str(self.run_folder.write_model(f"{name}.safetensors", data))
        return paths

    def _resume(self, trainer: Trainer) -> None:
        """Continue from the last checkpoint, if there is one; metrics beyond it are cut off."""
        state = self.ranks.from_first(lambda: checkpoint.load(self.run_folder))
        if state is not None:
            try:
                self._check_data(state["fingerprint"], trainer.task.fingerprint)
                trainer.load_state_dict(state)
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise FolderError(
                    f"{self.run_folder.checkpoint}: not a checkpoint of this run "
                    f"({str(error).splitlines()[0]}); put a good copy back, or start anew with fresh=true"
                ) from error
        if self.ranks.is_first:
            self.run_folder.truncate_metrics(trainer.progress.evaluations)

    def _check_data(self, then: dict[str, str], now: dict[str, str]) -> None:
        """Refuse data that is not what the checkpoint was trained with; the loader knows its length."""
        differing = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        if not differing:
            return
        name = differing[0]
        text = (
            f"{self.run_folder.path}: its checkpoint was trained with {name} {then.get(name)}, and here it "
            f"is {now.get(name)}"
        )
        if not self.config.data.allow_changed:
            raise ChangedDataError(
                f"{text}; put back what was there, or start anew with fresh=true, or go on with what is here "
                "by data.allow_changed=true"
            )
        warn(f"{text}; data.allow_changed=true goes on")

    def between_steps(self, trainer: Trainer, checkpoint_due: bool) -> None:
        self._tell_skipped(trainer)
        if self.display is not None:
            self.display.step(trainer)
        if checkpoint_due:
            with trainer.at_rest():
                self._checkpoint(trainer)
                self._write_summary(self._summary(trainer, Status.RUNNING))

    def _tell_skipped(self, trainer: Trainer) -> None:
        """Say on stderr which examples the loader has skipped since it was last asked."""
        skipped = trainer.loader.bad_examples
        for bad in skipped[self.skipped_told :]:
            warn(f"bad example skipped: {bad['origin']}: {bad['error']}")
        self.skipped_told = len(skipped)

    def _checkpoint(self, trainer: Trainer) -> None:
        state = {**trainer.state_dict(), "fingerprint": trainer.task.fingerprint}
        if self.ranks.is_first:
            checkpoint.save(self.run_folder, state)
        self.last_checkpoint = time.monotonic()

    def record(self, line: Line, trainer: Trainer) -> None:
        if self.ranks.is_first:
            self.run_folder.append_metrics(line)
        if self.display is not None:
            self.display.evaluated(line)
        if self.callbacks:
            with trainer.at_rest():
                self.callbacks.on_evaluation(line)

    def _summary(self, trainer: Trainer, status: str) -> dict[str, Any]:
        loader, progress, metric = trainer.loader, trainer.progress, self.config.target.metric
        changes = trainer.factor_changes()
        return {
            **_describe(self.config),
            **({"data": trainer.task.facts} if trainer.task.facts else {}),
            "status": status,
            "device": trainer.device.type,
            "precision": trainer.precision,
            "to_target": progress.to_target,
            "best": progress.best,
            **untold(metric, trainer.task.metrics[metric]),
            **({} if self.ranks.is_alone else {"ranks": self.ranks.world_size}),
            **trainer.gain(),
            "fresh_examples": trainer.fresh_examples,
            "steps": progress.steps,
            **trainer.counts(),
            **({"echo_factor_changes": changes} if self.config.echo.factor == "auto" else {}),
            **trainer.times(),
            "upstream_s_per_batch": loader.upstream_s_per_batch,
            "downstream_s_per_step": loader.downstream_s_per_step,
            "R": loader.R,
        }


# What the paper tunes; a task's own axes (search.axes) are told beside.
_TUNED = ("optimizer.learning_rate", "optimizer.momentum", "schedule.decay_steps")


def _describe(config: Config) -> dict[str, Any]:
    """The part of a summary that is known before training."""
    return {
        "status": Status.RUNNING,
        "task": config.task.name,
        "echo": {key: getattr(config.echo, key) for key in ("variant", "factor", "shuffle_buffer")},
        "adascale": config.adascale.enabled,
        "hyperparameters": {key: value_at(config, key) for key in sorted({*_TUNED, *config.search.axes})},
        "seed": config.seed,
        "target": {key: getattr(config.target, key) for key in ("metric", "value", "in_a_row")},
        "budgets": {key: getattr(config, key) for key in BUDGETS},
        "to_target": None,
        "best": None,
    }
