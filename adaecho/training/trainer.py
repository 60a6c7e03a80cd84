"""The training loop: step, evaluate, stop, checkpoint."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from adaecho.adascale import AdaScale
from adaecho.config.schema import Config
from adaecho.errors import ConfigError, FolderError
from adaecho.ranks import ALONE, Ranks
from adaecho.records.status import Status
from adaecho.tasks.base import Batch, Task
from adaecho.training import draws
from adaecho.training.device import Clocks, choose_device, choose_precision, measure, place
from adaecho.training.interrupt import Interrupt, WaitEndedError
from adaecho.training.loader import make_loader
from adaecho.training.optimizer import average_of, deal, load_optimizer, make_optimizer, set_rate
from adaecho.training.parallel import MeanLoss, average_statistics, num_passes, share_of, undone
from adaecho.training.progress import Progress, budget_spent, is_at_chance, is_better, meets
from adaecho.training.schedule import Schedule

# Reading the loss waits for the device, so divergence is looked for this often and at every evaluation.
LOSS_CHECK_STEPS = 20

_RANK_SEEDS = 1_000_003  # between the seeds of two ranks, so that no run's seed is another run's rank

_NONE = -1  # in place of a count: a signal ended the wait for a batch

Line = dict[str, Any]


class _Outlook(NamedTuple):
    """What the ranks know together before a step.

    ``fresh_examples``: once the next batches have been taken, by all ranks. ``signal``: a rank's, or 0. The
    rest is rank 0's word.
    """

    fresh_examples: int
    signal: int
    checkpoint_due: float
    is_done: float
    train_time_s: float


class Trainer:
    """One run in memory: everything that a checkpoint holds, and the loop over it.

    On several ranks each has a trainer of its own, and they come to the same decisions: from counts summed
    over ranks, from signals that any of them got, and in what is rank 0's (clocks, budgets of time, pruning,
    when to write a checkpoint) from what rank 0 tells.

    Args:
        config: the run.
        task: its workload.
        record: called with the metrics of each evaluation.
        interrupt: asked between steps: a signal that came ends the loop as ``preempted``.
        checkpoint_due: asked between steps.
        between_steps: called there, with whether a checkpoint is due.
        prune: asked with the fresh examples so far after each evaluation that missed the target; true
            ends the loop as ``pruned``.
        ranks: this process among those that step together.

    Attributes:
        fresh_examples: read for the steps so far, by all ranks.
        signal: number of the one that ended the loop, on whichever rank it came; 0 before.
        best_model: the weights of ``progress.best``, on the CPU; None before the first evaluation.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        *,
        record: Callable[[Line], None] = lambda _: None,
        interrupt: Interrupt | None = None,
        checkpoint_due: Callable[[], bool] = lambda: False,
        between_steps: Callable[["Trainer", bool], None] = lambda *_: None,
        prune: Callable[[int], bool] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config, self.ranks, self._prune = config, ranks, prune
        self._record, self._interrupt = record, interrupt or Interrupt()
        self._checkpoint_due, self._between_steps = checkpoint_due, between_steps
        self.device = choose_device(config)
        self.task = task
        self.precision = choose_precision(config, self.device)
        self.clocks = Clocks()
        self.progress = Progress(next_evaluation=config.evaluate.every_fresh_examples)
        torch.set_num_threads(config.threads)
        draws.seed(config.seed)
        self.model = place(task.build_model(), config, self.device)
        decay = config.optimizer.ema_decay
        self.average = None if decay is None else average_of(self.model, decay)
        self._mean_loss = MeanLoss(task, self.model, ranks, self.device, self.precision)
        self.optimizer = make_optimizer(config, self.model, ranks.world_size)
        self.adascale = self.optimizer if isinstance(self.optimizer, AdaScale) else None
        share, passes = share_of(config, ranks.world_size), num_passes(config)
        self.loader = make_loader(share, task, self.device, ranks)
        self._deal = partial(deal, count=passes, num_examples=share.batch_size)
        if not ranks.is_alone:  # weights are drawn alike, dropout is not
            draws.seed(config.seed + ranks.rank * _RANK_SEEDS)
        if task.weight is None and passes > 1 and not ranks.is_alone:
            raise ConfigError(
                f"adascale.num_gradients_to_accumulate={passes}: task {task.name} tells its weight "
                "only with its loss, and on several ranks it is needed before; use 1"
            )
        self.schedule = Schedule(
            config.schedule, config.optimizer.learning_rate, self._steps_per_epoch(task.epoch_examples)
        )
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._recent_losses = torch.zeros(LOSS_CHECK_STEPS, device=self.device)  # this rank's shares
        self._losses = 0
        self.fresh_examples = 0
        self.signal = 0
        self.best_model: dict[str, torch.Tensor] | None = None

    def train(self) -> Status:
        """Run until a stop rule holds; returns the status that ended it."""
        batches = iter(self.loader)
        self.model.train()
        self.clocks.start()
        try:
            if not self._warm_up():
                return Status.PREEMPTED
            while True:
                # What the next batch costs decides first: an evaluation due at k fresh examples comes after
                # every step that k fresh examples allow, so that no arm loses its last repeats.
                outlook = self._look_ahead()
                if outlook is None:
                    return Status.PREEMPTED
                status = self._before_step(outlook)
                if status is not None:
                    return status
                batch = next(batches)
                self.fresh_examples = outlook.fresh_examples
                self._step(batch)
        finally:
            self.clocks.stop(self.device)

    def _warm_up(self) -> bool:
        """Passes over the coming (micro-)batch, without effect and on no clock: the first one compiles.

        False where a signal ended the wait for that batch, on whichever rank.

        On several ranks gradients are also laid out in the order in which they come, from the first step on:
        DistributedDataParallel with a static graph does so after two passes, and sums of three ranks or more
        depend on it. A run that was interrupted would begin again with the other layout. And its first pass
        must be one that synchronises.
        """
        if self.ranks.is_alone and self.config.compile == "off":
            return True
        batch = None
        with suppress(WaitEndedError), self._interrupt.waiting():
            batch = self.loader.peek()
        known = self.ranks.gather((batch is not None, self._interrupt.signal))
        if batch is None or not all(came for came, _ in known):
            self.signal = next((int(number) for _, number in known if number), 0)
            return False
        with self.clocks.uncounted(self.device), undone(self.model, self.device):
            for _ in range(2):
                self.optimizer.zero_grad(set_to_none=True)
                self._mean_loss.backward(self._deal(batch)[:1])
            self.optimizer.zero_grad(set_to_none=True)
        return True

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside, no thread of the loader's works, and training time stands still."""
        with self.loader.paused(), self.clocks.uncounted(self.device):
            yield

    def _look_ahead(self) -> _Outlook | None:
        """Wait until the next batch lies ready on every rank, and put together what they know.

        None where a signal ended the wait: the batch then counts as not taken.
        """
        try:
            with self._interrupt.waiting():
                mine = self.loader.next_fresh_examples()
        except WaitEndedError:
            mine = _NONE
        known = self.ranks.gather(
            (mine, self._interrupt.signal, self._checkpoint_due(), self._is_done(), self.clocks.peek())
        )
        outlook = _Outlook(
            int(sum(ahead for ahead, *_ in known)),
            next((int(number) for _, number, *_ in known if number), 0),
            *known[0][2:],
        )
        if any(ahead == _NONE for ahead, *_ in known):
            self.signal = outlook.signal
            return None
        return outlook

    def _before_step(self, outlook: _Outlook) -> Status | None:
        """Evaluate if it is due and apply the stop rules; the status that ends the run, or None."""
        every, ahead = self.config.evaluate.every_fresh_examples, outlook.fresh_examples
        if ahead > self.progress.next_evaluation:
            crossed = (ahead - 1) // every * every
            self.progress.next_evaluation = crossed + every
            if self.progress.steps > 0:  # the first batch alone may read past several, filling the buffer
                status = self._evaluate()
                if status is not None:
                    return status
        if self.progress.steps % LOSS_CHECK_STEPS == 0 and self._has_diverged():
            return Status.DIVERGED
        steps = self.progress.steps
        most = self.config.max_fresh_examples
        if steps == 0 and most is not None and ahead > most:
            raise ConfigError(
                f"max_fresh_examples={most}: the first batch of {self.config.batch_size} needs {ahead} fresh "
                f"examples, since echo.shuffle_buffer={self.config.echo.shuffle_buffer} fills first; "
                "allow more, or make the buffer smaller"
            )
        if outlook.is_done or budget_spent(
            self.config, steps=steps, fresh_examples_ahead=ahead, train_time_s=outlook.train_time_s
        ):
            return Status.BUDGET_SPENT
        self._between_steps(self, bool(outlook.checkpoint_due))
        return None

    def _step(self, batch: Batch) -> None:
        set_rate(self.optimizer, self.learning_rate())
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._mean_loss.backward(self._deal(batch))
        if self.config.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm)
        self._update()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self._loss_sum += loss
        self._recent_losses[self.progress.steps % LOSS_CHECK_STEPS] = loss
        self._losses += 1
        self.progress.steps += 1

    def _update(self) -> None:
        if self.adascale is None:
            self.optimizer.step()
            return
        before = self.adascale.scale_invariant_steps
        self.adascale.step()
        advance = self.adascale.scale_invariant_steps - before
        self.progress.fresh_scale_invariant_steps += advance / self.loader.factor

    def _steps_per_epoch(self, examples: int | None) -> float | None:
        """Of the schedule: of base batches, where AdaScale reads it."""
        scale = self.adascale.scale if self.adascale is not None and self._is_scaled else 1.0
        return examples * scale / self.config.batch_size if examples else None

    @property
    def _is_scaled(self) -> bool:
        return self.adascale is not None and self.config.adascale.rule != "measure"

    def learning_rate(self) -> float:
        """The learning rate of the next step, before AdaScale's gain."""
        if self.adascale is not None and self._is_scaled:
            return self.schedule.rate(math.floor(self.adascale.scale_invariant_steps))
        if self.config.schedule.counts == "fresh_examples":
            position = self.fresh_examples / self.config.batch_size
            return self.schedule.rate(position, self.progress.steps)
        return self.schedule.rate(self.progress.steps)

    def _is_done(self) -> bool:
        total_steps = self.config.adascale.total_steps
        return self.adascale is not None and total_steps is not None and self.adascale.done(total_steps)

    def gain(self) -> dict[str, float | None]:
        """AdaScale's gain ratio, what makes it up, tau, and tau in units of fresh batches; empty without.

        Also the gradient noise scale in examples; None where it is not finite.
        """
        if self.adascale is None:
            return {}
        noise = self.adascale.gradient_noise_scale() * self.config.batch_size / self.adascale.scale
        return {
            "gain": self.adascale.gain(),
            "gradient_noise_scale_examples": noise if math.isfinite(noise) else None,
            "gradient_variance": self.adascale.grad_var_avg(),
            "gradient_square": self.adascale.grad_sqr_avg(),
            "scale_invariant_steps": self.adascale.scale_invariant_steps,
            "fresh_scale_invariant_steps": self.progress.fresh_scale_invariant_steps,
        }

    def _has_diverged(self) -> bool:
        """Whether a loss since the last look was not finite or beyond ``max_loss``."""
        return not self.ranks.sum(self._recent_losses).max().item() <= self.config.max_loss

    def _evaluate(self) -> Status | None:
        """Measure the validation split and record it; the status that ends the run, or None to go on."""
        metrics = self.measure("validation")
        if self._has_diverged() or not all(math.isfinite(value) for value in metrics.values()):
            return Status.DIVERGED
        counts: Line = {"fresh_examples": self.fresh_examples, "steps": self.progress.steps}
        others: Line = {
            "train_loss": (self.ranks.sum(self._loss_sum) / max(self._losses, 1)).item(),
            "learning_rate": self.learning_rate(),
            **self.gain(),
            "echo_factor": self.loader.factor,
            **self._factor_changes_since_last_line(),
            "fresh_examples_in_buffer": self.counts()["fresh_examples_in_buffer"],
            **self.times(),
        }
        line = {**counts, **metrics, **others}
        self._loss_sum.zero_()
        self._losses = 0
        self.progress.evaluations += 1
        self._judge(metrics[self.config.target.metric], line)
        self._record(line)
        if self.progress.to_target is not None:
            return Status.REACHED
        direction = self.task.metrics[self.config.target.metric]
        if is_at_chance(self.config, direction, self.progress.best, self.fresh_examples):
            return Status.DIVERGED
        prune = self._prune
        if prune is not None and self.ranks.from_first(lambda: prune(self.fresh_examples)):
            return Status.PRUNED
        return None

    def evaluate_end(self) -> Status:
        """Evaluate where the budget ended, unless the last step was just evaluated; how the run ended.

        It is an evaluation like the others, which may meet the target.
        """
        status = self._evaluate() if self._losses or not self.progress.evaluations else None
        return Status.BUDGET_SPENT if status in (None, Status.PRUNED) else status

    def factor_changes(self) -> list[list[float]]:
        """What ``echo.factor=auto`` changed: the first fresh example (or batch) under it, and the factor."""
        return [list(change) for change in self.loader.factor_changes]

    def _factor_changes_since_last_line(self) -> Line:
        if self.config.echo.factor != "auto":
            return {}
        changes = self.factor_changes()[self.progress.factor_changes :]
        self.progress.factor_changes += len(changes)
        return {"echo_factor_changes": changes}

    def measure(self, split: Any) -> dict[str, float]:
        """Metrics on a whole split, on the evaluation clock, with the loader at rest."""
        with self.loader.paused(), self.clocks.evaluating(self.device):
            average_statistics(self.evaluated, self.ranks)
            metrics = measure(self.task, self.evaluated, split, self.device, self.precision, self.ranks)
            self.model.train()
            return metrics

    def at_end(self) -> dict[str, Any]:
        """What the task adds to the summary of a run that ended by itself, on the evaluation clock."""
        at_end = self.task.at_end
        if at_end is None:
            return {}
        with self.loader.paused(), self.clocks.evaluating(self.device), torch.inference_mode():
            self.evaluated.eval()
            return self.ranks.from_first(lambda: at_end(self.evaluated, self.device))

    def counts(self) -> dict[str, int]:
        """What the loaders of all ranks count."""
        loader = self.loader
        mine = (loader.fresh_examples_in_buffer, loader.reread_examples, len(loader.bad_examples))
        in_buffer, reread, bad = map(int, self.ranks.sums(mine))
        return {
            "fresh_examples_in_buffer": in_buffer,
            "reread_examples": reread,
            "skipped_examples": self.task.skipped_examples + bad,
        }

    def _judge(self, value: float, line: Line) -> None:
        direction = self.task.metrics[self.config.target.metric]
        cost = {key: line[key] for key in ("fresh_examples", "steps", "train_time_s")}
        best = self.progress.best
        if best is None or is_better(direction, value, best["value"]):
            self.progress.best = {"metric": self.config.target.metric, "value": value, **cost}
            self.best_model = self.weights()
        met = meets(direction, value, self.config.target.value)
        self.progress.met_in_a_row = self.progress.met_in_a_row + 1 if met else 0
        if self.progress.met_in_a_row == self.config.target.in_a_row:
            tau = None if self.adascale is None else self.adascale.scale_invariant_steps
            self.progress.to_target = {**cost, "scale_invariant_steps": tau}

    @property
    def evaluated(self) -> nn.Module:
        """The model, or under ``optimizer.ema_decay`` the one that holds the average of its weights."""
        return self.model if self.average is None else self.average.module

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the evaluated model's parameters and buffers on the CPU, each with memory of its own."""
        state = self.evaluated.state_dict()
        return {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in state.items()
        }

    def times(self) -> dict[str, float]:
        """The three clocks."""
        return {
            "train_time_s": self.clocks.train_time_s,
            "eval_time_s": self.clocks.eval_time_s,
            "wait_time_s": self.loader.wait_time_s,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what follows the last step: readable without executing pickled code.

        All ranks call it; each one's own part is under ``ranks``.
        """
        consolidate = getattr(self.optimizer, "consolidate_state_dict", None)
        if consolidate is not None:  # a ZeroRedundancyOptimizer's, also under AdaScale
            consolidate(to=0)
        own = {
            "loader": self.loader.state_dict(),
            "rng": draws.state(self.device),
            "losses": (self._loss_sum.cpu(), self._recent_losses.cpu(), self._losses),
            "buffers": {name: buffer.cpu() for name, buffer in self._buffers().items()},
        }
        return {
            **self._must_match(),
            "model": self.model.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "best_model": self.best_model,
            "optimizer": self.optimizer.state_dict() if self.ranks.is_first else None,
            "progress": asdict(self.progress),
            "fresh_examples": self.fresh_examples,
            "clocks": asdict(self.clocks),
            "ranks": self.ranks.gather_objects(own),
        }

    def _must_match(self) -> dict[str, Any]:
        """What a checkpoint can only be continued with."""
        return {"device": self.device.type, "precision": self.precision, "world_size": self.ranks.world_size}

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The model's, which each rank has its own of, and those of the average."""
        average = {} if self.average is None else dict(self.average.named_buffers(prefix="average"))
        return {**dict(self.model.named_buffers()), **average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``'s result.

        Raises:
            FolderError: it was made on another kind of device, in another precision or on other ranks.
        """
        for key, now in self._must_match().items():
            if state[key] != now:
                raise FolderError(
                    f"the checkpoint was begun with {key}={state[key]}, and here it would go on with {now}; "
                    "continue on the same kind of machine with as many processes, or use fresh=true"
                )
        own = state["ranks"][self.ranks.rank]
        self.model.load_state_dict(state["model"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        for name, buffer in self._buffers().items():
            if name in own["buffers"]:
                buffer.copy_(own["buffers"][name])
        self.best_model = state["best_model"]
        load_optimizer(self.optimizer, state["optimizer"])
        self.loader.load_state_dict(own["loader"])
        self.progress = Progress(**state["progress"])
        self.clocks = Clocks(**state["clocks"])
        loss_sum, recent, self._losses = own["losses"]
        self._loss_sum, self._recent_losses = loss_sum.to(self.device), recent.to(self.device)
        draws.restore(own["rng"], self.device)
        self.fresh_examples = state["fresh_examples"]
