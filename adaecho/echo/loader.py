"""EchoLoader: data echoing as a drop-in for ``torch.utils.data.DataLoader``."""

import inspect
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from adaecho.echo import state as saved
from adaecho.echo.batch.batches import Batch, Position
from adaecho.echo.batch.device import ToDevice
from adaecho.echo.data_loader import (
    NO_SOURCE,
    absent,
    check_iterable,
    check_sampler,
    check_source,
    source_of,
    translated,
)
from adaecho.echo.gauges import Gauges
from adaecho.echo.lookahead import holds_last_batch
from adaecho.echo.order.factor import AutoFactor
from adaecho.echo.pipeline import Pipeline, Work, choose_place
from adaecho.echo.read.ranks import warn_if_shared_twice, warn_if_unshared
from adaecho.echo.read.sources import IterableSource, as_source
from adaecho.echo.read.wrapped import key_web_datasets, keyed
from adaecho.echo.settings import (
    Settings,
    check_functions,
    check_place,
    check_still_alone,
    check_whole_batches,
    check_workers,
    is_distributed,
    share,
    whole,
)
from adaecho.echo.threads.timers import Timers, works_ahead
from adaecho.echo.threads.workers import GivenUp, Interrupted


class EchoLoader(Gauges):
    """Batches for SGD, with data echoing (Choi, Passos, Shallue, Dahl 2019, sections 2 and 3).

    The stages of each variant; every one has a single shuffle buffer of the same size::

        none                         read > decode > shuffle > augment > batch
        example_before_augmentation  read > decode > echo > shuffle > augment > batch
        example_after_augmentation   read > decode > augment > echo > shuffle > batch
        batch                        read > decode > shuffle > augment > batch > echo [> shuffle batches]

    All randomness is a function of (seed, fresh serial number, echo index, purpose): batches are the same
    for any ``num_workers`` and ``prefetch``, and after any resume. Iteration is endless unless ``epochs`` is
    given: epochs follow one another inside the stream and no batch is short; a second ``iter()`` continues.

    Args:
        source: arrays or CPU tensors (alone, in a dict or in a tuple), a map-style dataset, an iterable, or a
            function that returns an iterator for each pass.
        batch_size: examples per batch, 1 by default as in a DataLoader. None: the source gives whole batches
            (a DataLoader, say), which are passed on in its order or, with ``echo="batch"``, repeated;
            ``decode`` takes a whole batch then.
        echo: one of ``none``, ``batch``, ``example_before_augmentation``, ``example_after_augmentation``.
        factor: echoing factor e >= 1: how often each item leaves the echo stage. Not whole: floor or ceil
            for each item, right in expectation. ``auto`` follows R, from 1 up to ``max_factor``.
        shuffle_buffer: examples; 0 doesn't shuffle beyond ``order``.
        batch_shuffle_buffer: batches, after batch echoing (paper, Fig. 7a); 0 repeats a batch at once.
        decode: ``decode(example)``, deterministic. Where it has ``for_augment(augment)``, that gives what
            decodes instead if the buffer holds encoded examples: it may do no more than the augment needs.
        augment: ``augment(example, rng)`` with a NumPy generator keyed to the example and its repeat; or
            with ``augment.block(arrays, keys)``, vectorised; or of one argument, which draws from the global
            generators: seeded for each example, slower, and under ``num_workers`` run in as many processes,
            for which it must pickle. A pair ``(once, each_time)`` of these is split by
            ``example_before_augmentation``: the first comes before the echo, once for each fresh example,
            the second after it. Elsewhere one follows the other.
        collate: a list of examples to a batch; by default torch's rules, and tuples stay tuples.
        sampler: gives the rows of each pass, as a DataLoader's, in place of ``order``; see
            ``order.sampled.SampledOrder``.
        place: what the shuffle buffer and an echo before augmentation hold, the same batches either way:
            ``decoded`` decodes each fresh example once; ``encoded`` decodes after them, once for each
            repeat, and needs the memory of encoded examples alone. With ``max_bad_examples`` it also decodes
            each fresh example once on its way in, and drops the result, so that a bad one is still skipped.
            ``augmented`` augments each repeat when its example is read: for patches of examples too large to
            be buffered. R then counts that as upstream, and ``factor="auto"`` of examples is refused.
            ``auto`` takes ``encoded`` where that costs nothing more (nothing echoed before augmentation, no
            bad examples allowed), or where a buffer of decoded examples as large as the source's first would
            take more than half of the free memory.
        order: where the source has a length: ``permutation`` (a new one for each epoch), ``shards`` (shuffled
            for each epoch and read through) or ``stored``. What can only be iterated has an order of its own.
        epochs: passes of each ``iter()``, which drain the buffer and may end with a short batch; None is
            endless. Every rank makes equally many batches: where its passes can't be shared out evenly, up
            to ``world_size - 1`` of their first examples come again at the end, as with DistributedSampler.
            With ``batch_shuffle_buffer`` each rank's short batch falls on a step of its own.
        drop_last: leave out a short batch at the end of an iteration, and of several ranks the remainder that
            can't be shared out evenly.
        num_workers: threads that read and decode, and as many that augment and collate; 0 works inline.
            What is iterated is read by one of them at a time. Around something that works ahead in a way
            that can't be seen (no ``num_workers`` of its own above 0), R needs 1 thread to be right.
        prefetch: batches read ahead of the echo stage.
        seed: any integer.
        rank, world_size: this process's share; by default torch.distributed's, else 0 of 1. Not used with
            whole batches, which their maker has shared out.
        max_bad_examples: undecodable examples to skip and list in ``bad_examples``; failures of machine and
            network are always raised.
        max_factor: bound of ``factor="auto"``.
        device: where the loader's threads put batches, beside the step; None leaves them on the CPU.
        batch_length: examples in a whole batch, where its form (see ``batch.batch_length``) doesn't tell.
        state_of_all_ranks: ``state_dict()`` holds the positions of all of torch.distributed's ranks, for
            checkpoints that one of them writes for all (Lightning, Fabric, Accelerate); all call it together.
        ages: batches come as ``(batch, ages)``, with each example's echo index and when it was read
            (``adaecho.echo.batch.ages.Ages``). A pair, since batches have any form and keys of their own, and
            since whatever takes batches ahead of the step (Lightning does) takes their ages with them.
        arguments_of_data_loader: other arguments that a DataLoader has. ``dataset``, ``shuffle``,
            ``collate_fn`` and ``prefetch_factor`` are taken for ``source``, ``order``, ``collate`` and
            ``prefetch``, others refused with what replaces them (docs/from-dataloader.md).

    Attributes:
        agree_on_R: what ``factor="auto"`` follows, as a function of this rank's R (None until known); may be
            assigned. All ranks call it after the same numbers of batches, so it may ask the others.

    Raises:
        ValueError: an argument can't be; the message names it, its value and the remedy.
        TypeError: neither this nor a DataLoader has such an argument.
    """

    def __init__(
        self,
        source: Any = NO_SOURCE,
        batch_size: int | None = 1,
        *,
        echo: str = "none",
        factor: float | str = 1.0,
        shuffle_buffer: int = 0,
        batch_shuffle_buffer: int = 0,
        decode: Callable[[Any], Any] | None = None,
        augment: Any = None,
        collate: Callable[[list[Any]], Any] | None = None,
        sampler: Any = None,
        place: str = "decoded",
        order: str = "permutation",
        epochs: int | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch: int = 2,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        max_bad_examples: int = 0,
        max_factor: float = 16,
        device: str | torch.device | None = None,
        batch_length: Callable[[Any], int] | None = None,
        state_of_all_ranks: bool = False,
        ages: bool = False,
        **arguments_of_data_loader: Any,
    ) -> None:
        source = source_of(source, arguments_of_data_loader)
        self._state_of_all_ranks = state_of_all_ranks
        # Neither given a part nor told one by torch.distributed.
        self._made_alone = (rank, world_size) == (None, None) and not is_distributed()
        rank, world_size = share(rank, world_size)
        self._num_workers = num_workers = check_workers(num_workers)
        self._dataset, self._sampler = source, sampler
        check_source(source, batch_size)
        shuffle = arguments_of_data_loader.get("shuffle")
        check_sampler(sampler, order=order, shuffle=shuffle, batch_size=batch_size, world_size=world_size)
        order, collate, prefetch = translated(
            arguments_of_data_loader, order=order, collate=collate, prefetch=whole("prefetch", prefetch, 0),
            num_workers=num_workers, shuffle_buffer=shuffle_buffer, names=_OWN_ARGUMENTS,
        )  # fmt: skip
        prefetch = whole("prefetch", prefetch, 0)
        self.settings = Settings(
            batch_size, echo, factor, shuffle_buffer, batch_shuffle_buffer, order, epochs, seed, rank,
            world_size, max_factor, max_bad_examples, drop_last,
            None if sampler is None else f"{type(sampler).__name__} of {len(sampler)}",
        )  # fmt: skip
        self.settings.warn_of_idle_echo()
        check_functions(decode=decode, collate=collate, batch_length=batch_length)
        check_place(place, decode, augment, self.settings)
        check_whole_batches(batch_size, augment, collate, batch_length)
        if batch_size is None:
            warn_if_unshared(source, world_size)
        self._device = ToDevice(device)
        key_web_datasets(source, self.settings.seed, rank)
        readable = as_source(keyed(source, self.settings.seed))
        self.settings.check_filling(readable.length)
        place = self._place = choose_place(place, decode, augment, readable, self.settings)
        if isinstance(readable, IterableSource):
            check_iterable(readable.name, shuffle=shuffle, sampler=sampler)
            if batch_size is not None:
                warn_if_shared_twice(source, world_size)
        self._pipeline = Pipeline(
            readable,
            self.settings,
            Work(
                decode, augment, collate, batch_length, sampler, place, self._device,
                num_workers=num_workers, prefetch=prefetch,
                works_ahead=works_ahead(source), ages=ages,
            ),
        )  # fmt: skip
        self._stages = self._pipeline.stages
        self._ahead: Batch | None = None
        self._position = Position()
        self._before: tuple[Position, int] | None = None  # the last batch taken, and its id
        # One rule for interruptions: what changes the stages sets this before, and clears it in one statement
        # with the new position. Where it was not cleared, the stages are brought back to the last state.
        self._torn = False
        self._last_state: dict[str, Any] | None = None  # where it can't be told from the stages any more
        self._saving = threading.RLock()  # held while a state is made; never while waiting for a batch
        self._changed_by: int | None = None  # the thread that changes the stages
        self._resumed = False  # from a state; the next iter() goes on with the iteration in progress
        self._clocks = Timers(self._pipeline.counters, self._pipeline.deliveries)
        self._auto = AutoFactor(self.settings.max_factor) if factor == "auto" else None
        self.agree_on_R: Callable[[float | None], float | None] = lambda mine: mine
        self._failed: Exception | None = None
        self._closed, self._iterating, self._iterators_made = False, False, 0
        self._next_iteration: int | None = None  # that set_epoch asked for
        self._finalizer = weakref.finalize(self, self._pipeline.forgotten)
        self._finalizer.atexit = False  # the pipelines see to that themselves
        if epochs is None:
            self._position = self._stages.begin(self._position, self._upcoming, None)

    # Iteration

    def __iter__(self) -> "EchoIterator":
        self._check_process()
        iterator = EchoIterator(self, self._iterators_made + 1)
        position = self._position
        if self.settings.epochs is not None and not (self._resumed and position.in_pass):
            try:
                self._wait_for_savers()
                position = self._begin()
                self._torn, self._last_state = False, None
            finally:
                self._changed_by = None
        self._position, self._before, self._failed = position, None, None
        self._resumed, self._next_iteration = False, None
        self._iterating, self._iterators_made = True, self._iterators_made + 1
        return iterator

    def _begin(self) -> Position:
        """Begin an iteration, giving up the one before if it hasn't ended; where that is."""
        self._last_state = self._own_state()
        self._torn = True
        self._pipeline.halt()
        self._clocks.pause()
        self._ahead = None
        return self._stages.begin(self._position, self._upcoming, self.settings.epochs)

    def _repair(self) -> None:
        """Bring the stages back to the last state, if a change of theirs did not come to its end."""
        if not self._torn:
            return
        self._last_state = self._own_state()
        self._pipeline.halt()
        self._ahead = None
        position = saved.restore(self._last_state, self.settings, self._stages, self._clocks)
        self._position, self._torn, self._last_state = position, False, None

    def _abandoned(self) -> None:
        """The newest iterator is gone."""
        self._iterating = False
        self.stop()

    def _next(self) -> tuple[Batch, Position]:
        """The next batch and the position after it. It is taken once that is the loader's."""
        batch = self._look_ahead()
        if batch is None:
            raise StopIteration
        with self._saving:
            for stage in self._stages.all:
                stage.forget(self._position)
        position = self._position.after(batch)
        self._clocks.step()
        if self._auto is not None and self._auto.due():
            self._auto.follow(self.agree_on_R(self._clocks.ratio), self._stages.factor)
        self._device.received(batch.content)
        return batch, position

    def _look_ahead(self) -> Batch | None:
        """The next batch, made if it isn't at hand; None at the end of the iteration."""
        if self._ahead is not None:
            return self._ahead
        self._check_can_go_on()
        try:
            self._wait_for_savers()
            return self._made()
        finally:
            self._changed_by = None

    def _made(self) -> Batch | None:
        while True:
            start = time.perf_counter()
            try:
                self._repair()
                if not self._position.in_pass:
                    return None
                self._torn = True
                batch = self._pipeline.next()
            except GivenUp:
                continue
            except Interrupted:
                self._torn = False  # nothing has changed
                does = "closed it" if self._closed else "called stop(): asking again goes on"
                raise RuntimeError(
                    f"while this EchoLoader made its next batch, another thread {does}"
                ) from None
            except BaseException as error:
                if isinstance(error, Exception):
                    self._failed = error
                self._pipeline.stop_after_error()
                raise
            self._clocks.waited(start)
            if batch is None:
                position = self._position.ended(self._stages.queue.index, whole=self._stages.batches.whole)
                self._position, self._torn = position, False
            else:
                self._ahead, self._torn = batch, False
            return batch

    def _check_can_go_on(self) -> None:
        if self._closed:
            raise RuntimeError("this EchoLoader was closed; make another one")
        if self._failed is not None:
            again = (
                "goes on after the last batch" if self.settings.epochs is None else "begins a new iteration"
            )
            raise RuntimeError(
                f"this EchoLoader was stopped by an error ({type(self._failed).__name__}); iter(loader) "
                f"{again}, loader.load_state_dict(state) goes on from a state"
            ) from self._failed
        if self._position.in_pass and self._pipeline.thread_pool is not None:
            self._pipeline.thread_pool.check_process()
            self._pipeline.thread_pool.resume_for_caller()

    def __len__(self) -> int:
        """Batches of one iteration: of the one in progress, else, or once it is given up, of the next.

        Raises:
            TypeError: it is endless, or not known.
        """
        self._check_alone()
        position = self._position
        if position.in_pass and (self._iterating or self._resumed):
            first = position.first_index, position.first_number
            return self._pipeline.num_batches(position.iteration, *first)
        first = position.next_index, position.next_number
        return self._pipeline.num_batches(self._upcoming, *first)

    @property
    def _upcoming(self) -> int:
        """The iteration that begins next."""
        return self._position.iteration + 1 if self._next_iteration is None else self._next_iteration

    def next_fresh_examples(self) -> int:
        """What ``fresh_examples`` will be once the next batch has been taken; waits for that batch."""
        batch = self._look_ahead()
        return self.fresh_examples if batch is None else batch.fresh_examples

    def peek(self) -> Any:
        """The next batch, which stays the next one; waits for it.

        Raises:
            StopIteration: the iteration is at its end.
        """
        batch = self._look_ahead()
        if batch is None:
            raise StopIteration
        self._device.received(batch.content)
        return batch.content

    # State

    def state_dict(self) -> dict[str, Any]:
        """The position just after the last batch taken, whatever has been read ahead.

        Returns:
            Numbers, strings, lists and tensors of identities (8 bytes for each buffered example): what
            ``torch.load(weights_only=True)`` accepts.

        Raises:
            RuntimeError: another thread is taking a batch.
        """
        self._check_process()
        last = self._before
        state = self._own_state(last[0] if last is not None and holds_last_batch(last[1]) else None)
        return saved.of_all_ranks(state) if self._state_of_all_ranks else state

    def _own_state(self, position: Position | None = None) -> dict[str, Any]:
        """The state at the position, or at that of a batch before, which the stages still know."""
        with self._saving:
            if self._changed_by not in (None, threading.get_ident()):
                raise RuntimeError(
                    "state_dict: another thread is taking a batch of this EchoLoader, so that its position "
                    "isn't known; ask in the thread that takes them, between two"
                )
            if self._last_state is not None:
                return self._last_state
            return saved.save(self.settings, self._stages, position or self._position, self._clocks)

    def _wait_for_savers(self) -> None:
        """Before the stages change: until ``_changed_by`` is None again no other thread is told a state."""
        self._changed_by = threading.get_ident()
        with self._saving:
            pass

    def _check_alone(self) -> None:
        if self._made_alone and self.batch_size is not None:
            check_still_alone()
        elif self._made_alone and is_distributed():  # whole batches, which their maker is to share out
            self._made_alone = False
            warn_if_unshared(self._dataset, share(None, None)[1])

    def _check_process(self) -> None:
        self._check_alone()
        if self._pipeline.thread_pool is not None:
            self._pipeline.thread_pool.check_process()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to a position; what has to be read again for it is counted in ``reread_examples``.

        Raises:
            ValueError: the state is another loader's; the message names the argument that differs.
        """
        self._check_process()
        state = saved.of_this_rank(state)
        saved.check(state, self.settings, self._stages)
        try:
            self._wait_for_savers()
            self._last_state, self._torn, self._failed, self._before = state, True, None, None
            self._repair()
        finally:
            self._changed_by = None
        self._resumed = True
        if self.settings.epochs is not None and self._position.in_pass:
            # A position after the last batch of an iteration: the next iter() begins a new one.
            self._look_ahead()

    # As of a DataLoader

    def __repr__(self) -> str:
        return f"EchoLoader({type(self._dataset).__name__}, {self.settings})"

    @property
    def dataset(self) -> Any:
        """The source as it was given."""
        return self._dataset

    @property
    def batch_size(self) -> int | None:
        """Examples per batch; None where the source gives whole batches."""
        return self.settings.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a short batch at the end of an iteration is left out."""
        return self.settings.drop_last

    @property
    def num_workers(self) -> int:
        """Threads that read and decode, and as many that augment and collate."""
        return self._num_workers

    def set_epoch(self, epoch: int) -> None:
        """Have the next ``iter()`` begin iteration number ``epoch``, from 0, as of ``DistributedSampler``.

        Each ``iter()`` goes on to the next iteration by itself: to call this before it with the number of
        the epoch changes nothing, nor in an iteration that was restored from a state. Without ``epochs=``
        passes follow one another, and this does nothing.
        """
        self._next_iteration = whole("epoch", epoch, 0) + 1
        if self._position.iteration != self._next_iteration:
            self._resumed = False

    if not TYPE_CHECKING:  # for type checkers there are no other attributes

        def __getattr__(self, name: str) -> Any:
            if name == "sampler" and self.__dict__.get("_sampler") is not None:
                return self._sampler
            raise AttributeError(absent(name))

    # Lifetime

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No upstream work while inside, e.g. during an evaluation or a checkpoint; waits for work under way.

        The step it falls into is not clocked. A batch that the pausing thread takes inside ends the pause.
        """
        thread_pool = self._pipeline.thread_pool
        already = thread_pool is None or thread_pool.paused
        if thread_pool is not None:
            thread_pool.pause()
        try:
            yield
        finally:
            self._clocks.pause()
            if thread_pool is not None and not already:
                thread_pool.resume()

    def stop(self) -> None:
        """Let threads end after the work in their hands, and close what can be opened again where it was.

        The next batch asked for starts both again. A thread that waits for a batch meanwhile gets a
        RuntimeError, and can go on.
        """
        self._pipeline.stop()

    def close(self, wait_s: float | None = None) -> None:
        """End all threads and let go of the source; the loader can't be iterated any more.

        Args:
            wait_s: for threads that are in a call of the source's, at most; those that are still in it are
                left behind with a RuntimeWarning. By default as long as it takes.
        """
        self._closed = True
        self._ahead = None
        if self._finalizer.detach() is not None:
            self._pipeline.close(wait_s)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "EchoLoader: its threads and its source can't be shared or sent, so no copy or pickle; make "
            "another with the same arguments (in each process its own), and give it state_dict()"
        )

    def __enter__(self) -> "EchoLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class EchoIterator:
    """The iterator of an EchoLoader; all iterators of one share its position.

    When the newest is abandoned, the loader stops; what its threads have read ahead is kept.
    """

    _number = -1  # of one that an interrupt has left unmade

    def __init__(self, loader: EchoLoader, number: int) -> None:
        self._warned = False
        self._loader, self._number = loader, number

    def __iter__(self) -> "EchoIterator":
        return self

    def __next__(self) -> Any:
        if self._number != self._loader._iterators_made and not self._warned:
            self._warned = True
            warnings.warn(
                "an EchoLoader has one position, which its iterators share: this one takes batches from a "
                "newer one; make a second EchoLoader to iterate twice at a time",
                stacklevel=2,
            )
        loader = self._loader
        batch, position = loader._next()
        before = loader._position, id(batch.content)
        # From here on the batch is the consumer's: no call may follow, in which an interrupt could lose it.
        loader._before, loader._position, loader._ahead = before, position, None
        return batch.content

    def __del__(self) -> None:
        # The garbage collector may come to an old one in the middle of a newer one's pass.
        if self._number >= 0 and self._number == self._loader._iterators_made:
            self._loader._abandoned()


_OWN_ARGUMENTS = [
    name for name in inspect.signature(EchoLoader).parameters if not name.startswith("arguments_")
]
