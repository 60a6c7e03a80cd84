"""EchoLoader: data echoing as a drop-in for ``torch.utils.data.DataLoader``."""

import threading
import time
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
from adaecho.echo.threads import WAITS, Shutdown, tell_long_waits


class EchoLoader(LoaderStats):
    """Load batches for SGD with data echoing (Choi, Passos, Shallue, Dahl 2019, sections 2 and 3).

    Each variant has one shuffle buffer of the same size::

        none                         read > decode > shuffle > augment > batch
        example_before_augmentation  read > decode > echo > shuffle > augment > batch
        example_after_augmentation   read > decode > augment > echo > shuffle > batch
        batch                        read > decode > shuffle > augment > batch > echo [> shuffle batches]

    All randomness is a function of the seed, the serial number of the fresh example, the echo index and the
    purpose. Batches are therefore the same for any ``num_workers`` and ``prefetch``, and after any resume.
    Iteration is endless unless ``epochs`` is given. Epochs follow one another inside the stream, so that no
    batch between them is short. A second ``iter()`` continues the stream.

    Most loops need only the first six arguments.

    Args:
        source: arrays or CPU tensors (alone, in a dict or in a tuple), a map-style dataset, an iterable, or a
            function that returns an iterator for each epoch.
        batch_size: examples per batch, 1 by default as in a DataLoader. With None the source yields whole
            batches, e.g. a DataLoader. The loader passes these on in the source's order or repeats them
            with ``echo="batch"``. ``decode`` then receives a whole batch.
        echo: ``none``, ``batch``, ``example_before_augmentation`` or ``example_after_augmentation``.
        factor: echoing factor e >= 1, the number of times each item leaves the echo stage. If e is not an
            integer, each item is repeated floor(e) or ceil(e) times, at random, e times on average. With
            ``auto`` the factor follows R, between 1 and ``max_factor``.
        shuffle_buffer: examples in the shuffle buffer. With 0 only ``order`` shuffles.
        augment: ``augment(example, rng)`` with a NumPy generator keyed to the example and its repeat. An
            object with ``augment.block(arrays, keys)`` is vectorised. ``augment(example)`` draws from the
            global generators, which the loader seeds for each example. An augmentation returns a new object
            or writes into arrays and tensors; each repeat has separate copies of these. A pair
            ``(once, each_time)`` splits the augmentation under ``example_before_augmentation``: ``once``
            runs before the echo, ``each_time`` after it. The other variants run one after the other.
        decode: ``decode(example)``, deterministic. If the buffer holds encoded examples and ``decode`` has
            ``for_augment(augment)``, the loader decodes with its result. That function may decode only the
            part that the augmentation needs.
        collate: turns a list of examples into a batch in new memory; by default torch's ``default_collate``,
            except that tuples stay tuples. It must not draw from the global generators:
            ``collate(examples, rng)`` receives a generator keyed to the batch. One thread at a time calls
            it, unless it declares ``thread_safe = True``.
        buffer_format: the form of examples in the shuffle buffer and in an echo before augmentation.
            Batches are the same in either form. ``decoded`` decodes each fresh example once. ``encoded``
            decodes each repeat and needs memory for encoded examples only; with ``max_bad_examples`` it
            also decodes each fresh example once on entry, to skip a bad one. ``auto`` chooses ``encoded``
            if that decodes no more often (no echo before augmentation, ``max_bad_examples=0``), or if
            decoded examples as large as the first would take more than half of the free memory.
        max_bad_examples: number of undecodable examples to skip and list in ``bad_examples``. Errors of the
            machine or the network are always raised.
        batch_length: function that returns the number of examples in a whole batch. Needed only if the form
            of the batch does not show it.
        order: order of a source with a length: ``permutation`` (a new one for each epoch), ``shards``
            (shards shuffled for each epoch, each read in order) or ``sequential``. An iterable has its own
            order.
        sampler: yields the rows of each epoch, as in a DataLoader. It replaces ``order``.
        epochs: number of epochs of each ``iter()``. The last one drains the buffer and may end with a short
            batch. None is endless. All ranks make the same number of batches: if an epoch does not divide
            evenly, up to ``world_size - 1`` of its first examples are repeated at the end, as with
            DistributedSampler. With ``batch_shuffle_buffer`` the short batch falls on different steps of
            different ranks.
        drop_last: drop a short last batch, and the examples that do not divide evenly among ranks.
        seed: any integer, used modulo 2**64.
        num_workers: number of worker processes, as in a DataLoader. They read a map-style dataset, cache,
            decode and augment its examples. 0 works inline. Workers are threads if the source consists of
            arrays, is an iterable (read by one thread), or declares ``thread_safe = True``, and ``decode``
            and ``augment`` are vectorised or declare it too. Processes are forked at the first batch of an
            iteration. Without fork (macOS, Windows) code that needs processes works inline. R around a source
            with its own read-ahead, e.g. a DataLoader with workers, is correct only with at least 1 worker.
        processes: use worker processes even for thread-safe code, e.g. if that code holds the GIL.
        prefetch: batches to read ahead of the echo stage. None: two for each worker, as in a DataLoader.
        device: device to which the loader's threads copy batches during the step. None leaves batches on
            the CPU.
        batch_shuffle_buffer: batches in a shuffle buffer after batch echoing (paper, Fig. 7a). With 0 the
            repeats of a batch follow one another.
        max_factor: upper bound for ``factor="auto"``.
        rank, world_size: this process's share of the examples; by default those of torch.distributed, else
            0 and 1. Not used with whole batches, which their source has already sharded.
        state_of_all_ranks: ``state_dict()`` returns the cursors of all ranks of torch.distributed, for
            checkpoints that one rank writes (Lightning, Fabric, Accelerate). All ranks call it together.
        arguments_of_data_loader: other arguments of a DataLoader. ``dataset``, ``shuffle``, ``collate_fn``
            and ``prefetch_factor`` stand for ``source``, ``order``, ``collate`` and ``prefetch``. The loader
            refuses the rest and names the replacement (docs/around-your-loader.md).

    Attributes:
        sync_R: function of this rank's R (None until known) that returns the R that ``factor="auto"``
            follows. Assign one to agree across ranks: all ranks call it after the same number of batches.

    Raises:
        ValueError: an argument is invalid; the message names it, its value and the remedy.
        TypeError: neither EchoLoader nor DataLoader has this argument.
    """

    _position = LoaderCursor()
    _ahead: Batch | None = None  # the next batch, if it has been made
    _before: tuple[LoaderCursor, int] | None = None  # cursor before the last batch, and its id
    _resumed = False  # a state was loaded: the next iter() continues its iteration
    _failed: Exception | None = None
    _closed = False
    _next_iteration: int | None = None  # requested by set_epoch

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
        buffer_format: str = "auto",
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
        # Neither the caller nor torch.distributed gave a rank.
        self._made_alone = (rank, world_size) == (None, None) and not given.is_distributed()
        self.settings = settings = Settings(
            batch_size, echo, factor, shuffle_buffer, batch_shuffle_buffer, order, epochs, seed,
            *given.share(rank, world_size), max_factor, max_bad_examples, drop_last, sampler,
        )  # fmt: skip
        functions = Functions(decode, augment, collate, batch_length, settings, buffer_format)
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
        self.sync_R: Callable[[float | None], float | None] = lambda mine: mine
        self._taking: dict[str, int] = {}  # the thread that requests a batch
        self._finalizer = weakref.finalize(self, self._pipeline.forgotten)
        self._finalizer.atexit = False  # the atexit handler closes the pipelines
        if epochs is None:
            self._position, self._pipeline.run = self._pipeline.begin(self._position, 1)
            self._pipeline.left = None

    # Iteration. One rule for interruptions: the loader detaches its run while that makes a batch. After an
    # error or Ctrl-C the run is discarded with its threads and caches, and a new run begins at the cursor.

    def __iter__(self) -> Iterator[Any]:
        self._check_process()
        end = resumed_at_end(self)
        if end is not None:
            if end.state is not None:
                self.load_state_dict(end.state)
            self._resumed = False  # skip the rest of that epoch, as without the resume
            if end.is_over:
                return iter(())
        pipeline, iterator = self._pipeline, EchoIterator(self)
        if self._resumed and self._position.in_pass and not pipeline.source.thread_safe:
            self._resume()  # a later set_epoch of the dataset counts
        position, run, left = self._position, pipeline.run, pipeline.left
        if self.settings.epochs is not None and not (self._resumed and position.in_pass):
            self._ahead = None
            self._clocks.pause()
            (position, run), left = pipeline.begin(position, self._upcoming), None
        # One statement, so that an interrupt leaves either the old iteration or the new one.
        (
            self._position, pipeline.run, pipeline.left, self._before, self._failed, self._taking,
            self._resumed, self._next_iteration, self._newest,
        ) = position, run, left, None, None, {}, False, None, weakref.ref(iterator)  # fmt: skip
        return iterator

    def _next(self) -> Batch:
        """Return the next batch; the caller then moves the cursor."""
        batch = self._look_ahead()
        if batch is None:
            raise StopIteration
        self._clocks.step()
        if self._auto is not None and self._auto.due():
            self._auto.follow(self.sync_R(self._clocks.ratio), self._pipeline.streams.factor)
        self._device.received(batch.content)
        return batch

    def _look_ahead(self) -> Batch | None:
        """Make the next batch unless it has been made; None at the end of the iteration."""
        if self._ahead is not None:
            return self._ahead
        here = threading.get_ident()
        if self._taking.setdefault("thread", here) != here:
            raise RuntimeError(
                "another thread is requesting a batch from this EchoLoader: only one thread may request "
                "batches; pass them on from that thread, or make one loader per thread (rank=, world_size=)"
            )
        try:
            self._check_can_go_on()
            return self._made()
        finally:
            self._taking.clear()

    def _made(self) -> Batch | None:
        pipeline, start = self._pipeline, time.perf_counter()
        tell_long_waits()
        WAITS[threading.get_ident()] = time.monotonic(), pipeline.reason_to_wait
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
                "another thread closed this EchoLoader while it was making its next batch"
            ) from None
        except BaseException as error:
            if isinstance(error, Exception):
                self._failed = error
            pipeline.stop()
            raise
        finally:
            WAITS.pop(threading.get_ident(), None)
        self._clocks.waited(start)
        position = self._position
        if batch is None:
            position = position.ended(run.queue.index, whole=pipeline.streams.whole)
        self._position, self._ahead, pipeline.run = position, batch, run
        return batch

    def _resume(self) -> None:
        """Replace the run by a new one at the cursor."""
        self._ahead = None
        self._clocks.pause()
        pipeline = self._pipeline
        (self._position, pipeline.run), pipeline.left = pipeline.resume(self._position), None

    def _check_can_go_on(self) -> None:
        if self._closed:
            raise RuntimeError("this EchoLoader was closed; create a new one")
        if self._failed is not None:
            again = (
                "continues after the last batch" if self.settings.epochs is None else "begins a new iteration"
            )
            raise RuntimeError(
                f"an error stopped this EchoLoader ({type(self._failed).__name__}); iter(loader) {again}, "
                "loader.load_state_dict(state) continues from a state"
            ) from self._failed
        pool = self._pipeline.pool
        if self._position.in_pass and pool is not None:
            pool.check_process()
            pool.resume_for_caller()

    def __len__(self) -> int:
        """Return the number of batches of the current iteration, or of the next if none is active.

        Raises:
            TypeError: iteration is endless, or the number is unknown.
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
        """Number of the next iteration."""
        return self._position.iteration + 1 if self._next_iteration is None else self._next_iteration

    def next_fresh_examples(self) -> int:
        """Return the value that ``fresh_examples`` will have after the next batch; waits for that batch."""
        batch = self._look_ahead()
        return self.fresh_examples if batch is None else batch.position.fresh_examples

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor after the last batch that ``next()`` returned; read-ahead does not count.

        Any thread may call this at any time.

        Returns:
            A flat dict from names to numbers, strings and lists of numbers, a few kilobytes for any buffer.
            ``torch.load(weights_only=True)``, JSON and ``torch.distributed.checkpoint`` can store it.
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
            self._made_alone = False  # the source shards whole batches
            warn_if_unshared(self._dataset, given.share(None, None)[1])

    def _check_process(self) -> None:
        self._check_alone()
        if self._pipeline.pool is not None:
            self._pipeline.pool.check_process()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a cursor. The next batch is the one that followed the state.

        Before that batch the loader reads the examples of its buffers again and counts them in
        ``reread_examples``. The factor may differ from the saved one. Between two iterations the ranks,
        batch size, echo and buffers may differ too.

        Raises:
            ValueError: the state is of a loader with other settings or another source; the message names the
                argument that differs.
        """
        self._check_process()
        state, pipeline = saved.of_this_rank(state), self._pipeline
        saved.check(state, self.settings, pipeline.source_length)
        self._position, self._failed, self._before = pipeline.restore(state), None, None
        self._resume()
        self._clocks.load_state(state["timers"])
        self._resumed, self._next_iteration = True, None
        if self.settings.epochs is not None and self._position.in_pass:
            # After the last batch of an iteration the next iter() begins a new one. Bad examples behind that
            # batch must not count yet.
            fresh_examples = self._position.fresh_examples
            if self._look_ahead() is None:
                self._position = self._position._replace(fresh_examples=fresh_examples)

    def set_epoch(self, epoch: int) -> None:
        """Begin iteration number ``epoch``, counted from 0, at the next ``iter()``.

        Calling this is optional, unlike with DistributedSampler: each ``iter()`` begins the next iteration.
        It has no effect without ``epochs=``, or in the iteration that a state restored. A new loader around
        an iterable warns and draws as in iteration 0; pass another ``seed`` instead.
        """
        self._next_iteration = given.whole("epoch", epoch, 0) + 1
        if self._position.iteration != self._next_iteration:
            self._resumed = False

    @property
    def sampler(self) -> Any:
        """The given sampler. Without a sampler the attribute does not exist, which trainers check."""
        if self._sampler is None:
            raise AttributeError("'EchoLoader' object has no attribute 'sampler'")
        return self._sampler

    # Lifetime

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause all work of the loader, e.g. during an evaluation; waits for work in progress.

        The current step is not timed. If the pausing thread requests a batch, the pause ends.
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
        """Stop all threads and processes and close the source. The loader cannot be iterated afterwards.

        Args:
            wait_s: longest wait for threads inside a call of the source, in seconds; 10 by default. A thread
                that has not returned by then continues in the background, with a RuntimeWarning.
        """
        self._closed, self._ahead = True, None
        if self._finalizer.detach() is not None:
            self._pipeline.close(CLOSE_WAIT_S if wait_s is None else wait_s)

    def __enter__(self) -> "EchoLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class EchoIterator:
    """Iterator of an EchoLoader. All iterators of a loader share its cursor and its read-ahead."""

    def __init__(self, loader: EchoLoader) -> None:
        self._loader = loader

    def __iter__(self) -> "EchoIterator":
        return self

    def __next__(self) -> Any:
        loader = self._loader
        batch = loader._next()
        before = loader._position, id(batch.content)
        # No call may follow this statement: an interrupt in it would lose the batch.
        loader._before, loader._position, loader._ahead, loader._resumed = before, batch.position, None, False
        return batch.content
