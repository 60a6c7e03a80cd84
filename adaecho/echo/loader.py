"""EchoLoader: data echoing as a drop-in for ``torch.utils.data.DataLoader``."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from adaecho.echo import keys
from adaecho.echo.augment import Augmentation
from adaecho.echo.pipeline import EchoedBatches, ExampleBatches, Ready, reread_examples
from adaecho.echo.pool import ResidentPool
from adaecho.echo.source import ORDERS, ArraySource, IterableSource, Permutation, as_source
from adaecho.echo.stage import EchoStage
from adaecho.echo.upstream import Reader, pass_limit

VARIANTS = ("none", "batch", "example_before_augmentation", "example_after_augmentation")


class EchoLoader:
    """Batches for SGD, with data echoing (Choi, Passos, Shallue, Dahl 2019, sections 2 and 3).

    The stages of each variant; every one has a single shuffle buffer of the same size::

        none                         read > decode > shuffle > augment > batch
        example_before_augmentation  read > decode > echo > shuffle > augment > batch
        example_after_augmentation   read > decode > augment > echo > shuffle > batch
        batch                        read > decode > shuffle > augment > batch > echo [> shuffle batches]

    All randomness is a function of (seed, fresh serial number, echo index, purpose). Iteration is endless
    unless ``epochs`` is given: epochs follow one another inside the stream and no batch is short. A second
    ``iter()`` continues.

    Args:
        source: arrays or CPU tensors (alone, in a dict or in a tuple), or a map-style dataset.
        batch_size: examples per batch.
        echo: one of ``none``, ``batch``, ``example_before_augmentation``, ``example_after_augmentation``.
        factor: echoing factor e >= 1: how often each item leaves the echo stage. Not whole: floor or ceil
            for each item, right in expectation.
        shuffle_buffer: examples; 0 doesn't shuffle beyond ``order``.
        batch_shuffle_buffer: batches, after batch echoing (paper, Fig. 7a); 0 repeats a batch at once.
        decode: ``decode(example)``, deterministic.
        augment: ``augment(example, rng)`` with a NumPy generator keyed to the example and its repeat; or
            with ``augment.block(arrays, keys)``, vectorised; or of one argument, from global generators.
        collate: a list of examples to a batch; by default torch's rules, and tuples stay tuples.
        order: ``permutation`` (a new one for each epoch) or ``stored``.
        epochs: passes of each ``iter()``, which drain the buffer and may end with a short batch; None is
            endless.
        num_workers, prefetch: accepted; everything runs in the calling thread for now.
        seed: any integer.
        rank, world_size: this process's share; by default torch.distributed's, else 0 of 1.
        max_bad_examples: undecodable examples to skip and list in ``bad_examples``.
        max_factor: bound of an automatic factor.

    Raises:
        ValueError: an argument can't be; the message names it, its value and the remedy.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int,
        *,
        echo: str = "none",
        factor: float = 1.0,
        shuffle_buffer: int = 0,
        batch_shuffle_buffer: int = 0,
        decode: Callable[[Any], Any] | None = None,
        augment: Any = None,
        collate: Callable[[list[Any]], Any] | None = None,
        order: str = "permutation",
        epochs: int | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        max_bad_examples: int = 0,
        max_factor: float = 16,
    ) -> None:
        self.rank, self.world_size = _share(rank, world_size)
        self.batch_size, self.echo, self.epochs, self.seed = batch_size, echo, epochs, seed
        _check("batch_size", batch_size, 1)
        for name, value in (
            ("shuffle_buffer", shuffle_buffer),
            ("batch_shuffle_buffer", batch_shuffle_buffer),
            ("num_workers", num_workers),
            ("prefetch", prefetch),
            ("max_bad_examples", max_bad_examples),
        ):
            _check(name, value, 0)
        _check_factor(echo, factor, max_factor)
        if batch_shuffle_buffer and echo != "batch":
            raise ValueError(
                f"batch_shuffle_buffer={batch_shuffle_buffer}: only echo='batch' repeats batches"
            )
        if order not in ORDERS:
            raise ValueError(f"order={order!r}: must be one of {', '.join(ORDERS)}")
        self.factor = float(factor)
        found = as_source(source)
        if isinstance(found, IterableSource):
            raise ValueError("source: iterables are not supported yet; give something with a length")
        self._length = found.length
        self._settings = {
            "batch_size": batch_size,
            "echo": echo,
            "factor": float(factor),
            "shuffle_buffer": shuffle_buffer,
            "batch_shuffle_buffer": batch_shuffle_buffer,
            "order": order,
            "epochs": epochs or 0,
            "seed": seed,
            "rank": self.rank,
            "world_size": self.world_size,
            "length": self._length,
        }
        self._build(found, shuffle_buffer, batch_shuffle_buffer, decode, augment, collate, max_bad_examples)
        self._ahead: deque[Ready] = deque()
        self._output, self._batch_output, self._next_index, self._skipped = 0, 0, 0, 0
        self._iterations, self._in_pass = 0, False
        self._reread = 0
        self.wait_time_s = 0.0
        if epochs is None:
            self._begin(None)

    def _build(
        self,
        source: Any,
        shuffle_buffer: int,
        batch_shuffle_buffer: int,
        decode: Any,
        augment: Any,
        collate: Any,
        max_bad_examples: int,
    ) -> None:
        before = self.echo == "example_after_augmentation"
        augmentation = None if augment is None else Augmentation(augment, self.seed)
        resident = isinstance(source, ArraySource) and source.resident and decode is None and not before
        self._reader = Reader(
            source,
            Permutation(self._length, str(self._settings["order"]), self.seed),
            decode=decode,
            augment=augmentation if before else None,
            rank=self.rank,
            world=self.world_size,
            max_bad_examples=max_bad_examples,
            resident=resident,
        )
        self._stage = EchoStage(
            self._reader.take,
            seed=self.seed,
            factor=self.factor if self.echo.startswith("example") else 1.0,
            buffer=shuffle_buffer,
            rank=self.rank,
            world=self.world_size,
            block=max(self.batch_size, 1024),
            pool=ResidentPool(source.arrays) if resident else None,
            lookahead=2048 if resident else 1,
        )
        self._batches = ExampleBatches(
            self._stage, self.batch_size, None if before else augmentation, collate
        )
        self._echoed = None
        if self.echo == "batch":
            self._echoed = EchoedBatches(
                self._batches,
                seed=self.seed + 1,
                factor=self.factor,
                buffer=batch_shuffle_buffer,
                rank=self.rank,
                world=self.world_size,
            )

    # Iteration

    def __iter__(self) -> Iterator[Any]:
        if self.epochs is not None and not self._continues():
            self._iterations += 1
            begin = pass_limit(self._length, (self._iterations - 1) * self.epochs, self.rank, self.world_size)
            self._skipped += begin - self._next_index
            self._next_index = begin
            self._begin(pass_limit(self._length, self._iterations * self.epochs, self.rank, self.world_size))
        self._restored = False
        return _Batches(self)

    _restored = False

    def _continues(self) -> bool:
        return self._restored and self._in_pass

    def _begin(self, limit: int | None) -> None:
        self._ahead.clear()
        self._reader.begin_pass(self._next_index, limit)
        self._stage.begin_pass(self._next_index)
        if self._echoed is not None:
            self._echoed.begin_pass()
            self._echoed.note_end(self._output, self._next_index)
        self._in_pass = True

    def _next(self) -> Any:
        start = time.perf_counter()
        if not self._ahead and not self._make_ahead():
            self._in_pass = False
            raise StopIteration
        ready = self._ahead.popleft()
        self._output, self._batch_output = ready.output, ready.batch_output
        self._next_index = ready.next_index
        if self._echoed is not None:
            self._echoed.forget(ready)
        self._stage.forget(ready.output)
        self.wait_time_s += time.perf_counter() - start
        return ready.batch

    def _make_ahead(self) -> bool:
        if not self._in_pass:
            return False
        if self._echoed is not None:
            ready = self._echoed.next()
        else:
            made = self._batches.next()
            ready = None if made is None else made[0]
        if ready is not None:
            self._ahead.append(ready)
        return ready is not None

    # Counts

    @property
    def fresh_examples(self) -> int:
        """Examples of this rank that had to be read for the batches taken so far."""
        return self._next_index - self._skipped

    def next_fresh_examples(self) -> int:
        """What ``fresh_examples`` will be once the next batch has been taken; waits for it."""
        if not self._ahead and not self._make_ahead():
            return self.fresh_examples
        return self._ahead[0].next_index - self._skipped

    @property
    def fresh_examples_in_buffer(self) -> int:
        """Distinct fresh examples with a repeat still to come from a shuffle buffer."""
        items = [np.asarray(self._stage.state_at(self._output)["buffer"])]
        if self._echoed is not None:
            items += self._echoed.state_at(self._batch_output)[1].values()
        return len(np.unique(np.concatenate(items) >> keys.ECHO_BITS))

    @property
    def reread_examples(self) -> int:
        """Examples read a second time to restore a buffer; not fresh."""
        return self._reread

    @property
    def bad_examples(self) -> list[dict[str, Any]]:
        """Skipped examples: ``index`` (local number), ``origin``, ``error``."""
        return [bad for bad in self._reader.bad.found if bad["index"] < self._next_index]

    @property
    def upstream_s_per_batch(self) -> float:
        """Busy time upstream of the echo per fresh batch."""
        return 0.0

    @property
    def downstream_s_per_step(self) -> float:
        """The larger of the loader's work after the echo and the step."""
        return 0.0

    @property
    def R(self) -> float | None:  # noqa: N802 (the paper's name)
        """t_upstream / t_downstream (paper, section 2); None before it is known."""
        return None

    def __len__(self) -> int:
        if self.epochs is None:
            raise TypeError("an EchoLoader without epochs= is endless and has no len()")
        raise TypeError("len() is not known yet")

    # State

    def state_dict(self) -> dict[str, Any]:
        """The position just after the last batch taken: numbers, strings and tensors of identities."""
        state: dict[str, Any] = {
            "version": 1,
            "settings": dict(self._settings),
            "fresh_examples": self.fresh_examples,
            "reread_examples": self._reread,
            "skipped": self._skipped,
            "iterations": self._iterations,
            "in_pass": self._in_pass,
            "factor": self.factor,
            "wait_time_s": self.wait_time_s,
            "bad_examples": self.bad_examples,
            "examples": _with_tensor(self._stage.state_at(self._output)),
        }
        if self._echoed is not None:
            batches, held = self._echoed.state_at(self._batch_output)
            state["batches"] = _with_tensor(batches)
            state["held_batches"] = {number: torch.from_numpy(items.copy()) for number, items in held.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to a position; what the buffer held is read again and counted in ``reread_examples``.

        Raises:
            ValueError: the state is another loader's; the message names the argument that differs.
        """
        for name, value in self._settings.items():
            if state["settings"].get(name) != value:
                raise ValueError(
                    f"load_state_dict: {name} was {state['settings'].get(name)!r} and is {value!r} now; "
                    "give the loader the arguments it was saved with"
                )
        self._skipped, self._iterations = state["skipped"], state["iterations"]
        self._next_index = state["fresh_examples"] + self._skipped
        self.factor, self.wait_time_s = state["factor"], state["wait_time_s"]
        self._reader.bad.found = [dict(bad) for bad in state["bad_examples"]]
        self._reread = state["reread_examples"]
        examples = state["examples"]
        limit = None
        if self.epochs is not None:
            limit = pass_limit(self._length, self._iterations * self.epochs, self.rank, self.world_size)
        self._ahead.clear()
        self._reader.begin_pass(examples["next_index"], limit)
        self._reread += self._stage.load(_with_array(examples), self._reread_serials)
        self._output = self._batch_output = 0
        self._load_batches(state)
        self._in_pass = state["in_pass"]
        self._restored = True
        if self.epochs is not None and self._in_pass and not self._make_ahead():
            self._in_pass = False

    def _load_batches(self, state: dict[str, Any]) -> None:
        if self._echoed is None:
            return
        held = {int(number): items.numpy() for number, items in state["held_batches"].items()}
        self._echoed.load(_with_array(state["batches"]), held, self._remake)
        self._echoed.note_end(self._output, state["examples"]["next_index"])

    def _reread_serials(self, serials: Any) -> Any:
        return reread_examples(self._reader, serials)

    def _remake(self, items: keys.Items) -> Any:
        """A batch of given items, read again."""
        serials, inverse = np.unique(items >> keys.ECHO_BITS, return_inverse=True)
        self._reread += len(serials)
        return self._batches.finish(items, self._batches.stage.lend(self._reread_serials(serials), inverse))

    # Lifetime

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No upstream work while inside, e.g. during an evaluation or a checkpoint."""
        yield

    def close(self) -> None:
        """End the loader; it can't be iterated any more."""
        self._ahead.clear()
        self._in_pass = False

    def __enter__(self) -> "EchoLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Batches:
    """The iterator that ``iter(loader)`` gives; all of a loader's share its position."""

    def __init__(self, loader: EchoLoader) -> None:
        self._loader = loader

    def __iter__(self) -> "_Batches":
        return self

    def __next__(self) -> Any:
        return self._loader._next()


def _with_tensor(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "buffer": torch.from_numpy(np.array(state["buffer"], dtype=np.int64))}


def _with_array(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "buffer": state["buffer"].numpy()}


def _share(rank: int | None, world_size: int | None) -> tuple[int, int]:
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    if world_size is None:
        world_size = distributed.get_world_size() if ready else 1
    if rank is None:
        rank = distributed.get_rank() if ready else 0
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: must lie in [0, world_size={world_size})")
    return rank, world_size


def _check(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number, at least {least}")


def _check_factor(echo: str, factor: float, max_factor: float) -> None:
    if echo not in VARIANTS:
        raise ValueError(f"echo={echo!r}: must be one of {', '.join(VARIANTS)}")
    if not isinstance(factor, int | float) or not math.isfinite(factor) or factor < 1:
        raise ValueError(f"factor={factor!r}: must be a number, at least 1 (1 repeats nothing)")
    if factor >= keys.MAX_ECHOES or max_factor >= keys.MAX_ECHOES:
        raise ValueError(f"factor={factor!r}: must be less than {keys.MAX_ECHOES}")
    if echo == "none" and factor != 1:
        raise ValueError(f"factor={factor!r}: echo='none' repeats nothing; choose a variant or factor=1")
