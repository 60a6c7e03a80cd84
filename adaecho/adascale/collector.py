"""Gradients as they pass through the backward pass, before anything reduces, rescales or clips them."""

import sys
from collections.abc import Callable, Sequence
from types import FrameType

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from adaecho.adascale.squares import Slots, statistics_dtype, sum_of_squares

_FUNCTION_BACKWARD = BackwardCFunction.apply.__code__  # through which the engine calls every one of them


class GradientCollector:
    """Sums |g_i|^2 per parameter group over the backward passes of one step.

    A hook on each parameter sees its gradient of one micro-batch before it is accumulated and before
    DistributedDataParallel reduces it. A pass is one call of ``backward()`` that reaches a parameter,
    whichever it reaches: two heads trained in turn need not share one. A reentrant activation checkpoint
    calls backward within backward; that is no pass of its own.

    Args:
        groups: the parameters of each group; those that require no gradient are left alone.
        num_passes: backward passes in a step.
        on_first_pass: called when the first one reaches its first parameter.
        on_last_pass: called at the end of the last one, when ``.grad`` is accumulated and reduced; again at
            the end of each reentrant checkpoint in it.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        num_passes: int,
        on_first_pass: Callable[[], None],
        on_last_pass: Callable[[], None],
    ) -> None:
        self.num_passes = num_passes
        self.passes = 0
        self._on_first_pass, self._on_last_pass = on_first_pass, on_last_pass
        self._handles: dict[Tensor, RemovableHandle] = {}
        self.groups: list[list[Tensor]] = []  # the watched parameters of each group
        self._slots: Slots | None = None
        self._callback_queued = False
        self._newest_task = -1  # the autograd engine's number of the latest graph task; they only go up
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
                self._slots = None
            for parameter in parameters:
                if parameter.requires_grad and parameter not in self._handles:
                    number = len(self._handles)
                    handle = parameter.register_hook(self._hook_for(number))  # type: ignore[no-untyped-call]
                    self._handles[parameter] = handle
                    self.groups[index].append(parameter)
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
        self.groups, self._slots = [], None
        self.reset()

    def reset(self) -> None:
        """Forget the passes seen so far."""
        self.passes = 0
        self._seen = [0] * len(self._handles)  # passes that reached each parameter
        self._sums: Tensor | None = None  # float64 [num_groups]
        if self._slots is not None:
            self._slots.clear()

    @property
    def device(self) -> torch.device:
        """The one device on which all gradients are."""
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
        """Return sum_i |g_i|^2 of this rank per group: float64 [num_groups], in units of the loss."""
        assert self._sums is not None
        return self._sums

    def squares_of_accumulated(self) -> Tensor:
        """Return |G|^2 of the accumulated ``.grad`` per group: float64 [num_groups], in units of the loss."""
        gradients = [[p.grad for p in group if p.grad is not None] for group in self.groups]
        zero = torch.zeros((), dtype=statistics_dtype(self.device), device=self.device)  # []
        return torch.stack([sum_of_squares(group) if group else zero for group in gradients])

    def _hook_for(self, number: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._count(number)
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

    def _count(self, number: int) -> None:
        if not self._callback_queued:  # the first parameter that this call of backward reaches
            task = torch._C._current_graph_task_id()
            # An older task than the newest is what that one was nested in: its pass has been counted.
            if task > self._newest_task and not _is_nested():
                self._begin_pass()
            self._newest_task = max(self._newest_task, task)
            self._callback_queued = True
            _call_after_backward(self._after_gradients)
        if self._seen[number] == self.passes:
            # More often than there were passes, so the nested calls of backward are of a pass that reached
            # no parameter outside of them.
            self._begin_pass()
        self._seen[number] += 1

    def _begin_pass(self) -> None:
        if self.complete:
            # One pass too many. Right after a step that was given up (GradScaler skips on overflow) .grad is
            # gone and a new step begins; otherwise the gradients of two steps are being mixed.
            self.reset()
            if any(parameter.grad is not None for parameter in self._handles):
                raise RuntimeError(
                    f"AdaScale: backward pass {self.num_passes + 1} of a step that has "
                    f"num_gradients_to_accumulate={self.num_passes}. Call step() or optimizer.zero_grad() "
                    f"after {self.num_passes}, add up losses that are of one pass before backward(), or make "
                    "AdaScale with as many as there are. (A parameter used in several reentrant activation "
                    "checkpoints looks the same: use_reentrant=False there.)"
                )
        if self.passes == 0:
            self._on_first_pass()
        self.passes += 1

    def _make_slots(self) -> Slots:
        numbers = {parameter: number for number, parameter in enumerate(self._handles)}
        groups = [[numbers[parameter] for parameter in group] for group in self.groups]
        self._slots = Slots(groups, list(self._handles))
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


def _is_nested() -> bool:
    # Whether a torch.autograd.Function's backward, as of a reentrant checkpoint, is on the stack. On a GPU
    # the engine runs hooks in a thread of its own, on whose stack there is nothing else.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _FUNCTION_BACKWARD:
        frame = frame.f_back
    return frame is not None


def _call_after_backward(callback: Callable[[], None]) -> None:
    # torch's own FSDP and DDP use the same door; there is no public one.
    torch.autograd.Variable._execution_engine.queue_callback(callback)
