"""Gradients as they pass through the backward pass, before anything reduces, rescales or clips them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from adaecho.adascale.squares import Slots, statistics_dtype, sum_of_squares


class GradientCollector:
    """Sums |g_i|^2 per parameter group over the backward passes of one step.

    A hook on each parameter sees its gradient of one micro-batch before it is accumulated and before
    DistributedDataParallel reduces it. Passes are counted by how often a parameter was seen, so parameters
    that are unused in some of them do not matter.

    Args:
        groups: the parameters of each group; those that require no gradient are left alone.
        num_passes: backward passes in a step.
        on_last_pass: called at the end of the last one, when ``.grad`` is accumulated and reduced.
    """

    def __init__(
        self, groups: Sequence[Sequence[Tensor]], num_passes: int, on_last_pass: Callable[[], None]
    ) -> None:
        self.num_passes = num_passes
        self.passes = 0
        self._on_last_pass = on_last_pass
        self._handles: dict[Tensor, RemovableHandle] = {}
        self.groups: list[list[Tensor]] = []  # those watched
        self._numbers: list[list[int]] = []  # theirs, in the order of the handles
        self._slots: Slots | None = None
        self._callback_queued = False
        self.hook(groups)

    @property
    def complete(self) -> bool:
        """Whether all backward passes of a step have been seen."""
        return self.passes == self.num_passes

    def hook(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Watch every parameter of ``groups`` that requires a gradient and is not watched yet."""
        for index, parameters in enumerate(groups):
            if index == len(self.groups):
                self.groups.append([])
                self._numbers.append([])
            for parameter in parameters:
                if parameter.requires_grad and parameter not in self._handles:
                    number = len(self._handles)
                    handle = parameter.register_hook(self._hook_for(parameter, number))  # type: ignore[no-untyped-call]
                    self._handles[parameter] = handle
                    self.groups[index].append(parameter)
                    self._numbers[index].append(number)
                    self._slots = None
        if self._slots is None and self._handles:
            self._make_slots()
        self._callback_queued = False  # a backward pass that failed never came to it
        self.reset()

    def unhook(self) -> None:
        """Stop watching."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.groups, self._numbers, self._slots = [], [], None
        self.reset()

    def reset(self) -> None:
        """Forget the passes seen so far."""
        self.passes = 0
        self._seen = [0] * len(self._handles)
        self._sums: Tensor | None = None
        if self._slots is not None:
            self._slots.clear()

    @property
    def device(self) -> torch.device:
        """Where the gradients are; one device for all."""
        return next(iter(self._handles)).device

    def refuse_between_passes(self, what: str) -> None:
        """Raise RuntimeError if a step's backward passes have begun and are not complete."""
        if 0 < self.passes < self.num_passes:
            raise RuntimeError(
                f"AdaScale: {what} after {self.passes} of num_gradients_to_accumulate={self.num_passes} "
                f"backward passes; make {self.num_passes} for each step(), and call it after step() or "
                "zero_grad()"
            )

    def sums_of_squares(self) -> Tensor:
        """sum_i |g_i|^2 of this rank per group, [num_groups] in float64, in the units of the loss."""
        assert self._sums is not None
        return self._sums

    def squares_of_accumulated(self) -> Tensor:
        """|G|^2 of the accumulated ``.grad`` per group, [num_groups] in float64, in the units of the loss."""
        gradients = [[p.grad for p in group if p.grad is not None] for group in self.groups]
        zero = torch.zeros((), dtype=statistics_dtype(self.device), device=self.device)
        return torch.stack([sum_of_squares(group) if group else zero for group in gradients])

    def _hook_for(self, parameter: Tensor, number: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._count(parameter, number)
            slots = self._slots
            assert slots is not None
            if slots.taken(number):  # a second backward pass, reentrant, in this one
                self._add_up()
            if not slots.fit(number, gradient):  # e.g. after model.double()
                self._add_up()
                slots = self._make_slots()
            # Squared now, not in lots later: by the end of backward this memory may be .grad's, reduced (DDP
            # with static_graph) or clipped in a hook.
            slots.put(number, gradient.detach() if gradient.requires_grad else gradient)

        return hook

    def _count(self, parameter: Tensor, number: int) -> None:
        seen = self._seen[number]
        if seen == self.num_passes:
            # One pass too many. Right after a step that was given up (GradScaler skips on overflow) .grad is
            # gone and a new step begins; otherwise the gradient of two steps is being mixed.
            passes = self.passes
            self.reset()
            if parameter.grad is not None:
                raise RuntimeError(
                    f"AdaScale: backward pass {passes + 1} of a step that has num_gradients_to_accumulate="
                    f"{self.num_passes}. Call step() or optimizer.zero_grad() after {self.num_passes}, or "
                    "set_num_gradients_to_accumulate(). (A parameter used in several reentrant activation "
                    "checkpoints looks the same: use_reentrant=False there.)"
                )
            seen = 0
        self._seen[number] = seen + 1
        self.passes = max(self.passes, seen + 1)
        if not self._callback_queued:
            self._callback_queued = True
            _call_after_backward(self._after_gradients)

    def _make_slots(self) -> Slots:
        self._slots = Slots(self._numbers, list(self._handles))
        return self._slots

    def _add_up(self) -> None:
        if self._slots is None or self._slots.empty:
            return
        sums = self._slots.sums()
        self._sums = sums if self._sums is None else self._sums + sums
        self._slots.clear()

    def _after_gradients(self) -> None:
        self._callback_queued = False
        self._add_up()
        if self.complete:
            # Callbacks run in the order they were queued; DDP queued its own (which waits for the
            # reduction) during the pass, so this one runs after it.
            _call_after_backward(self._on_last_pass)


def _call_after_backward(callback: Callable[[], None]) -> None:
    # torch's own FSDP and DDP use the same door; there is no public one.
    torch.autograd.Variable._execution_engine.queue_callback(callback)
