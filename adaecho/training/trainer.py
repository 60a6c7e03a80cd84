"""The training loop of a run: train, evaluate, decide when to stop, and resume from checkpoints."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

from adaecho.adascale import AdaScale
from adaecho.config.schema import Config
from adaecho.errors import ConfigError, FolderError
from adaecho.ranks import SINGLE_PROCESS, DistributedContext
from adaecho.records.trials import Status
from adaecho.tasks.base import Batch, Task
from adaecho.training.checkpoint import restore_rng, rng_state, seed_generators
from adaecho.training.device import Clocks, choose_device, choose_precision, measure, place
from adaecho.training.distributed import MeanLoss, average_statistics, num_passes, share_of
from adaecho.training.loader import make_loader
from adaecho.training.optimizer import average_of, load_optimizer, make_optimizer, set_rate, split_batch
from adaecho.training.progress import Progress, budget_spent, is_at_chance, is_better, meets
from adaecho.training.schedule import Schedule
from adaecho.training.signals import Interrupt, WaitEndedError

# Divergence is checked after this many steps and at every evaluation. It is not checked at each step, because
# reading the loss waits for the device.
LOSS_CHECK_STEPS = 20


class Trainer:
    """The training loop of one rank (process), with all the state that a checkpoint contains."""

    def __init__(
        self,
        config: Config,
        task: Task,
        *,
        record: Callable[[dict[str, Any]], None] = lambda _: None,  # called with each evaluation's metrics
        # called before each step, with True if a checkpoint is due
        between_steps: Callable[[bool], None] = lambda _: None,
        interrupt: Interrupt | None = None,  # records signals; after a signal, the loop ends as "preempted"
        # called after each evaluation that missed the target, with the number of fresh examples; if it
        # returns True, the loop ends as "pruned"
        prune: Callable[[int], bool] | None = None,
        ranks: DistributedContext = SINGLE_PROCESS,
    ) -> None:
        self.config, self.task, self.ranks, self._prune = config, task, ranks, prune
        self._record, self._between_steps, self._interrupt = record, between_steps, interrupt or Interrupt()
        self.device = choose_device(config)
        self.precision = choose_precision(config, self.device)
        self.clocks = Clocks()
        self.progress = Progress(next_evaluation=config.evaluate.every_fresh_examples)
        torch.set_num_threads(config.threads)
        seed_generators(config.seed)
        self.model = place(task.build_model(), config, self.device)
        decay = config.optimizer.ema_decay
        self.average = None if decay is None else average_of(self.model, decay)
        self._mean_loss = MeanLoss(task, self.model, ranks, self.device, self.precision)
        self.optimizer = make_optimizer(config, self.model, ranks.world_size)
        self.adascale = self.optimizer if isinstance(self.optimizer, AdaScale) else None
        share, passes = share_of(config, ranks.world_size), num_passes(config)
        self.loader = make_loader(share, task, self.device, ranks)
        self._split = partial(split_batch, count=passes, num_examples=share.batch_size)
        # Up to here, all ranks use the same seed, so that they start with equal weights. From here on, their
        # random numbers must differ, for example in dropout.
        if not ranks.is_alone:
            seed_generators(config.seed + ranks.rank * 1_000_003)
        if task.weight is None and passes > 1 and not ranks.is_alone:
            raise ConfigError(
                f"adascale.num_gradients_to_accumulate={passes}: several ranks need Task.weight, which task "
                f"{task.name} does not have; use 1, or add it"
            )
        self._is_scaled = self.adascale is not None and config.adascale.rule != "measure"
        # If AdaScale drives the schedule, the length of an epoch is counted in base batches.
        scale = self.adascale.scale if self.adascale is not None and self._is_scaled else 1.0
        epoch = task.epoch_examples and task.epoch_examples * scale / config.batch_size
        self.schedule = Schedule(config.schedule, config.optimizer.learning_rate, epoch or None)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._recent_losses = torch.zeros(LOSS_CHECK_STEPS, device=self.device)  # this rank's shares
        self._losses = 0
        self.signal = 0  # number of the signal that ended the loop, on any rank; 0 if none did
        # the weights at the best evaluation, on the CPU; None before the first evaluation
        self.best_model: dict[str, torch.Tensor] | None = None
        self.last_checkpoint_s = time.monotonic()  # time of the last checkpoint, or of the start

    def train(self) -> Status:
        """Train until a stopping rule applies, and return the final status."""
        batches = iter(self.loader)
        needs_warm_up = self.config.compile != "off" or not self.ranks.is_alone
        self.model.train()
        self.clocks.start()
        try:
            while True:
                # An evaluation at k fresh examples must come after all steps that use only these examples,
                # including their last repeats. So decide before taking the next batch, based on the number
                # of fresh examples after it.
                agreed = self._agree()
                if agreed is None:
                    return Status.PREEMPTED
                status = self._before_step(*agreed)
                if status is not None:
                    return status
                ahead = agreed[0]
                batch = next(batches)
                self.progress.fresh_examples = ahead
                if needs_warm_up:
                    self._warm_up(batch)
                    needs_warm_up = False
                self._step(batch)
        finally:
            self.clocks.stop(self.device)

    def _warm_up(self, batch: Batch) -> None:
        """Run two forward and backward passes that have no effect on the run and are not timed."""
        # After two passes, a static DistributedDataParallel sums gradients in a different order. The warm-up
        # gives a resumed run the same order as an uninterrupted run.
        rng, model = rng_state(self.device), self.model
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with self.clocks.uncounted(self.device):
            for _ in range(2):
                self.optimizer.zero_grad(set_to_none=True)
                # Use a single micro-batch, because the first pass must synchronize gradients over ranks.
                self._mean_loss.backward(self._split(batch)[:1])
            restore_rng(rng, self.device)
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Pause the loader's threads and the training clock while the ``with`` block runs."""
        with self.loader.paused(), self.clocks.uncounted(self.device):
            yield

    # All ranks must make the same decisions, so decisions use only values that all ranks share.
    def _agree(self) -> tuple[int, float, float] | None:
        """Wait until every rank has its next batch, and exchange the values that decide how to proceed.

        Returns:
            The number of fresh examples that all ranks together will have used after the next batch, whether
            a checkpoint is due, and the training time so far in seconds. None if a signal ended the wait.
        """
        try:
            with self._interrupt.waiting():
                mine = self.loader.next_fresh_examples()
        except WaitEndedError:
            mine = -1  # after a resume, the loader delivers the same batch again
        checkpoint_due = time.monotonic() - self.last_checkpoint_s >= self.config.checkpoint_every_s
        known = self.ranks.gather((mine, self._interrupt.signal, checkpoint_due, self.clocks.peek()))
        if any(ahead < 0 for ahead, *_ in known):
            self.signal = next((int(number) for _, number, *_ in known if number), 0)
            return None
        return int(sum(ahead for ahead, *_ in known)), known[0][2], known[0][3]

    def _before_step(self, ahead: int, checkpoint_due: float, train_time_s: float) -> Status | None:
        """Evaluate the model if that is due, and return the final status if the run must stop."""
        # ahead is the number of fresh examples after the next batch, summed over ranks.
        every, steps = self.config.evaluate.every_fresh_examples, self.progress.steps
        if ahead > self.progress.next_evaluation:
            self.progress.next_evaluation = ((ahead - 1) // every + 1) * every
            # Filling the buffer for the first batch may pass several multiples before any step is taken.
            if steps > 0:
                status = self._evaluate()
                if status is not None:
                    return status
        if steps % LOSS_CHECK_STEPS == 0 and self._has_diverged():
            return Status.DIVERGED
        budget = self.config.max_fresh_examples
        if steps == 0 and budget is not None and ahead > budget:
            raise ConfigError(
                f"max_fresh_examples={budget}: the first batch needs {ahead} fresh examples, "
                f"because it fills echo.shuffle_buffer={self.config.echo.shuffle_buffer}; raise "
                "max_fresh_examples, or reduce the buffer"
            )
        total, adascale = self.config.adascale.total_steps, self.adascale
        is_done = adascale is not None and total is not None and adascale.done(total)
        if is_done or budget_spent(self.config, steps, ahead, train_time_s):
            return Status.BUDGET_SPENT
        self._between_steps(bool(checkpoint_due))
        return None

    def _step(self, batch: Batch) -> None:
        set_rate(self.optimizer, self.learning_rate())
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._mean_loss.backward(self._split(batch))
        if self.config.optimizer.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
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

    def learning_rate(self) -> float:
        """Return the learning rate of the next step, before AdaScale changes it."""
        if self.adascale is not None and self._is_scaled:
            return self.schedule.rate(math.floor(self.adascale.scale_invariant_steps))
        if self.config.schedule.unit == "fresh_examples":
            return self.schedule.rate(
                self.progress.fresh_examples / self.config.batch_size, self.progress.steps
            )
        return self.schedule.rate(self.progress.steps)

    def gain(self) -> dict[str, float | None]:
        """Return AdaScale's current values for the records, or an empty dict without AdaScale."""
        if self.adascale is None:
            return {}
        noise = self.adascale.gradient_noise_scale() * self.config.batch_size / self.adascale.scale
        return {
            "gain": self.adascale.gain(),
            "gradient_noise_scale_examples": noise if math.isfinite(noise) else None,  # in examples
            "gradient_variance": self.adascale.grad_var_avg(),
            "gradient_square": self.adascale.grad_sqr_avg(),
            "scale_invariant_steps": self.adascale.scale_invariant_steps,  # tau, the sum of all gains
            # the same sum, but with each step's gain divided by its echoing factor
            "fresh_scale_invariant_steps": self.progress.fresh_scale_invariant_steps,
        }

    def _has_diverged(self) -> bool:
        """Return whether a recent loss was not finite or exceeded ``max_loss``."""
        return not self.ranks.sum(self._recent_losses).max().item() <= self.config.max_loss

    def _evaluate(self) -> Status | None:
        """Evaluate and record the metrics. Return the final status if the run must stop, otherwise None."""
        metrics = self.measure("validation")
        if self._has_diverged() or not all(math.isfinite(value) for value in metrics.values()):
            return Status.DIVERGED
        changes = self.loader.factor_changes[self.progress.factor_changes :]
        self.progress.factor_changes += len(changes)
        counts = {"fresh_examples": self.progress.fresh_examples, "steps": self.progress.steps}
        others = {
            "train_loss": (self.ranks.sum(self._loss_sum) / max(self._losses, 1)).item(),
            "learning_rate": self.learning_rate(),
            **self.gain(),
            "echo_factor": self.loader.factor,
            **({"echo_factor_changes": changes} if self.config.echo.factor == "auto" else {}),
            "fresh_examples_in_buffer": self.counts()["fresh_examples_in_buffer"],
            **self.times(),
        }
        if clash := sorted(metrics.keys() & {**counts, **others}):
            raise ConfigError(f"task {self.task.name}: evaluate returned {clash[0]}, a reserved name")
        line = {**counts, **metrics, **others}
        self._loss_sum.zero_()
        self._losses = 0
        self.progress.evaluations += 1
        self._judge(metrics[self.config.target.metric], line)
        self._record(line)
        if self.progress.to_target is not None:
            return Status.REACHED
        direction = self.task.metrics[self.config.target.metric]
        if is_at_chance(self.config, direction, self.progress.best, self.progress.fresh_examples):
            return Status.DIVERGED
        prune = self._prune
        if prune is not None and self.ranks.from_first(lambda: prune(self.progress.fresh_examples)):
            return Status.PRUNED
        return None

    def evaluate_end(self) -> Status:
        """Evaluate at the end of the budget, unless that was just done, and return the final status."""
        status = self._evaluate() if self._losses or not self.progress.evaluations else None
        return Status.BUDGET_SPENT if status in (None, Status.PRUNED) else status

    def measure(self, split: Any) -> dict[str, float]:
        """Measure the metrics on a whole split, while the loader is paused."""
        with self.loader.paused(), self.clocks.evaluating(self.device):
            average_statistics(self.evaluated, self.ranks)
            metrics = measure(self.task, self.evaluated, split, self.device, self.precision, self.ranks)
            self.model.train()
            return metrics

    def at_end(self) -> dict[str, Any]:
        """Return the fields that the task adds to a finished run's summary, such as generated text."""
        at_end = self.task.at_end
        if at_end is None:
            return {}
        with self.loader.paused(), self.clocks.evaluating(self.device), torch.inference_mode():
            self.evaluated.eval()
            return self.ranks.from_first(lambda: at_end(self.evaluated, self.device))

    def counts(self) -> dict[str, int]:
        """Return the loaders' counters, summed over all ranks, by their names in the records."""
        loader = self.loader
        mine = (loader.fresh_examples_in_buffer, loader.reread_examples, len(loader.bad_examples))
        in_buffer, reread, bad = map(int, self.ranks.sums(mine))
        return {
            "fresh_examples_in_buffer": in_buffer,
            "reread_examples": reread,
            "skipped_examples": self.task.skipped_examples + bad,
        }

    def _judge(self, value: float, line: dict[str, Any]) -> None:
        """Update the best evaluation, and record the cost if this evaluation reaches the target."""
        direction = self.task.metrics[self.config.target.metric]
        cost = {key: line[key] for key in ("fresh_examples", "steps", "train_time_s")}
        best = self.progress.best
        if best is None or is_better(direction, value, best["value"]):
            self.progress.best = {"metric": self.config.target.metric, "value": value, **cost}
            self.best_model = self.weights()
        met = meets(direction, value, self.config.target.value)
        self.progress.met_in_a_row = self.progress.met_in_a_row + 1 if met else 0
        if self.progress.met_in_a_row == self.config.target.consecutive:
            tau = self.gain().get("scale_invariant_steps")
            self.progress.to_target = {**cost, "scale_invariant_steps": tau}

    @property
    def evaluated(self) -> nn.Module:
        """The model to evaluate. With ``optimizer.ema_decay``, it has the averaged weights."""
        return self.model if self.average is None else self.average.module

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the parameters and buffers of the evaluated model, on the CPU."""
        return {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in self.evaluated.state_dict().items()
        }

    def times(self) -> dict[str, float]:
        """Return the training time, the evaluation time and the time spent waiting for data, in seconds."""
        return {**asdict(self.clocks), "wait_time_s": self.loader.wait_time_s}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to resume the run exactly. All ranks must call this method."""
        consolidate = getattr(self.optimizer, "consolidate_state_dict", None)
        if consolidate is not None:  # it is a ZeroRedundancyOptimizer, perhaps inside AdaScale
            consolidate(to=0)
        own = {
            "loader": self.loader.state_dict(),
            "rng": rng_state(self.device),
            "losses": (self._loss_sum.cpu(), self._recent_losses.cpu(), self._losses),
            "buffers": {name: buffer.cpu() for name, buffer in self._buffers().items()},
        }
        return {
            "made_with": self._made_with(),
            "model": self.model.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "best_model": self.best_model,
            "optimizer": self.optimizer.state_dict() if self.ranks.is_first else None,
            "progress": asdict(self.progress),
            "clocks": asdict(self.clocks),
            "ranks": self.ranks.gather_objects(own),
        }

    def _made_with(self) -> dict[str, Any]:
        """Return the facts that must not change before a checkpoint is resumed, such as the device."""
        kind = {"device": self.device.type, "precision": self.precision, "world_size": self.ranks.world_size}
        return {**kind, **self.task.fingerprint}

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of the model and of its averaged weights."""
        average = {} if self.average is None else dict(self.average.named_buffers(prefix="average"))
        return {**dict(self.model.named_buffers()), **average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned.

        Raises:
            FolderError: the device, the precision, the number of ranks or the data have changed.
        """
        may_change = self.task.fingerprint if self.config.data.allow_changed else ()
        for key, now in self._made_with().items():
            if state["made_with"].get(key) != now and key not in may_change:
                then = state["made_with"].get(key)
                raise FolderError(
                    f"the checkpoint was made with {key}={then}, but now {key} is {now}; continue with "
                    f"{then}, accept different data by data.allow_changed=true, or use restart=true"
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
        restore_rng(own["rng"], self.device)
