"""EchoLoader: data echoing as a drop-in for ``torch.utils.data.DataLoader``."""

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from adaecho.echo import settings as given
from adaecho.echo import state as saved
from adaecho.echo.batch.augment import Functions
from adaecho.echo.batch.batches import Batch
from adaecho.echo.batch.device import ToDevice
from adaecho.echo.lightning import holds_last_batch, resumed_at_end
from adaecho.echo.order.stream import AutoFactor
from adaecho.echo.pipeline import CLOSE_WAIT_S, Pipeline
from adaecho.echo.read import as_source, warn_if_unshared
from adaecho.echo.settings import Settings
from adaecho.echo.state import LoaderCursor
from adaecho.echo.stats import LoaderStats, Timers
from adaecho.echo.threads import Shutdown


class EchoLoader(LoaderStats):
    """Batches for SGD, with data echoing (Choi, Passos, Shallue, Dahl 2019, sections 2 and 3).

    The stages of each variant; every one has a single shuffle buffer of the same size::

        none                         read > decode > shuffle > augment > batch
        example_before_augmentation  read > decode > echo > shuffle > augment > batch
        example_after_augmentation   read > decode > augment > echo > shuffle > batch
        batch                        read > decode > shuffle > augment > batch > echo [> shuffle batches]

    All randomness is a function of (seed, fresh serial number, echo index, purpose): batches are the same
    for any ``num_workers`` and ``prefetch``, and after any resume. Iteration is endless unless ``epochs`` is
    given: epochs follow one another inside the stream and no batch is short; a second ``iter()`` continues.

    The first six arguments are what most loops need; the others follow by theme: examples, their order,
    speed, more of the echo, ranks.

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
        augment: ``augment(example, rng)`` with a NumPy generator keyed to the example and its repeat; or
            with ``augment.block(arrays, keys)``, vectorised; or of one argument, which draws from the global
            generators, seeded for each example. It returns a new object, or writes into arrays and tensors,
            of which each repeat has its own. A pair ``(once, each_time)`` of these is split by
            ``example_before_augmentation``: the first comes before the echo, once for each fresh example, the
            second after it. Elsewhere one follows the other.
        decode: ``decode(example)``, deterministic. Where it has ``for_augment(augment)``, that gives what
            decodes instead if the buffer holds encoded examples: it may do no more than the augment needs.
        collate: a list of examples to a batch in new memory; by default torch's, and tuples stay tuples. It
            must not draw from the global generators: ``collate(examples, rng)`` gets a generator keyed to the
            batch. One thread at a time calls it, unless it says ``thread_safe = True``.
        place: what the shuffle buffer and an echo before augmentation hold, the same batches either way:
            ``decoded`` decodes each fresh example once; ``encoded`` decodes after them, once for each
            repeat, and needs the memory of encoded examples alone. With ``max_bad_examples`` it also decodes
            each fresh example once on its way in, and drops the result, so that a bad one is still skipped.
            ``auto`` takes ``encoded`` where that costs nothing more (nothing echoed before augmentation, no
            bad examples allowed), or where a buffer of decoded examples as large as the source's first would
            take more than half of the free memory.
        max_bad_examples: undecodable examples to skip and list in ``bad_examples``; failures of machine and
            network are always raised.
        batch_length: examples in a whole batch, where its form (see ``batch.whole``) doesn't tell.
        order: where the source has a length: ``permutation`` (a new one for each epoch), ``shards`` (shuffled
            for each epoch and read through) or ``stored``. What can only be iterated has an order of its own.
        sampler: gives the rows of each pass, as a DataLoader's, in place of ``order``; see
            ``order.permutation.SampledOrder``.
        epochs: passes of each ``iter()``, which drain the buffer and may end with a short batch; None is
            endless. Every rank makes equally many batches: where its passes can't be shared out evenly, up
            to ``world_size - 1`` of their first examples come again at the end, as with DistributedSampler.
            With ``batch_shuffle_buffer`` each rank's short batch falls on a step of its own.
        drop_last: leave out a short batch at the end of an iteration, and of several ranks the remainder that
            can't be shared out evenly.
        seed: any integer, taken modulo 2**64.
        num_workers: worker processes, as in a DataLoader, which read a map-style dataset, keep its examples,
            decode and augment them; 0 works inline. They are threads where nothing needs processes: the
            source is arrays, iterated (which one thread does), or says ``thread_safe = True``, and so do
            ``decode`` and ``augment``, if there are any, or are vectorised. Processes are forked at the first
            batch of an iteration; without fork (macOS, Windows) what needs them works inline. Around
            something that works ahead by itself, as a DataLoader with workers, R needs 1 to be right.
        processes: worker processes in any case, for what is thread-safe but holds the interpreter's lock.
        prefetch: batches read ahead of the echo stage. None: two for each worker, as a DataLoader's.
        device: where the loader's threads put batches, beside the step; None leaves them on the CPU.
        batch_shuffle_buffer: batches, after batch echoing (paper, Fig. 7a); 0 repeats a batch at once.
        max_factor: bound of ``factor="auto"``.
        rank, world_size: this process's share; by default torch.distributed's, else 0 of 1. Not used with
            whole batches, which their maker has shared out.
        state_of_all_ranks: ``state_dict()`` holds the positions of all of torch.distributed's ranks, for
            checkpoints that one of them writes for all (Lightning, Fabric, Accelerate); all call it together.
        arguments_of_data_loader: other arguments that a DataLoader has. ``dataset``, ``shuffle``,
            ``collate_fn`` and ``prefetch_factor`` are taken for ``source``, ``order``, ``collate`` and
            ``prefetch``, others refused with what replaces them (docs/around-your-loader.md).

    Attributes:
        agree_on_R: what ``factor="auto"`` follows, as a function of this rank's R (None until known); may be
            assigned. All ranks call it after the same numbers of batches, so it may ask the others.

    Raises:
        ValueError: an argument can't be; the message names it, its value and the remedy.
        TypeError: neither this nor a DataLoader has such an argument.
    """

    _position = LoaderCursor()
    _ahead: Batch | None = None  # the next batch, made and not taken
    _before: tuple[LoaderCursor, int] | None = None  # where the last batch was taken, and its id
    _resumed = False  # from a state; the next iter() goes on with the iteration in progress
    _failed: Exception | None = None
    _closed = False
    _next_iteration: int | None = None  # that set_epoch asked for

    def __init__(
        self,
        source: Any = None,
        batch_size: int | None = 1,
        *,
        echo: str = "none",
        factor: float | str = 1.0,
        shuffle_buffer: int = 0,
        batch_shuffle_buffer: int = 0,
        decode: Callable[[Any], Any] | None = None,
        augment: Any = None,
        collate: Callable[..., Any] | None = None,
        sampler: Any = None,
        place: str = "auto",
        order: str = "permutation",
        epochs: int | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch: int | None = None,
        processes: bool = False,
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
        others = arguments_of_data_loader
        source = others.pop("dataset", source)
        if source is None:
            raise TypeError("EchoLoader needs a source of examples: EchoLoader(dataset, batch_size)")
        order = given.order_asked_for(others, order, sampler, shuffle_buffer)
        if prefetch is None and others.get("prefetch_factor") is not None:
            prefetch = others["prefetch_factor"] * num_workers
        prefetch = None if prefetch is None else given.whole("prefetch", prefetch, 0)
        collate = collate or others.get("collate_fn")
        # Neither given a part nor told one by torch.distributed.
        self._made_alone = (rank, world_size) == (None, None) and not given.is_distributed()
        self.settings = settings = Settings(
            batch_size, echo, factor, shuffle_buffer, batch_shuffle_buffer, order, epochs, seed,
            *given.share(rank, world_size), max_factor, max_bad_examples, drop_last, sampler,
        )  # fmt: skip
        functions = Functions(decode, augment, collate, batch_length, settings, place)
        self._dataset, self._sampler, self._device = source, sampler, ToDevice(device)
        self._state_of_all_ranks = state_of_all_ranks
        readable = as_source(source, settings.seed, batch_size=batch_size, world_size=settings.world_size)
        settings.check_source(readable, others.get("shuffle"))
        self._pipeline = Pipeline(
            readable, settings, functions, sampler, self._device,
            num_workers=num_workers, prefetch=prefetch, processes=processes,
        )  # fmt: skip
        self._clocks = Timers(self._pipeline.counters)
        self._auto = AutoFactor(self.settings.max_factor) if factor == "auto" else None
        self.agree_on_R: Callable[[float | None], float | None] = lambda mine: mine
        self._taking: dict[str, int] = {}  # the thread that takes a batch
        self._finalizer = weakref.finalize(self, self._pipeline.forgotten)
        self._finalizer.atexit = False  # the pipelines see to that themselves
        if epochs is None:
            self._position, self._pipeline.run = self._pipeline.begin(self._position, 1)
            self._pipeline.left = None

    # Iteration. One rule for interruptions: a run is taken out while it makes a batch. Whatever ends that, an
    # error or Ctrl-C, the run is gone with all its threads and caches, and another begins at the position.

    def __iter__(self) -> Iterator[Any]:
        self._check_process()
        end = resumed_at_end(self)
        if end is not None:
            if end.state is not None:
                self.load_state_dict(end.state)
            self._resumed = False  # what was left of that epoch's pass is left out, as without the resume
            if end.is_over:
                return iter(())
        pipeline, iterator = self._pipeline, EchoIterator(self)
        if self._resumed and self._position.in_pass and not pipeline.source.thread_safe:
            self._resume()  # with what the dataset has been told since, its epoch perhaps
        position, run, left = self._position, pipeline.run, pipeline.left
        if self.settings.epochs is not None and not (self._resumed and position.in_pass):
            self._ahead = None
            self._clocks.pause()
            (position, run), left = pipeline.begin(position, self._upcoming), None
        # In one statement: the iteration has begun, or not.
        (
            self._position, pipeline.run, pipeline.left, self._before, self._failed, self._taking,
            self._resumed, self._next_iteration, self._newest,
        ) = position, run, left, None, None, {}, False, None, weakref.ref(iterator)  # fmt: skip
        return iterator

    def _next(self) -> Batch:
        """The next batch. It is taken once its position is the loader's."""
        batch = self._look_ahead()
        if batch is None:
            raise StopIteration
        self._clocks.step()
        if self._auto is not None and self._auto.due():
            self._auto.follow(self.agree_on_R(self._clocks.ratio), self._pipeline.streams.factor)
        self._device.received(batch.content)
        return batch

    def _look_ahead(self) -> Batch | None:
        """The next batch, made if it isn't at hand; None at the end of the iteration."""
        if self._ahead is not None:
            return self._ahead
        here = threading.get_ident()
        if self._taking.setdefault("thread", here) != here:
            raise RuntimeError(
                "another thread is taking a batch of this EchoLoader: one thread takes its batches; let "
                "that one hand them on, or make a loader for each (rank=, world_size= share the examples out)"
            )
        try:
            self._check_can_go_on()
            return self._made()
        finally:
            self._taking.clear()

    def _made(self) -> Batch | None:
        pipeline, start = self._pipeline, time.perf_counter()
        try:
            if not self._position.in_pass:
                return None
            if pipeline.run is None:
                self._resume()
            run, pipeline.run = pipeline.run, None
            assert run is not None
            batch = run.next()
        except Shutdown:
            raise RuntimeError(
                "another thread closed this EchoLoader, which was making its next batch"
            ) from None
        except BaseException as error:
            if isinstance(error, Exception):
                self._failed = error
            pipeline.stop()
            raise
        self._clocks.waited(start)
        position = self._position
        if batch is None:
            position = position.ended(run.queue.index, whole=pipeline.streams.whole)
        self._position, self._ahead, pipeline.run = position, batch, run
        return batch

    def _resume(self) -> None:
        """Have a run at the position, where the one before was given up."""
        self._ahead = None
        self._clocks.pause()
        pipeline = self._pipeline
        (self._position, pipeline.run), pipeline.left = pipeline.resume(self._position), None

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
        pool = self._pipeline.pool
        if self._position.in_pass and pool is not None:
            pool.check_process()
            pool.resume_for_caller()

    def __len__(self) -> int:
        """Batches of one iteration: of the one in progress, else, or once it is given up, of the next.

        Raises:
            TypeError: it is endless, or not known.
        """
        self._check_alone()
        position = self._position
        if position.in_pass and (self._iterating or self._resumed):
            return self._num_batches(
                position.iteration, position.first_index, position.first_number, begun=True
            )
        return self._num_batches(self._upcoming, position.next_index, position.next_number, begun=False)

    @property
    def _upcoming(self) -> int:
        """The iteration that begins next."""
        return self._position.iteration + 1 if self._next_iteration is None else self._next_iteration

    def next_fresh_examples(self) -> int:
        """What ``fresh_examples`` will be once the next batch has been taken; waits for that batch."""
        batch = self._look_ahead()
        return self.fresh_examples if batch is None else batch.position.fresh_examples

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
            Numbers, strings and lists, few whatever the buffers hold: what ``torch.load(weights_only=True)``
            accepts.
        """
        self._check_process()
        last = self._before
        taken = last[0] if last is not None and holds_last_batch(last[1]) else self._position
        state = {**self._pipeline.state(taken), "timers": self._clocks.state()}
        return saved.of_all_ranks(state) if self._state_of_all_ranks else state

    def _check_alone(self) -> None:
        if self._made_alone and self.batch_size is not None:
            given.check_still_alone()
        elif self._made_alone and given.is_distributed():
            self._made_alone = False  # whole batches, which their maker is to share out
            warn_if_unshared(self._dataset, given.share(None, None)[1])

    def _check_process(self) -> None:
        self._check_alone()
        if self._pipeline.pool is not None:
            self._pipeline.pool.check_process()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to a position; what has to be read again for it is counted in ``reread_examples``.

        What lay in a buffer is read when it first leaves, of what can only be iterated at once. The factor
        may be another one; between two iterations so may ranks, batch size, echo and buffers.

        Raises:
            ValueError: the state is another loader's; the message names the argument that differs.
        """
        self._check_process()
        state, pipeline = saved.of_this_rank(state), self._pipeline
        saved.check(state, self.settings, pipeline.source_length, pipeline.permutation)
        self._position, self._failed, self._before = pipeline.restore(state), None, None
        self._resume()
        self._clocks.load_state(state["timers"])
        self._resumed, self._next_iteration = True, None
        if self.settings.epochs is not None and self._position.in_pass:
            # A position after the last batch of an iteration: the next iter() begins a new one. What lies
            # behind that batch has not been met yet.
            fresh_examples = self._position.fresh_examples
            if self._look_ahead() is None:
                self._position = self._position._replace(fresh_examples=fresh_examples)

    def set_epoch(self, epoch: int) -> None:
        """Have the next ``iter()`` begin iteration number ``epoch``, from 0, as of ``DistributedSampler``.

        Each ``iter()`` goes on to the next by itself: to call this with the number of the epoch before it
        changes nothing, nor in an iteration restored from a state, or without ``epochs=``. A new loader
        around what is only iterated draws as in iteration 0, with a warning: give it another ``seed``.
        """
        self._next_iteration = given.whole("epoch", epoch, 0) + 1
        if self._position.iteration != self._next_iteration:
            self._resumed = False

    @property
    def sampler(self) -> Any:
        """What was given as one; there is no such attribute otherwise, which is what trainers look for."""
        if self._sampler is None:
            raise AttributeError("'EchoLoader' object has no attribute 'sampler'")
        return self._sampler

    # Lifetime

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No upstream work while inside, e.g. during an evaluation or a checkpoint; waits for work under way.

        The step it falls into is not clocked. A batch that the pausing thread takes inside ends the pause.
        """
        pool = self._pipeline.pool
        already = pool is None or pool.paused_by is not None
        if pool is not None:
            pool.pause()
        try:
            yield
        finally:
            self._clocks.pause()
            if pool is not None and not already:
                pool.resume()

    def close(self, wait_s: float | None = None) -> None:
        """End all threads and processes, and let go of the source; the loader can't be iterated any more.

        Args:
            wait_s: for threads that are in a call of the source's, at most; those that are still in it are
                left behind with a RuntimeWarning. By default 10 seconds.
        """
        self._closed, self._ahead = True, None
        if self._finalizer.detach() is not None:
            self._pipeline.close(CLOSE_WAIT_S if wait_s is None else wait_s)

    def __enter__(self) -> "EchoLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class EchoIterator:
    """The iterator of an EchoLoader; all iterators of one share its position.

    When the newest is given up, what has been read ahead is kept for the next one.
    """

    def __init__(self, loader: EchoLoader) -> None:
        self._loader, self._warned = loader, False

    def __iter__(self) -> "EchoIterator":
        return self

    def __next__(self) -> Any:
        loader = self._loader
        newest = loader._newest
        if not self._warned and newest is not None and newest() is not self:
            self._warned = True
            warnings.warn(
                "an EchoLoader has one position, which its iterators share: this one takes batches from a "
                "newer one; make a second EchoLoader to iterate twice at a time",
                stacklevel=2,
            )
        batch = loader._next()
        before = loader._position, id(batch.content)
        # From here on the batch is the consumer's: no call may follow, in which an interrupt could lose it.
        loader._before, loader._position, loader._ahead, loader._resumed = before, batch.position, None, False
        return batch.content
