"""Train one run in its run folder, from config to summary. An interrupted run is resumed."""

import hashlib
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from adaecho.config.identity import BUDGETS, changes
from adaecho.config.launch_env import was_restarted
from adaecho.config.schema import Config, to_plain, value_at
from adaecho.datasets.storage import storage_errors
from adaecho.errors import FolderError, print_line, redact_urls, warn, with_notes
from adaecho.ranks import SINGLE_PROCESS, DistributedContext, explained
from adaecho.records.environment import environment
from adaecho.records.folder import FolderInUseError, RunFolder
from adaecho.records.outcome import usual_direction
from adaecho.records.trials import FINISHED, Status
from adaecho.tasks import build_task
from adaecho.training import checkpoint
from adaecho.training.callbacks import Callbacks
from adaecho.training.distributed import share_of
from adaecho.training.progress import ProgressLog, is_finished
from adaecho.training.signals import Interrupt
from adaecho.training.trainer import Trainer


def run_trial(
    config: Config,
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    begun: Callable[[], object] = lambda: None,
    log: ProgressLog | None = None,
    prune: Callable[[int], bool] | None = None,
    ranks: DistributedContext = SINGLE_PROCESS,
) -> dict[str, Any]:
    """Train or resume the run in ``folder``, and return its summary.

    A finished or diverged run is not trained again. A signal ends the run with a checkpoint and the status
    ``preempted``, and the next call resumes from the checkpoint.

    Args:
        config: a validated config.
        overrides: the overrides on the command line, which are recorded.
        begun: a callback for rank 0, called once the folder is locked, unless the run is finished.
        prune: a callback that decides whether to stop the run early; see ``Trainer``.
        ranks: connects the ranks of the run. All ranks call this function, but only rank 0 writes.

    Raises:
        UserError: the config, the data or the folder cannot be used.
        Exception: the run crashed. Its status is then ``failed``, and the folder contains the traceback.
    """
    trial = _Trial(config, RunFolder(folder), log, prune, ranks)
    with ExitStack() as stack:
        found = ranks.from_first(lambda: trial.open(stack, overrides))
        if isinstance(found, FolderInUseError):
            raise found  # on all ranks, so that a worker of a search can train another trial
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
            if reason is not error:
                raise reason from error
            raise


