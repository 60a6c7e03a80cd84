"""One run from config to summary, in one folder, from wherever the folder stands."""

import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch

from adaecho.config.identity import BUDGETS, changes
from adaecho.config.launched import was_restarted
from adaecho.config.schema import Config, to_plain, value_at
from adaecho.config.tasks import ENTRY_POINTS, find_task
from adaecho.datasets.fingerprint import fingerprint_of, without_secrets
from adaecho.datasets.storage import storage_errors
from adaecho.errors import ChangedDataError, ConfigError, DiskError, FolderError, UserError, warn, with_notes
from adaecho.masking import presentable
from adaecho.ranks import ALONE, Ranks, explained
from adaecho.records.environment import environment
from adaecho.records.folder import RunFolder
from adaecho.records.lock import FolderInUseError
from adaecho.records.outcome import ADASCALE, untold
from adaecho.records.status import FINISHED, Status
from adaecho.tasks import build_task
from adaecho.tasks.base import HELD_OUT, Split, Task, check_same_meaning
from adaecho.training import checkpoint
from adaecho.training.callbacks import Callbacks
from adaecho.training.device import choose_device
from adaecho.training.interrupt import WAIT_S, Interrupt, WaitEndedError
from adaecho.training.parallel import share_of, what_is_seen
from adaecho.training.progress import is_finished
from adaecho.training.trainer import Line, Trainer

if TYPE_CHECKING:
    from adaecho.training.display import Display  # imports rich, which a sweep's workers never show


