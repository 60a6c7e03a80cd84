"""Scale-invariant steps: counted where the gain is, read by the host without waiting for the device."""

import math
from typing import Any

import torch
from torch import Tensor


class ScaleInvariantSteps:
    """tau (AdaScale, section 3.3) and the number of skipped steps.

    On a CUDA device the count reaches the host by an asynchronous copy, and ``reported`` is the count as it
    was one step earlier: always exactly one, so that a schedule that reads it repeats.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(2, dtype=torch.float64)  # [2]: tau, skipped steps
        self._copies = [_HostCopy(self._counts)] * 2  # the one reported, the newest
        self.schedule_steps = 0

    def advance(self, gain: Tensor, taken: Tensor) -> None:
        """Count one step: tau += ``gain`` if it was ``taken`` (0-dim tensors of one device)."""
        increment = torch.stack([torch.where(taken, gain, 0.0), (~taken).to(gain.dtype)])  # [2]
        self._counts = self._counts.to(gain.device, non_blocking=True) + increment
        newest = _HostCopy(self._counts)
        self._copies = [self._copies[1] if newest.is_late else newest, newest]

    def give_up(self, finite: Tensor) -> None:
        """Count a step that was never asked for as skipped if its gradients were not ``finite``."""
        skipped = (~finite).to(self._counts.dtype)
        self._counts = self._counts.to(finite.device, non_blocking=True) + torch.stack([0 * skipped, skipped])

    @property
    def reported(self) -> float:
        """tau as the host may know it without waiting."""
        return self._copies[0].read()[0]

    @property
    def tau(self) -> float:
        """tau, after waiting for the device."""
        return float(self._counts[0])

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because a gradient was not finite, after waiting for the device."""
        return int(self._counts[1])

    def set_tau(self, tau: float) -> None:
        """Continue counting from ``tau``."""
        self._set(torch.tensor([tau, self.skipped_steps], dtype=torch.float64))
        self.schedule_steps = math.floor(tau)

    def schedule_increment(self) -> int:
        """Return floor(tau) less what earlier calls have handed out."""
        steps = math.floor(self.reported)
        increment, self.schedule_steps = steps - self.schedule_steps, steps
        return increment

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain numbers."""
        tau, skipped_steps = self._counts.tolist()
        return {
            "scale_invariant_steps": tau,
            "reported_scale_invariant_steps": self.reported,
            "skipped_steps": int(skipped_steps),
            "schedule_steps": self.schedule_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``.

        Raises:
            ValueError: a count is missing, or no number from 0 to 2^53.
        """
        for name in self.state_dict():
            count = state.get(name) if isinstance(state, dict) else None
            if not (isinstance(count, int | float) and 0 <= count <= 1 << 53):
                raise ValueError(f"AdaScale: the checkpoint is damaged: {name} is {count!r}")
        skipped_steps = state["skipped_steps"]
        self._set(torch.tensor([state["scale_invariant_steps"], skipped_steps], dtype=torch.float64))
        reported = torch.tensor([state["reported_scale_invariant_steps"], skipped_steps], dtype=torch.float64)
        self._copies[0] = _HostCopy(reported)
        self.schedule_steps = state["schedule_steps"]

    def _set(self, counts: Tensor) -> None:
        self._counts = counts
        self._copies = [_HostCopy(counts)] * 2


class _HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.is_late = tensor.device.type == "cuda"
        self._event: torch.cuda.Event | None = None
        if self.is_late:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._tensor = tensor

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._tensor.tolist()
        return values
