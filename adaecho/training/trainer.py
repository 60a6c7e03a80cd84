"""The training loop: step, evaluate, stop, checkpoint."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from adaecho.adascale import AdaScale
from adaecho.config.schema import Config
from adaecho.errors import ConfigError
from adaecho.tasks.base import Batch, LossAndWeight, Task
from adaecho.training.clock import Clocks
from adaecho.training.device import autocast, choose_device, choose_precision
from adaecho.training.interrupt import WaitEndedError
from adaecho.training.loader import make_loader
from adaecho.training.optimizer import clip, deal, make_optimizer
from adaecho.training.progress import Progress, budget_spent, is_better, meets
from adaecho.training.schedule import Schedule

# Reading the loss waits for the device, so divergence is looked for this often and at every evaluation.
LOSS_CHECK_STEPS = 20

Line = dict[str, Any]


class Trainer:
    """One run in memory: everything that a checkpoint holds, and the loop over it.

    Args:
        config: the run.
        task: its workload.
        record: called with the metrics of each evaluation.
        interrupted: asked between steps; true ends the loop as ``preempted``.
        checkpoint: called between steps, and decides itself whether it is time.
        prune: asked with the fresh examples so far after each evaluation that missed the target; true
            ends the loop as ``pruned``.

    Attributes:
        is_waiting: for the loader, at this moment.
        best_model: the weights of ``progress.best``, on the CPU; None before the first evaluation.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        *,
        record: Callable[[Line], None],
        interrupted: Callable[[], bool],
        checkpoint: Callable[["Trainer"], None],
        prune: Callable[[int], bool] | None = None,
    ) -> None:
        self.config, self.task = config, task
        self._prune = prune
        self._record, self._interrupted, self._checkpoint = record, interrupted, checkpoint
        self.device = choose_device(config)
        self.precision = choose_precision(config, self.device)
        self.clocks = Clocks()
        self.progress = Progress(next_evaluation=config.evaluate.every_fresh_examples)
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.model = task.build_model().to(self.device)
        if config.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = make_optimizer(config, self.model)
        self.adascale = self.optimizer if isinstance(self.optimizer, AdaScale) else None
        self.loader = make_loader(config, task, self.device)
        epoch = task.num_examples or (len(task.source) if hasattr(task.source, "__len__") else None)
        self.schedule = Schedule(
            config.schedule, config.optimizer.learning_rate, epoch / config.batch_size if epoch else None
        )
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._loss_max = torch.zeros((), device=self.device)
        self._losses = 0
        self.is_waiting = False
        self.best_model: dict[str, torch.Tensor] | None = None

    def train(self) -> str:
        """Run until a stop rule holds; returns the status that ended it."""
        batches = iter(self.loader)
        self.model.train()
        self.clocks.start()
        try:
            while True:
                # What the next batch costs decides first: an evaluation due at k fresh examples comes after
                # every step that k fresh examples allow, so that no arm loses its last repeats.
                ahead = self._look_ahead()
                if ahead is None:
                    return "preempted"
                status = self._before_step(ahead)
                if status is not None:
                    return status
                if self.adascale is not None and ahead == self.loader.fresh_examples:
                    self.adascale.mark_repeated_batch()
                self._step(next(batches))
        finally:
            self.clocks.stop(self.device)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Inside, no thread of the loader's works; a signal ends the wait for one that does not come back.

        Raises:
            WaitEndedError: it did.
        """
        with ExitStack() as stack:
            try:
                self.is_waiting = True
                stack.enter_context(self.loader.paused())
            finally:
                self.is_waiting = False
            yield

    def _look_ahead(self) -> int | None:
        """Fresh examples once the next batch has been taken, waiting until it lies ready.

        None where a signal ended the wait: the batch then counts as not taken.
        """
        try:
            self.is_waiting = True
            return self.loader.next_fresh_examples()
        except WaitEndedError:
            return None
        finally:
            self.is_waiting = False

    def _before_step(self, ahead: int) -> str | None:
        """Evaluate if it is due and apply the stop rules; the status that ends the run, or None."""
        every = self.config.evaluate.every_fresh_examples
        if ahead > self.progress.next_evaluation:
            crossed = (ahead - 1) // every * every
            self.progress.next_evaluation = crossed + every
            if self.progress.steps > 0:  # the first batch alone may read past several, filling the buffer
                status = self._evaluate()
                if status is not None:
                    return status
        if self.progress.steps % LOSS_CHECK_STEPS == 0 and self._has_diverged():
            return "diverged"
        steps, train_time_s = self.progress.steps, self.clocks.peek()
        most = self.config.max_fresh_examples
        if steps == 0 and most is not None and ahead > most:
            raise ConfigError(
                f"max_fresh_examples={most}: the first batch of {self.config.batch_size} needs {ahead} fresh "
                f"examples, since echo.shuffle_buffer={self.config.echo.shuffle_buffer} fills first; "
                "allow more, or make the buffer smaller"
            )
        if budget_spent(self.config, steps=steps, fresh_examples_ahead=ahead, train_time_s=train_time_s):
            return "budget_spent"
        if self._is_done():
            return "budget_spent"
        if self._interrupted():
            return "preempted"
        self._checkpoint(self)
        return None

    def _step(self, batch: Batch) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        count = self.config.adascale.num_gradients_to_accumulate if self.adascale is not None else 1
        loss = self._backward(deal(batch, count))
        clip(self.model, self.config.optimizer.clip_norm)
        self._update()
        self._loss_sum += loss
        self._loss_max = torch.maximum(self._loss_max, loss)
        self._losses += 1
        self.progress.steps += 1

    def _backward(self, micro_batches: list[Batch]) -> torch.Tensor:
        """Leave the gradient of the mean loss over all micro-batches; that loss.

        Each one's share is its sum over the weight of all of them, so that it doesn't matter how unevenly
        masked tokens or boxes were dealt.
        """
        weight = self.task.weight
        if weight is not None or len(micro_batches) == 1:
            total = None if weight is None else sum(map(weight, micro_batches))
            shares = [self._share(*self._loss(one), total) for one in micro_batches]
        else:
            losses = [self._loss(one) for one in micro_batches]
            total = sum(weight for _, weight in losses)
            shares = [self._share(loss, weight, total) for loss, weight in losses]
        return sum(shares[1:], shares[0])

    def _loss(self, micro_batch: Batch) -> LossAndWeight:
        with autocast(self.device, self.precision):
            return self.task.loss(self.model, micro_batch)

    def _share(
        self, loss: torch.Tensor, weight: torch.Tensor | float, total: torch.Tensor | float | None
    ) -> torch.Tensor:
        """Add the gradient of one micro-batch's loss over the total weight (its own where it is alone)."""
        share = loss / (weight if total is None else total)
        share.backward()  # type: ignore[no-untyped-call]
        return share.detach()

    def _update(self) -> None:
        if self.adascale is None:
            self.optimizer.step()
            return
        before = self.adascale.scale_invariant_steps
        self.adascale.step()
        advance = self.adascale.scale_invariant_steps - before
        self.progress.fresh_scale_invariant_steps += advance / self.loader.factor

    def learning_rate(self) -> float:
        """Of the next step, before AdaScale's gain."""
        if self.adascale is not None and self.config.adascale.rule != "measure":
            return self.schedule.rate(math.floor(self.adascale.scale_invariant_steps))
        if self.config.schedule.counts == "fresh_examples":
            return self.schedule.rate(self.loader.fresh_examples / self.config.batch_size)
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
        return not self._loss_max.item() <= self.config.max_loss

    def _is_at_chance(self) -> bool:
        """Whether a share of the budget is read and no evaluation was better than guessing."""
        target, budget = self.config.target, self.config.max_fresh_examples
        if target.chance is None or budget is None:
            return False
        if self.loader.fresh_examples < target.chance_share * budget:
            return False
        best = self.progress.best
        return best is None or not is_better(self.task.metrics[target.metric], best["value"], target.chance)

    def _evaluate(self) -> str | None:
        """Measure the validation split and record it; the status that ends the run, or None to go on."""
        metrics = self.measure("validation")
        if self._has_diverged() or not all(math.isfinite(value) for value in metrics.values()):
            return "diverged"
        line: Line = {
            "fresh_examples": self.loader.fresh_examples,
            "steps": self.progress.steps,
            **metrics,
            "train_loss": (self._loss_sum / max(self._losses, 1)).item(),
            "learning_rate": self.learning_rate(),
            **self.gain(),
            "echo_factor": self.loader.factor,
            **self._factor_changes_since_last_line(),
            "fresh_examples_in_buffer": self.loader.fresh_examples_in_buffer,
            **self.times(),
        }
        self._loss_sum.zero_()
        self._losses = 0
        self.progress.evaluations += 1
        self._judge(metrics[self.config.target.metric], line)
        self._record(line)
        if self.progress.to_target is not None:
            return "reached"
        if self._is_at_chance():
            return "diverged"
        prune = self._prune is not None and self._prune(self.loader.fresh_examples)
        return "pruned" if prune else None

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
        with self.at_rest(), self.clocks.evaluating(self.device), torch.inference_mode():
            self.model.eval()
            with autocast(self.device, self.precision):
                metrics = self.task.evaluate(self.model, split, device=self.device)
            self.model.train()
        return metrics

    def at_end(self) -> dict[str, Any]:
        """What the task adds to the summary of a run that ended by itself, on the evaluation clock."""
        if self.task.at_end is None:
            return {}
        with self.at_rest(), self.clocks.evaluating(self.device), torch.inference_mode():
            self.model.eval()
            return self.task.at_end(self.model, self.device)

    def _judge(self, value: float, line: Line) -> None:
        direction = self.task.metrics[self.config.target.metric]
        cost = {key: line[key] for key in ("fresh_examples", "steps", "train_time_s")}
        best = self.progress.best
        if best is None or is_better(direction, value, best["value"]):
            self.progress.best = {"metric": self.config.target.metric, "value": value, **cost}
            self.best_model = self.weights()
        if meets(direction, value, self.config.target.value):
            tau = None if self.adascale is None else self.adascale.scale_invariant_steps
            self.progress.to_target = {**cost, "scale_invariant_steps": tau}

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the model's parameters and buffers on the CPU, each with memory of its own."""
        state = self.model.state_dict()
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
        """Everything that decides what follows the last step: readable without executing pickled code."""
        cuda_rng = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {
            "device": self.device.type,
            "precision": self.precision,
            "fingerprint": self.task.fingerprint,
            "model": self.model.state_dict(),
            "best_model": self.best_model,
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "progress": self.progress.state_dict(),
            "clocks": {"train_time_s": self.clocks.train_time_s, "eval_time_s": self.clocks.eval_time_s},
            "losses": {"sum": self._loss_sum, "max": self._loss_max, "count": self._losses},
            "rng": {"cpu": torch.get_rng_state(), "cuda": cuda_rng},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``'s result."""
        self.model.load_state_dict(state["model"])
        self.best_model = state["best_model"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        self.progress = Progress(**state["progress"])
        self.clocks = Clocks(**state["clocks"])
        self._loss_sum = state["losses"]["sum"].to(self.device)
        self._loss_max = state["losses"]["max"].to(self.device)
        self._losses = state["losses"]["count"]
        torch.set_rng_state(state["rng"]["cpu"])
        if self.device.type == "cuda" and state["rng"]["cuda"] is not None:
            torch.cuda.set_rng_state(state["rng"]["cuda"], self.device)