def run_trial(
    config: Config,
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    begun: Callable[[], object] = lambda: None,
    display: "Display | None" = None,
    prune: Callable[[int], bool] | None = None,
    check_data: Callable[[dict[str, str]], object] | None = None,
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
        check_data: given the digests of the task's files and code: raises where a sweep has seen others.
        ranks: this process among those that train the run; all call this, and rank 0 alone writes.

    Raises:
        UserError: config, data or folder can't be used as they are.
        Exception: the run crashed; its status is ``failed`` and its traceback is in the folder.
    """
    trial = _Trial(config, RunFolder(folder), display, prune, check_data, ranks)
    with ExitStack() as stack:
        outcome = ranks.from_first(lambda: trial.lock(stack))
        if outcome is None:
            return _run_locked(trial, overrides, begun)
    if isinstance(outcome, FolderInUseError):
        raise outcome  # on all ranks, which can go on with something else
    return outcome


def _run_locked(trial: "_Trial", overrides: Sequence[str], begun: Callable[[], object]) -> dict[str, Any]:
    ranks = trial.ranks
    finished = ranks.from_first(lambda: trial.open(overrides))
    if finished is not None:
        return finished
    if ranks.is_first:
        begun()
    try:
        with storage_errors():
            return trial.run()
    except (Exception, KeyboardInterrupt) as error:
        reason = error if ranks.is_alone else explained(error)
        if isinstance(error, ConfigError):
            error.told_elsewhere = not ranks.is_first  # all ranks have the same config
        if ranks.is_first and not trial.has_ended:
            trial.record_failure(reason)
        if reason is not error:
            raise reason from error
        if isinstance(error, FolderInUseError) and not ranks.is_alone:
            raise FolderError(str(error)) from error  # the other ranks were in the middle of it
        raise


@dataclass
class _Trial:
    """The trainer and the folder that records it.

    Attributes:
        callbacks: on rank 0, once it runs.
        last_checkpoint: when that was, or the run began.
        skipped_told: how many bad examples have been told of.
        has_ended: the outcome is in the folder; what comes after, e.g. the end of threads, can't change it.
    """

    config: Config
    run_folder: RunFolder
    display: "Display | None"
    prune: Callable[[int], bool] | None
    check_data: Callable[[dict[str, str]], object] | None
    ranks: Ranks
    callbacks: Callbacks | None = None
    last_checkpoint: float = field(default_factory=time.monotonic)
    skipped_told: int = 0
    has_ended: bool = False

    def lock(self, stack: ExitStack) -> FolderInUseError | dict[str, Any] | None:
        """Take the folder's lock; the error where another process has it.

        Where nothing can be written and nothing is left to do, the summary.
        """
        run = self.run_folder
        try:
            stack.enter_context(run.lock())
        except FolderInUseError as error:
            return error
        except DiskError:
            recorded, summary = run.read_config(), run.read_summary()
            if self.config.fresh or recorded is None or changes(recorded, to_plain(self.config)):
                raise
            if not is_finished(summary, self.config):
                raise
            return summary
        return None

    def open(self, overrides: Sequence[str]) -> dict[str, Any] | None:
        """Make the locked folder this run's; its summary where nothing is left to do."""
        run, config = self.run_folder, self.config
        # Started again by torchrun after a failure, the command still says fresh=true.
        fresh = config.fresh and not was_restarted()
        run.start(to_plain(config), list(overrides), environment(), fresh=fresh)
        if config.fresh and run.moved_to is not None and self.display is not None:
            self.display.say(f"old run kept in {run.moved_to}")
        summary = run.read_summary()
        return summary if is_finished(summary, config) else None

    def record_failure(self, error: BaseException) -> None:
        """Leave status and traceback in the folder, as far as the disk still allows."""
        status = Status.PREEMPTED if isinstance(error, KeyboardInterrupt) else Status.FAILED
        text = f"{type(error).__name__}: {with_notes(error)}"
        try:
            self.run_folder.write_traceback(traceback.format_exc())
            earlier = self.run_folder.read_summary() or _describe(self.config)
            if earlier.get("status") in FINISHED and isinstance(error, UserError):
                self.run_folder.take_back_config()
                return  # a larger budget was refused before it had begun: what there is stays an outcome
            self.run_folder.write_summary({**earlier, "status": status, "error": text})
        except FolderError:
            if isinstance(error, UserError):  # e.g. the full disk that is being reported already
                return
            raise

    def run(self) -> dict[str, Any]:
        with Interrupt() as interrupt:
            interrupt.is_setting_up = True  # to read the headers of many shards, say, may take minutes
            summary = self._run(interrupt)
        if summary["status"] == Status.PREEMPTED:
            return summary
        late = [int(number) for (number,) in self.ranks.gather([interrupt.signal or 0]) if number]
        return {**summary, "signal": signal.Signals(late[0]).name} if late else summary

    def _run(self, interrupt: Interrupt) -> dict[str, Any]:
        if self.ranks.is_first:
            self.callbacks = Callbacks(self.config, self.run_folder.path, choose_device(self.config))
        task = build_task(share_of(self.config, self.ranks.world_size))
        files = fingerprint_of(task.files)
        task = replace(task, fingerprint={**without_secrets(task.fingerprint), **files})
        if not self.ranks.is_alone:
            self.ranks.check_same(what_is_seen(self.config, task))
        if self.check_data is not None and self.ranks.is_first:
            self.check_data(files | self._own_code() | self._documents(task))
        trainer = Trainer(
            self.config,
            task,
            record=lambda line: self.record(line, trainer),
            interrupted=lambda: interrupt.signal or 0,
            checkpoint_due=self.checkpoint_due,
            between_steps=self.between_steps,
            prune=self.prune,
            ranks=self.ranks,
        )
        interrupt.is_waiting = lambda: trainer.is_waiting
        interrupt.is_setting_up = False
        wait_s: float | None = None
        try:
            summary = self._train(trainer)
            wait_s = WAIT_S if interrupt() else None
        except KeyboardInterrupt:
            wait_s = 0.0
            raise
        finally:
            trainer.loader.close(wait_s)
        return summary

    def _own_code(self) -> dict[str, str]:
        """The digest of a task that is none of ours, by its name, wherever it lies."""
        name = self.config.task.name
        module = find_task(name, [name])
        if module.__file__ is None or module.__name__.startswith(f"{ENTRY_POINTS}."):
            return {}
        return {f"the code of {name}": digest for digest in fingerprint_of([module.__file__]).values()}

    def _documents(self, task: Task) -> dict[str, str]:
        """The digest of text that was tokenized once; others of a task follow from its options, too."""
        found, path = task.fingerprint.get("data sha256"), presentable(self.config.data.path)
        return {} if found is None else {f"the text of {path}": found}

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
            with self._measuring(trainer, "validation"):
                status = trainer.evaluate_end()
        summary = self._summary(trainer, status)
        if status == Status.PREEMPTED and trainer.signal:
            summary["signal"] = signal.Signals(trainer.signal).name
        if status == Status.BUDGET_SPENT:
            last = self.ranks.from_first(lambda: self.run_folder.read_metrics()[-1])
            summary["final"] = {name: last[name] for name in trainer.task.metrics}
        if status in (Status.REACHED, Status.BUDGET_SPENT) and trainer.task.has_test_split:
            with self._measuring(trainer, "test"):
                summary["test"] = trainer.measure("test")
        if status in (Status.REACHED, Status.BUDGET_SPENT):
            self._add_at_end(summary, trainer)
            summary["model"] = self.ranks.from_first(lambda: self._keep_model(trainer))
        summary["eval_time_s"] = trainer.clocks.eval_time_s
        if self.callbacks and status != Status.PREEMPTED:
            self.callbacks.on_end(summary)  # before the folder says so: a kill in it doesn't lose it
        self._write_summary(summary)
        self.has_ended = True
        return self.ranks.from_first(lambda: summary)

    def _add_at_end(self, summary: dict[str, Any], trainer: Trainer) -> None:
        """Add what the task has to tell of its end, but nothing in the place of what a run's records tell."""
        found = trainer.at_end()
        taken = sorted(found.keys() & {*summary, *_OURS})
        if taken and self.ranks.is_first:
            names = ", ".join(taken)
            warn(f"task {trainer.task.name}: at_end returns {names}, which a summary tells itself: left out")
        summary |= {key: value for key, value in found.items() if key not in taken}

    def _measuring(self, trainer: Trainer, split: Split) -> AbstractContextManager[object]:
        """What is measured inside may take as long as all the training: the display says what goes on."""
        if self.display is None:
            return nullcontext()
        number, spent_s = trainer.progress.evaluations, trainer.clocks.eval_time_s
        return self.display.evaluating(split, spent_s / number if number else None)

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
        """Continue from the last checkpoint that is whole and fits the folder's metrics, else begin."""
        path = self._load_newest(trainer) if self.ranks.is_first else None
        if self.ranks.is_alone:
            return
        # The folder may lie where the other hosts can't read.
        content = self.ranks.from_first(lambda: None if path is None else path.read_bytes())
        if content is not None and not self.ranks.is_first:
            trainer.load_state_dict(checkpoint.unpacked(content))

    def _load_newest(self, trainer: Trainer) -> Path | None:
        """Load the last good checkpoint into the trainer; which that was, None where the run begins."""
        refused: dict[Path, FolderError] = {}
        for path in self.run_folder.checkpoints():
            try:
                self._continue_from(path, trainer)
            except (ChangedDataError, DiskError):  # nothing is wrong with the checkpoint
                raise
            except FolderError as error:
                refused[path] = error
                continue
            for bad, reason in refused.items():
                warn(f"{reason}; continuing from {path.name}")
                if bad.exists():
                    self.run_folder.set_aside(bad)
            return path
        if refused or self._has_lost_its_checkpoint():
            reasons = "".join(f"\n  {reason}" for reason in refused.values()) or " it is gone"
            raise FolderError(
                f"{self.run_folder.path}: no checkpoint can be continued from:{reasons}\nPut a good "
                "copy back, or start anew with fresh=true (the old folder is kept beside the new one)"
            )
        self.run_folder.truncate_metrics(0)
        return None

    def _continue_from(self, path: Path, trainer: Trainer) -> None:
        state = checkpoint.load(self.run_folder, path)
        for key, now in (("device", trainer.device.type), ("precision", trainer.precision)):
            if state.get(key, now) != now:
                raise FolderError(
                    f"{path}: begun with {key}={state[key]}, here it would go on with {now}; continue on the "
                    f"same kind of machine or set {key}={state[key]}"
                )
        if "ranks" not in state:
            raise FolderError(
                f"{path}: written by an earlier version of adaecho, which this one can't continue"
            )
        number = len(state["ranks"])
        if number != self.ranks.world_size:
            how = "without torchrun" if number == 1 else f"with torchrun and {number} processes in all"
            raise FolderError(
                f"{path}: begun on {number} rank{'s' if number > 1 else ''}, and here there are "
                f"{self.ranks.world_size}: each one's place in its share of the data would be lost; "
                f"continue {how}"
            )
        self._check_data(state.get("fingerprint", {}), state.get("facts", {}), trainer.task)
        try:
            trainer.load_state_dict(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FolderError(
                f"{path}: not a checkpoint of this run ({str(error).splitlines()[0]})"
            ) from error
        self.run_folder.truncate_metrics(trainer.progress.evaluations)

    def _has_lost_its_checkpoint(self) -> bool:
        """Whether the summary tells of steps: it is written after the checkpoint that holds them."""
        summary = self.run_folder.read_summary()
        return summary is not None and summary.get("steps", 0) > 0

    def _check_data(self, then: dict[str, str], facts: dict[str, Any], task: Task) -> None:
        now, path = task.fingerprint, self.config.data.path  # of text the digest is of all documents together
        here = f"here, in {presentable(path)}," if path else "here"
        for name in {**then, **now}:
            if then.get(name) == now.get(name):
                continue
            changed = (
                f"{self.run_folder.path}: its checkpoint was trained with {name} "
                f"({then.get(name, 'without it')}), and {here} it is {now.get(name, 'gone')}"
            )
            if not self.config.data.allow_changed:
                raise ChangedDataError(
                    f"{changed}; put back what was there, or start anew with fresh=true, or go on with "
                    "what is here by data.allow_changed=true"
                )
            warn(f"{changed}; data.allow_changed=true goes on")
        check_same_meaning(facts, task.facts)
        if facts.get(HELD_OUT) not in (None, task.facts.get(HELD_OUT)):
            warn(
                f"{self.run_folder.path}: other examples are held out now than before, and may have been "
                "trained on: what is measured from here on is no measure of new examples"
            )

    def checkpoint_due(self) -> bool:
        return time.monotonic() - self.last_checkpoint >= self.config.checkpoint_every_s

    def between_steps(self, trainer: Trainer, checkpoint_due: bool) -> None:
        self._tell_skipped(trainer)
        if self.display is not None:
            self.display.step(trainer)
        if checkpoint_due:
            self._checkpoint_at_rest(trainer)

    def _tell_skipped(self, trainer: Trainer) -> None:
        """Say on stderr which examples the loader has skipped since it was last asked."""
        skipped = trainer.loader.bad_examples
        for bad in skipped[self.skipped_told :]:
            warn(f"bad example skipped: {bad['origin']}: {bad['error']}")
        self.skipped_told = len(skipped)

    def _checkpoint_at_rest(self, trainer: Trainer) -> None:
        """Unless a signal ends the wait for rest, on whichever rank: then the run is about to end."""
        with ExitStack() as stack:
            is_at_rest = False
            with suppress(WaitEndedError):
                stack.enter_context(trainer.at_rest())
                is_at_rest = True
            stack.enter_context(trainer.clocks.uncounted(trainer.device))
            if all(flag for (flag,) in self.ranks.gather([is_at_rest])):
                self._checkpoint(trainer)
                self._write_summary(self._summary(trainer, Status.RUNNING))

    def _checkpoint(self, trainer: Trainer) -> None:
        state = trainer.state_dict()
        if state is not None:
            checkpoint.save(self.run_folder, {**state, "facts": trainer.task.facts})
        self.last_checkpoint = time.monotonic()

    def record(self, line: Line, trainer: Trainer) -> None:
        if self.ranks.is_first:
            self.run_folder.append_metrics(line)
        if self.display is not None:
            self.display.evaluated(line)
        if self.callbacks:
            with trainer.at_rest(), trainer.clocks.uncounted(trainer.device):
                self.callbacks.on_evaluation(line)

    def _summary(self, trainer: Trainer, status: str) -> dict[str, Any]:
        loader, progress = trainer.loader, trainer.progress
        return {
            **_describe(self.config),
            **({"data": trainer.task.facts} if trainer.task.facts else {}),
            "status": status,
            "device": trainer.device.type,
            "precision": trainer.precision,
            "to_target": progress.to_target,
            "best": progress.best,
            **untold(self.config.target.metric, trainer.task.metrics[self.config.target.metric]),
            **({} if self.ranks.is_alone else {"ranks": self.ranks.world_size}),
            **trainer.gain(),
            "fresh_examples": trainer.fresh_examples,
            "steps": progress.steps,
            **trainer.counts(),
            **(
                {"echo_factor_changes": trainer.factor_changes()} if self.config.echo.factor == "auto" else {}
            ),
            **trainer.times(),
            "upstream_s_per_batch": loader.upstream_s_per_batch,
            "downstream_s_per_step": loader.downstream_s_per_step,
            "R": loader.R,
        }


# What only some summaries hold.
_OURS = (
    "final",
    "test",
    "signal",
    "model",
    "ranks",
    "data",
    "target_direction",
    "echo_factor_changes",
    *ADASCALE,
)
# What the paper tunes; a task's own axes (search.axes) are told beside.
_TUNED = ("optimizer.learning_rate", "optimizer.momentum", "schedule.decay_steps")


def _describe(config: Config) -> dict[str, Any]:
    """The part of a summary that is known before training."""
    return {
        "status": Status.RUNNING,
        "task": config.task.name,
        "echo": {
            "variant": config.echo.variant,
            "factor": config.echo.factor,
            "shuffle_buffer": config.echo.shuffle_buffer,
        },
        "adascale": config.adascale.enabled,
        "hyperparameters": {key: value_at(config, key) for key in sorted({*_TUNED, *config.search.axes})},
        "seed": config.seed,
        "target": {
            "metric": config.target.metric,
            "value": config.target.value,
            "in_a_row": config.target.in_a_row,
        },
        "budgets": {key: getattr(config, key) for key in BUDGETS},
        "to_target": None,
        "best": None,
    }