@dataclass
class _Trial:
    """One run: its folder, its callbacks and its trainer."""

    config: Config
    run_folder: RunFolder
    log: ProgressLog | None
    prune: Callable[[int], bool] | None
    ranks: DistributedContext
    callbacks: Callbacks | None = None
    num_warned: int = 0

    def open(self, stack: ExitStack, overrides: Sequence[str]) -> FolderInUseError | dict[str, Any] | None:
        """Lock the folder for training, or return the summary of a finished run."""
        # Only rank 0 calls this method. The result is None if the run must now be trained.
        run, config, plain = self.run_folder, self.config, to_plain(self.config)
        # If a rank fails, torchrun starts the same command again, which must then resume the run instead of
        # starting a new one.
        fresh = config.restart and not was_restarted()
        summary, recorded = run.read_summary(), run.read_config()
        if summary and recorded and not fresh and is_finished(summary, config):
            # The run may have been continued with a larger budget since its config was recorded.
            recorded |= summary.get("budgets", {})
            if not changes(recorded, plain):
                return summary
        try:
            stack.enter_context(run.lock())
        except FolderInUseError as error:
            return error  # returned, not raised, so that from_first sends it to all ranks
        run.start(plain, overrides, environment(), restart=fresh)
        if run.moved_to is not None and self.log is not None:
            print_line(f"the old run is now in {run.moved_to}")
        return None

    def record_failure(self, error: BaseException) -> None:
        """Record the status and the traceback of a run that failed, if the disk allows it."""
        status = Status.PREEMPTED if isinstance(error, KeyboardInterrupt) else Status.FAILED
        with suppress(FolderError):
            self.run_folder.write_traceback(traceback.format_exc())
            earlier = self.run_folder.read_summary() or _describe(self.config)
            if earlier["status"] not in FINISHED:
                text = redact_urls(f"{type(error).__name__}: {with_notes(error)}")
                self.run_folder.write_summary({**earlier, "status": status, "error": text})

    def run(self, interrupt: Interrupt) -> dict[str, Any]:
        """Build the task, train, record the outcome, and return the summary."""
        with interrupt.waiting():  # a signal may end this at once, because loading data may take minutes
            if self.ranks.is_first and self.config.callbacks:
                self.callbacks = Callbacks(self.config, self.run_folder.path)
            task = build_task(share_of(self.config, self.ranks.world_size))
            config = hashlib.sha256(repr(to_plain(self.config)).encode()).hexdigest()[:12]
            examples = str(task.epoch_examples)
            self.ranks.check_same({"config": config, "number of examples": examples, **task.fingerprint})
            hooks: dict[str, Any] = {
                "record": self._record,
                "between_steps": self._between_steps,
                "prune": self.prune,
            }
            self.trainer = Trainer(self.config, task, interrupt=interrupt, ranks=self.ranks, **hooks)
        try:
            summary = self._train()
        finally:
            self.trainer.loader.close()
        late = [int(number) for (number,) in self.ranks.gather([interrupt.signal]) if number]
        return {**summary, "signal": signal.Signals(late[0]).name} if late else summary

    def _train(self) -> dict[str, Any]:
        trainer = self.trainer
        self._resume()
        self._write_summary(self._summary(Status.RUNNING))
        if self.log is not None:
            self.log.begin(trainer.progress.steps, sum(trainer.loader.settings.to_fill.values()))
        status = trainer.train()
        self._warn_of_skipped()
        if status in (Status.PREEMPTED, Status.BUDGET_SPENT):
            # Write the checkpoint before the last evaluation, because a run that is continued with a larger
            # budget must not contain that evaluation.
            self._checkpoint()
        if status == Status.BUDGET_SPENT:
            status = trainer.evaluate_end()
        summary = self._summary(status)
        if status == Status.PREEMPTED:
            summary["signal"] = signal.Signals(trainer.signal).name
        if status == Status.BUDGET_SPENT:
            last = self.ranks.from_first(lambda: self.run_folder.read_metrics()[-1])
            summary["final"] = {name: last[name] for name in trainer.task.metrics}
        if status in (Status.REACHED, Status.BUDGET_SPENT):
            if trainer.task.has_test_split:
                summary["test"] = trainer.measure("test")
            summary = {**trainer.at_end(), **summary}  # the summary's own fields take precedence
            summary["model"] = self.ranks.from_first(self._save_model)
        summary["eval_time_s"] = trainer.clocks.eval_time_s
        if self.callbacks and status != Status.PREEMPTED:
            # Call on_end before writing the summary, so that the call is repeated if the run is killed
            # during it.
            self.callbacks.on_end(summary)
        self._write_summary(summary)
        return self.ranks.from_first(lambda: summary)

    def _write_summary(self, summary: dict[str, Any]) -> None:
        if self.ranks.is_first:
            self.run_folder.write_summary(summary)

    def _save_model(self) -> dict[str, str]:
        """Write the final weights and the best weights, and return their paths in the run folder."""
        trainer, best = self.trainer, self.trainer.progress.best or {}
        assert trainer.best_model is not None  # a run that reached its target or budget has been evaluated
        steps = {"final": trainer.progress.steps, "best": best["steps"]}
        paths = {name: f"model/{name}.safetensors" for name in steps}
        for name, weights in {"final": trainer.weights(), "best": trainer.best_model}.items():
            data = safetensors.torch.save(weights, {"steps": str(steps[name])})
            self.run_folder.write(self.run_folder.path / paths[name], data)
        return paths

    def _resume(self) -> None:
        """Load the checkpoint, if there is one, and remove metrics that were recorded after it."""
        state = self.ranks.from_first(lambda: checkpoint.load(self.run_folder))
        if state is not None:
            try:
                self.trainer.load_state_dict(state)
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise FolderError(
                    f"{self.run_folder.checkpoint}: not a checkpoint of this run "
                    f"({str(error).splitlines()[0]}); restore a copy, or start over with restart=true"
                ) from error
        if self.ranks.is_first:
            self.run_folder.truncate_metrics(self.trainer.progress.evaluations)

    def _between_steps(self, checkpoint_due: bool) -> None:
        trainer, progress = self.trainer, self.trainer.progress
        self._warn_of_skipped()
        if self.log is not None:
            self.log.step(progress.steps, progress.fresh_examples)
        if checkpoint_due:
            with trainer.at_rest():
                self._checkpoint()
                self._write_summary(self._summary(Status.RUNNING))

    def _warn_of_skipped(self) -> None:
        """Print a warning for each bad example that was skipped since the last call."""
        skipped = self.trainer.loader.bad_examples
        for bad in skipped[self.num_warned :]:
            warn(f"bad example skipped: {bad['origin']}: {bad['error']}")
        self.num_warned = len(skipped)

    def _checkpoint(self) -> None:
        state = self.trainer.state_dict()
        if self.ranks.is_first:
            checkpoint.save(self.run_folder, state)
        self.trainer.last_checkpoint_s = time.monotonic()

    def _record(self, line: dict[str, Any]) -> None:
        if self.ranks.is_first:
            self.run_folder.append_metrics(line)
        if self.log is not None:
            self.log.evaluated(line)
        if self.callbacks:
            with self.trainer.at_rest():
                self.callbacks.on_evaluation(line)

    def _summary(self, status: str) -> dict[str, Any]:
        trainer, metric = self.trainer, self.config.target.metric
        loader, progress = trainer.loader, trainer.progress
        direction = trainer.task.metrics[metric]
        changes = {"echo_factor_changes": [list(change) for change in loader.factor_changes]}
        return {
            **_describe(self.config),
            **({"data": trainer.task.facts} if trainer.task.facts else {}),
            "status": status,
            "device": trainer.device.type,
            "precision": trainer.precision,
            "to_target": progress.to_target,
            "best": progress.best,
            **({} if direction == usual_direction(metric) else {"target_direction": direction}),
            **({} if self.ranks.is_alone else {"ranks": self.ranks.world_size}),
            **trainer.gain(),
            "fresh_examples": progress.fresh_examples,
            "steps": progress.steps,
            **trainer.counts(),
            **(changes if self.config.echo.factor == "auto" else {}),
            **trainer.times(),
            "upstream_s_per_batch": loader.upstream_s_per_batch,
            "downstream_s_per_step": loader.downstream_s_per_step,
            "R": loader.R,
        }


# Every summary records the hyperparameters that the paper tunes, and those in search.axes.
_TUNED = ("optimizer.learning_rate", "optimizer.momentum", "schedule.decay_steps")


def _describe(config: Config) -> dict[str, Any]:
    """Return the part of a run's summary that is known before training."""
    target = config.target
    return {
        "status": Status.RUNNING,
        "task": config.task.name,
        "echo": {key: getattr(config.echo, key) for key in ("variant", "factor", "shuffle_buffer")},
        "adascale": config.adascale.enabled,
        "hyperparameters": {key: value_at(config, key) for key in sorted({*_TUNED, *config.search.axes})},
        "seed": config.seed,
        "target": {"metric": target.metric, "value": target.value, "in_a_row": target.consecutive},
        "budgets": {key: getattr(config, key) for key in BUDGETS},
        "to_target": None,
        "best": None,
    }
