"""The training loss of first uses of examples, of second ones, and so on: what repeats still teach."""

import math
from dataclasses import replace
from typing import Any

import torch

from adaecho.config.schema import Config
from adaecho.echo.batch.ages import Ages
from adaecho.errors import ConfigError
from adaecho.ranks import Ranks
from adaecho.records.outcome import BY_ECHO_INDEX
from adaecho.tasks.base import Batch, LossAndWeight, Task

MOST = 16  # indices that are told apart; the last one counts for all beyond it


class LossByEchoIndex:
    """Sums since the last evaluation, where ``evaluate.loss_by_echo_index`` asks for them; else nothing.

    The step's own pass through the model is looked at, which stays as it is to the last bit.

    Args:
        config: the run.
        task: its workload.
        device: of the batches.

    Attributes:
        task: the same, for batches ``(batch, ages)`` if asked.
        sums: the losses and their numbers, float64 [2, indices].

    Raises:
        ConfigError: the task doesn't tell the losses of single examples.
    """

    def __init__(self, config: Config, task: Task, device: torch.device) -> None:
        self.task, self._seen = task, list[torch.Tensor]()  # of this step's micro-batches
        self.sums = torch.zeros(2, 0, dtype=torch.float64, device=device)
        if not config.evaluate.loss_by_echo_index:
            return
        if task.losses is None:
            raise ConfigError(
                f"evaluate.loss_by_echo_index=true: task {task.name} doesn't tell the loss of each example "
                "(digits, cifar10 and imagenet do); give its Task losses, or drop the key"
            )
        factor = config.echo.max_factor if config.echo.factor == "auto" else config.echo.factor
        indices = min(math.ceil(factor), MOST)
        self._inner, self._losses, weight = task, task.losses, task.weight
        self.task = replace(task, loss=self._loss, weight=weight and (lambda pair: weight(pair[0])))
        self.sums = torch.zeros(2, indices, dtype=torch.float64, device=device)
        self._indices = torch.arange(indices, device=device)[:, None]

    def _loss(self, model: Any, pair: tuple[Batch, Ages]) -> LossAndWeight:
        batch, ages = pair
        outputs = []

        def looked_at(*arguments: Any) -> Any:
            outputs.append(model(*arguments))
            return outputs[0]

        loss = self._inner.loss(looked_at, batch)  # type: ignore[arg-type]
        with torch.no_grad():
            losses = self._losses(outputs[0], batch).double()  # [batch]
            # bool [indices, batch]; on CUDA adding by index would give another last bit each time
            own = ages["echo_index"].clamp(max=len(self._indices) - 1) == self._indices
            self._seen.append(torch.stack([losses.where(own, 0).sum(1), own.sum(1).double()]))
        return loss

    def forget(self) -> None:
        """What was seen since the last step was no step."""
        self._seen.clear()

    def count(self) -> None:
        """What was seen was a step."""
        for seen in self._seen:
            self.sums += seen
        self._seen.clear()

    def load(self, sums: torch.Tensor | None) -> None:
        """Go on with the sums of a checkpoint; None where it was written before there were any."""
        if sums is not None:
            self.sums.copy_(sums)

    def line(self, ranks: Ranks) -> dict[str, float | None]:
        """Means since the last line, over all ranks, in nats say; None where there was no such use."""
        if not self.sums.numel():
            return {}
        sums, numbers = ranks.sum(self.sums).tolist()
        self.sums.zero_()
        return {
            f"{BY_ECHO_INDEX}{index}": total / number if number else None
            for index, (total, number) in enumerate(zip(sums, numbers, strict=True))
        }
