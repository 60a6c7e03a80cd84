"""EchoLoader: data echoing as a drop-in for ``torch.utils.data.DataLoader``."""

import inspect
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from adaecho.echo import state as saved
from adaecho.echo.batch.batches import Position, Ready
from adaecho.echo.batch.device import ToDevice
from adaecho.echo.data_loader import (
    NO_SOURCE,
    Taken,
    absent,
    check_iterable,
    check_sampler,
    check_source,
    source_of,
)
from adaecho.echo.gauges import Gauges
from adaecho.echo.order.factor import AutoFactor
from adaecho.echo.pipeline import Pipeline, Work, choose_place
from adaecho.echo.read.sources import IterableSource, as_source
from adaecho.echo.read.wrapped import keyed, warn_if_unshared
from adaecho.echo.settings import (
    Settings,
    check_functions,
    check_place,
    check_still_alone,
    check_whole_batches,
    check_workers,
    is_distributed,
    one_of,
    share,
    whole,
)
from adaecho.echo.threads.timers import Timers, works_ahead
from adaecho.echo.threads.workers import Interrupted
from adaecho.echo.variants import RESTORES

_EXIT_WAIT_S = 10.0  # for a source that does not answer, when the process ends


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
            for which it must pickle.
        collate: a list of examples to a batch; by default torch's rules, and tuples stay tuples.
        sampler: gives the rows of each pass, as a DataLoader's, in place of ``order``; see
            ``order.sampled.SampledOrder``.
        place: what the shuffle buffer and an echo before augmentation hold, the same batches either way:
            ``decoded`` decodes each fresh example once; ``encoded`` decodes after them, once for each
            repeat, and needs the memory of encoded examples alone. With ``max_bad_examples`` it also decodes
            each fresh example once on its way in, and drops the result, so that a bad one is still skipped.
            ``auto`` takes ``encoded`` where that costs nothing more (nothing echoed before augmentation, no
            bad examples allowed), or where a buffer of decoded examples as large as the source's first would
            take more than half of the free memory.
        restore: for sources that can only be iterated: ``replay`` reads what the buffer held again, from its
            oldest example on (about B (ln B + 0.6) examples back for a buffer of B); ``snapshot`` puts the
            contents of the buffer into the state and only passes over what was read.
        order: where the source has a length: ``permutation`` (a new one for each epoch), ``shards`` (shuffled
            for each epoch and read through) or ``stored``. What can only be iterated has an order of its own.
        epochs: passes of each ``iter()``, which drain the buffer and may end with a short batch; None is
            endless. Every rank makes equally many batches: where its passes can't be shared out evenly, up
            to ``world_size - 1`` of their first examples come again at the end, as with DistributedSampler.
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
        restore: str = "replay",
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
        taken = Taken(order, collate, whole("prefetch", prefetch, 0))
        taken.take(
            arguments_of_data_loader,
            num_workers=num_workers,
            shuffle_buffer=shuffle_buffer,
            names=_OWN_ARGUMENTS,
        )
        order, collate, prefetch = taken.order, taken.collate, whole("prefetch", taken.prefetch, 0)
        self.settings = Settings(
            batch_size, echo, factor, shuffle_buffer, batch_shuffle_buffer, order, epochs, seed, rank,
            world_size, max_factor, max_bad_examples, drop_last,
            None if sampler is None else f"{type(sampler).__name__} of {len(sampler)}",
        )  # fmt: skip
        self.settings.warn_of_idle_echo()
        check_functions(decode=decode, collate=collate, batch_length=batch_length)
        check_place(place, decode, self.settings)
        check_whole_batches(batch_size, augment, collate, batch_length)
        if batch_size is None:
            warn_if_unshared(source, world_size)
        one_of("restore", restore, RESTORES)
        self._device = ToDevice(device)
        found = as_source(keyed(source, self.settings.seed))
        place = self._place = choose_place(place, decode, found, self.settings)
        if isinstance(found, IterableSource):
            check_iterable(found.name, shuffle=shuffle, sampler=sampler)
        self._pipeline = Pipeline(
            found,
            self.settings,
            Work(
                decode, augment, collate, batch_length, sampler, place, self._device,
                snapshots=restore == "snapshot", num_workers=num_workers, prefetch=prefetch,
                works_ahead=works_ahead(source),
            ),
        )  # fmt: skip
        self._stages = self._pipeline.stages
        self._ahead: deque[Ready] = deque()
        self._position = Position()
        self._clocks = Timers(self._pipeline.counters, self._pipeline.deliveries)
        self._auto = AutoFactor(self.settings.max_factor) if factor == "auto" else None
        self.agree_on_R: Callable[[float | None], float | None] = lambda mine: mine
        self._failed: Exception | None = None
        self._closed = False
        self._iterators_made = 0
        self._iterating = False
        self._next_iteration: int | None = None  # that set_epoch asked for
        # Also at the interpreter's exit, before daemon threads would be cut off in the middle.
        self._finalizer = weakref.finalize(self, self._pipeline.close, _EXIT_WAIT_S)
        if epochs is None:
            self._begin()

    # Iteration

    def __iter__(self) -> "EchoIterator":
        self._check_process()
        position = self._position
        if self.settings.epochs is not None and not (position.restored and position.in_pass):
            self._begin()
        elif self._failed is not None:
            self.load_state_dict(self._own_state())  # what threads read ahead of the error is gone
        self._position.restored, self._next_iteration = False, None
        self._iterators_made += 1
        self._iterating = True
        return EchoIterator(self, self._iterators_made)

    def _begin(self) -> None:
        """Begin an iteration, giving up the one before if it hasn't ended."""
        self._failed = None
        self._pipeline.halt()
        self._clocks.pause()
        self._ahead.clear()
        upcoming, self._next_iteration = self._upcoming, None
        self._stages.begin(self._position, upcoming, self.settings.epochs)

    def _abandoned(self) -> None:
        """The newest iterator is gone."""
        self._iterating = False
        self.stop()

    def _next(self) -> Any:
        if not self._look_ahead():
            raise StopIteration
        # An interrupt (Ctrl-C) may fall after any call. The batch stays at hand until the last of them, and
        # what is done here may be done again for it.
        ready = self._ahead[0]
        self._position.take(ready)
        for stage in self._stages.all:
            stage.consumed(ready)
        self._clocks.step()
        if self._auto is not None and self._auto.due():
            self._auto.follow(self.agree_on_R(self._clocks.ratio), self._stages.factor)
        self._device.received(ready.batch)
        del self._ahead[0]
        return ready.batch

    def _look_ahead(self) -> bool:
        """Have the next batch at hand; False at the end of the iteration."""
        if self._ahead:
            return True
        if self._closed:
            raise RuntimeError("this EchoLoader was closed; make another one")
        if self._failed is not None:
            again = (
                "goes on after the last batch" if self.settings.epochs is None else "begins a new iteration"
            )
            raise RuntimeError(
                f"this EchoLoader was stopped by an error ({type(self._failed).__name__}); "
                f"iter(loader) {again}, "
                "loader.load_state_dict(state) goes on from a state"
            ) from self._failed
        if not self._position.in_pass:
            return False
        if self._pipeline.thread_pool is not None:
            self._pipeline.thread_pool.check_process()
            self._pipeline.thread_pool.check_not_paused_by_caller()
        start = time.perf_counter()
        try:
            ready = self._pipeline.next()
            if ready is not None:
                self._ahead.append(ready)
        except Interrupted:
            does = "closed it" if self._closed else "called stop(): asking again goes on"
            raise RuntimeError(f"while this EchoLoader made its next batch, another thread {does}") from None
        except BaseException as error:
            if isinstance(error, Exception):
                self._failed = error
            self.stop()
            raise
        self._clocks.waited(start)
        if ready is None:
            self._position.end(self._stages.queue.index, whole=self._stages.made.whole)
        return ready is not None

    def __len__(self) -> int:
        """Batches of one iteration: of the one in progress, else, or once it is given up, of the next.

        Raises:
            TypeError: it is endless, or not known.
        """
        if self._made_alone and self.batch_size is not None:
            check_still_alone()
        elif self._made_alone and is_distributed():  # whole batches, which their maker is to share out
            self._made_alone = False
            warn_if_unshared(self._dataset, share(None, None)[1])
        position = self._position
        if position.in_pass and (self._iterating or position.restored):
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
        return self._ahead[0].fresh_examples if self._look_ahead() else self.fresh_examples

    def peek(self) -> Any:
        """The next batch, which stays the next one; waits for it.

        Raises:
            StopIteration: the iteration is at its end.
        """
        if not self._look_ahead():
            raise StopIteration
        self._device.received(self._ahead[0].batch)
        return self._ahead[0].batch

    # State

    def state_dict(self) -> dict[str, Any]:
        """The position just after the last batch taken, whatever has been read ahead; not while one is taken.

        Returns:
            Numbers, strings, lists and tensors of identities (8 bytes for each buffered example), with
            ``restore="snapshot"`` of contents too: what ``torch.load(weights_only=True)`` accepts.
        """
        self._check_process()
        state = self._own_state()
        return saved.of_all_ranks(state) if self._state_of_all_ranks else state

    def _own_state(self) -> dict[str, Any]:
        if not self._stages.snapshots:
            return saved.save(self.settings, self._stages, self._position, self._clocks)
        with self.paused():
            state = saved.save(self.settings, self._stages, self._position, self._clocks)
            return {**state, "place": self._place}

    def _check_process(self) -> None:
        if self._made_alone and self.batch_size is not None:
            check_still_alone()
        elif self._made_alone and is_distributed():  # whole batches, which their maker is to share out
            self._made_alone = False
            warn_if_unshared(self._dataset, share(None, None)[1])
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
        if "contents" in state and state.get("place", self._place) != self._place:
            raise ValueError(
                f"load_state_dict: place was {state['place']!r} and is {self._place!r} now, but a snapshot "
                f"holds contents in that form; give place={state['place']!r}"
            )
        self._pipeline.halt()
        self._ahead.clear()
        self._failed = None
        self._position = saved.restore(state, self.settings, self._stages, self._clocks)
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
        position = self._position
        self._next_iteration = whole("epoch", epoch, 0) + 1
        if position.iteration != self._next_iteration:
            position.restored = False

    if not TYPE_CHECKING:  # for type checkers there are no other attributes

        def __getattr__(self, name: str) -> Any:
            if name == "sampler" and self.__dict__.get("_sampler") is not None:
                return self._sampler
            raise AttributeError(absent(name))

    # Lifetime

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No upstream work while inside, e.g. during an evaluation or a checkpoint; waits for work under way.

        The step it falls into is not clocked. With ``num_workers`` the thread that paused can't take a
        batch inside: RuntimeError.
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
        self._ahead.clear()
        if self._finalizer.detach() is not None:
            self._pipeline.close(wait_s)

    def __enter__(self) -> "EchoLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class EchoIterator:
    """The iterator of an EchoLoader; all iterators of one share its position.

    When the newest is abandoned, the loader stops; what its threads have read ahead is kept.
    """

    def __init__(self, loader: EchoLoader, number: int) -> None:
        self._loader, self._number = loader, number
        self._warned = False

    def __iter__(self) -> "EchoIterator":
        return self

    def __next__(self) -> Any:
        if self._number != self._loader._iterators_made and not self._warned:
            self._warned = True
            warnings.warn(
                "an EchoLoader has one position, which its iterators share: this one takes batches "
                "from a newer one; "
                "make a second EchoLoader to iterate twice at a time",
                stacklevel=2,
            )
        return self._loader._next()

    def __del__(self) -> None:
        # The garbage collector may come to an old one in the middle of a newer one's pass.
        if self._number == self._loader._iterators_made:
            self._loader._abandoned()


_OWN_ARGUMENTS = [
    name for name in inspect.signature(EchoLoader).parameters if not name.startswith("arguments_")
]
