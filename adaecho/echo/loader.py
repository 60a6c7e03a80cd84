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
from adaecho.echo.pipeline import Pipeline
from adaecho.echo.read import as_source, warn_if_unshared
from adaecho.echo.settings import Settings
from adaecho.echo.state import LoaderCursor
from adaecho.echo.stats import LoaderStats, Timers
from adaecho.echo.threads import WAITS, Shutdown, tell_long_waits


class EchoLoader(LoaderStats):
    """Load batches for SGD with data echoing, as a drop-in for ``torch.utils.data.DataLoader``.

    Data echoing trains on each loaded example or batch several times, so that a slow input pipeline no longer
    limits training (Choi, Passos, Shallue, Dahl 2019, sections 2 and 3). The argument ``echo`` selects where
    in the pipeline examples or batches are repeated::

        none                         read > decode > shuffle > augment > batch
        example_before_augmentation  read > decode > echo > shuffle > augment > batch
        example_after_augmentation   read > decode > augment > echo > shuffle > batch
        batch                        read > decode > shuffle > augment > batch > echo [> shuffle batches]

    For a given seed, the batches are the same for any ``num_workers`` and ``prefetch``, and after a resume.
    Without ``epochs``, iteration is endless, and a second ``iter()`` continues where the first one stopped.
    Batches may then span the end of an epoch, so no batch is short.

    Most training loops need only the first six arguments.

    Args:
        source: the training data. It can be arrays or CPU tensors (alone, in a dict or in a tuple), a
            map-style dataset, an iterable, or a function that returns an iterator for each epoch.
        batch_size: number of examples per batch, 1 by default as in a DataLoader. Pass None if the source
            yields whole batches, as a DataLoader does. The loader then keeps the source's order, repeats the
            batches if ``echo="batch"``, and calls ``decode`` with a whole batch.
        echo: the variant: ``none``, ``batch``, ``example_before_augmentation`` or
            ``example_after_augmentation``.
        factor: echoing factor e >= 1, the number of times that each fresh (newly read) example or batch is
            used. If e is not an integer, each item is used floor(e) or ceil(e) times, drawn at random with
            mean e. With ``auto``, the loader sets e to R, clipped to [1, ``max_factor``]. R is the measured
            loading time of a batch divided by the time of a training step.
        shuffle_buffer: number of examples in the shuffle buffer. With 0, there is no buffer, and only
            ``order`` shuffles.
        augment: a random augmentation in one of three forms. ``augment(example, rng)`` receives a NumPy
            generator that depends only on the example and its repeat. An object with
            ``augment.block(arrays, keys)`` augments many examples in one vectorized call.
            ``augment(example)`` draws from the global random generators, which the loader seeds before each
            call. The function may write into the arrays and tensors that it receives, because each repeat
            gets its own copies. A pair ``(once, each_time)`` splits the augmentation: under
            ``example_before_augmentation``, ``once`` runs before the echo and ``each_time`` runs on each
            repeat. In the other variants, one runs right after the other.
        decode: ``decode(example)`` turns a stored example into the form used for training. It must be
            deterministic. If the buffer contains encoded examples and ``decode`` has a method
            ``for_augment(augment)``, the loader decodes with the function that this method returns. This
            function may decode only the part that the augmentation needs, for example a crop.
        collate: function that turns a list of examples into a batch in new memory. The default is torch's
            ``default_collate``, except that tuples stay tuples. The function must not draw from the global
            generators. To use random numbers, define it as ``collate(examples, rng)``, where ``rng`` is a
            generator that depends only on the batch. Only one thread at a time calls it, unless it declares
            ``thread_safe = True``.
        buffer_format: whether the shuffle buffer, and an echo before augmentation, store encoded or decoded
            examples. The batches are the same, but time and memory differ. ``decoded`` decodes each fresh
            example once. ``encoded`` saves memory but decodes each repeat again. With ``max_bad_examples``,
            it also decodes each fresh example on entry, so that a bad example can be skipped. ``auto``
            chooses ``encoded`` if that causes no additional decoding (no echo before augmentation and
            ``max_bad_examples=0``), and ``decoded`` otherwise.
        max_bad_examples: maximum number of examples that may fail to decode. The loader skips these examples
            and lists them in ``bad_examples``; the next one raises its error. Machine and network errors,
            such as a full disk or a lost connection, are always raised.
        batch_length: function that returns the number of examples in a whole batch. It is needed only with
            ``batch_size=None`` and batches whose length the loader cannot infer from their structure.
        order: reading order in each epoch, for a source with a length. ``permutation`` shuffles the examples,
            ``shards`` shuffles the shards and reads each one in order, and ``sequential`` keeps the stored
            order. An iterable always keeps its own order.
        sampler: sampler that yields the rows of each epoch, as in a DataLoader. It replaces ``order``.
        epochs: number of epochs in each ``iter()``; None iterates endlessly. At the end of the last epoch,
            the buffer is emptied, and the last batch may be short. All ranks make the same number of batches:
            if the examples of one ``iter()`` do not divide evenly among the ranks, up to ``world_size - 1``
            of the first ones are repeated at the end, as with DistributedSampler. With
            ``batch_shuffle_buffer``, the short batch can come at different steps on different ranks.
        drop_last: whether to drop a short last batch. Examples that do not divide evenly among the ranks are
            then also dropped, and none are repeated.
        seed: seed of all random numbers; any integer, used modulo 2**64.
        num_workers: number of workers that read, decode and augment examples. With 0, the calling thread does
            this work. Workers are processes, as in a DataLoader, unless the code can run in threads. For
            threads, the source must consist of arrays, be an iterable (which one thread reads) or declare
            ``thread_safe = True``. ``decode`` and ``augment`` must be vectorized or declare the same.
            Processes are forked at the first batch of an iteration. Where fork is not available (macOS,
            Windows), code that needs processes runs in the calling thread. If the source itself reads ahead,
            as a DataLoader with workers does, R is correct only with at least 1 worker here.
        processes: use worker processes even for thread-safe code. This helps if the code does not release the
            GIL, because threads would then run one after the other.
        prefetch: number of batches to read ahead of the echo stage. None means two per worker, as in a
            DataLoader.
        device: device to which the loader's threads copy each batch while the previous training step runs.
            None leaves batches on the CPU.
        batch_shuffle_buffer: number of batches in a shuffle buffer after batch echoing (paper, Fig. 7a). With
            0, the repeats of a batch directly follow one another.
        max_factor: upper bound on the echoing factor with ``factor="auto"``.
        rank, world_size: index of this process and number of processes; each process reads its share of the
            examples. The defaults are those of torch.distributed, or 0 and 1 if it is not initialized. Whole
            batches are not split; each rank must read its own.
        state_of_all_ranks: whether ``state_dict()`` returns the states of all torch.distributed ranks. This
            is for frameworks in which one rank writes the checkpoint (Lightning, Fabric, Accelerate). All
            ranks must call ``state_dict()`` together.
        arguments_of_data_loader: further arguments of a DataLoader. ``dataset``, ``shuffle``, ``collate_fn``
            and ``prefetch_factor`` are accepted in place of ``source``, ``order``, ``collate`` and
            ``prefetch``. For any other, an error message names the replacement (docs/around-your-loader.md).

    Attributes:
        dataset: the source that was passed to the loader.
        sampler: the sampler that was passed to the loader. Without a sampler, the attribute does not exist.
        batch_size, drop_last: the arguments with these names.
        num_workers: number of workers that read and decode; an equal number augment and collate.
        processes: whether the workers are processes instead of threads.
        sync_R: function that maps this rank's R (None until it is known) to the R that ``factor="auto"``
            uses. Assign a function that averages over ranks if all ranks should use the same factor. All
            ranks call it after the same number of batches, so it may communicate.

    Raises:
        ValueError: an argument is invalid; the message names it, its value and the remedy.
        TypeError: neither EchoLoader nor DataLoader has an argument of this name.
    """

    _position = LoaderCursor()
    _ahead: Batch | None = None  # the next batch, if it has already been made
    _before: tuple[LoaderCursor, int] | None = None  # the cursor before the last batch, and that batch's id
    _resumed = False  # whether a state was loaded, so that the next iter() continues its iteration
    _failed: Exception | None = None
    _closed = False
    _next_iteration: int | None = None  # the number that set_epoch requested

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
        order = given.order_asked_for(others, order, sampler)
        if prefetch is None and others.get("prefetch_factor") is not None:
            prefetch = others["prefetch_factor"] * num_workers
        prefetch = None if prefetch is None else given.whole("prefetch", prefetch, 0)
        collate = collate or others.get("collate_fn")
        # If neither the caller nor torch.distributed set a rank, a later init_process_group is an error.
        self._made_alone = (rank, world_size) == (None, None) and not given.is_distributed()
        self.settings = settings = Settings(
            batch_size, echo, factor, shuffle_buffer, batch_shuffle_buffer, order, epochs, seed,
            *given.share(rank, world_size), max_factor, max_bad_examples, drop_last, sampler,
        )  # fmt: skip
        functions = Functions(decode, augment, collate, batch_length, settings, buffer_format)
        self.dataset, self.batch_size, self.drop_last = source, settings.batch_size, settings.drop_last
        if sampler is not None:  # trainers check for a sampler with hasattr
            self.sampler = sampler
        self._device, self._state_of_all_ranks = ToDevice(device), state_of_all_ranks
        readable = as_source(source, settings.seed, batch_size=batch_size, world_size=settings.world_size)
        settings.check_source(readable, others.get("shuffle"))
        self._pipeline = Pipeline(
            readable, settings, functions, sampler, self._device,
            num_workers=num_workers, prefetch=prefetch, processes=processes,
        )  # fmt: skip
        self.num_workers, self.processes = self._pipeline.num_workers, self._pipeline.processes
        self._clocks = Timers(self._pipeline.counters)
        self._auto = AutoFactor(self.settings.max_factor) if factor == "auto" else None
        self.sync_R: Callable[[float | None], float | None] = lambda mine: mine
        self._taking: dict[str, int] = {}  # the thread that requests a batch
        self._finalizer = weakref.finalize(self, self._pipeline.forgotten)
        self._finalizer.atexit = False  # the atexit handler closes the pipelines
        if epochs is None:
            self._position, self._pipeline.run = self._pipeline.begin(self._position, 1)
            self._pipeline.left = None

    # Iteration. An error or Ctrl-C can leave a run (threads and caches) inconsistent, so the loader detaches
    # the run while the run makes a batch. If that fails, the loader discards the run and starts a new one at
    # the cursor.

    def __iter__(self) -> Iterator[Any]:
        self._check_process()
        end = resumed_at_end(self)
        if end is not None:
            state, is_over = end
            if state is not None:
                self.load_state_dict(state)
            self._resumed = False  # Lightning has completed that epoch, so the next iteration begins
            if is_over:
                return iter(())
        pipeline, iterator = self._pipeline, EchoIterator(self)
        if self._resumed and self._position.in_pass and not pipeline.source.thread_safe:
            self._resume()  # read again, because the dataset's set_epoch may have been called since
        position, run, left = self._position, pipeline.run, pipeline.left
        if self.settings.epochs is not None and not (self._resumed and position.in_pass):
            self._ahead = None
            self._clocks.pause()
            (position, run), left = pipeline.begin(position, self._upcoming), None
        # This is one statement, so that an interrupt leaves either the old iteration or the new one.
        (
            self._position, pipeline.run, pipeline.left, self._before, self._failed, self._taking,
            self._resumed, self._next_iteration, self._newest,
        ) = position, run, left, None, None, {}, False, None, weakref.ref(iterator)  # fmt: skip
        return iterator

    def _next(self) -> Batch:
        """Return the next batch. The caller must then advance the loader's position past this batch."""
        batch = self._look_ahead()
        if batch is None:
            raise StopIteration
        self._clocks.step()
        if self._auto is not None and self._auto.due():
            self._auto.follow(self.sync_R(self._clocks.ratio), self._pipeline.streams.factor)
        self._device.received(batch.content)
        return batch

    def _look_ahead(self) -> Batch | None:
        """Return the next batch without advancing the loader's position; None at the iteration's end."""
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
        """Discard the current threads and buffers, and start new ones at the loader's position."""
        self._ahead = None
        self._clocks.pause()
        pipeline = self._pipeline
        (self._position, pipeline.run), pipeline.left = pipeline.resume(self._position), None

    def _check_can_go_on(self) -> None:
        if self._closed:
            raise RuntimeError("this EchoLoader was closed; create a new one")
        if self._failed is not None:
            raise RuntimeError(
                f"an error stopped this EchoLoader ({type(self._failed).__name__}); iter(loader) continues "
                "after the last batch, or with epochs= begins a new iteration; load_state_dict(state) "
                "continues from a state"
            ) from self._failed
        pool = self._pipeline.pool
        if self._position.in_pass and pool is not None:
            pool.check_process()
            pool.resume_for_caller()

    def __len__(self) -> int:
        """Return the number of batches in the current iteration, or in the next one if none is active.

        Raises:
            TypeError: iteration is endless, or the number cannot be known in advance.
        """
        self._check_process()
        position = self._position
        if position.in_pass and (self._iterating or self._resumed):
            return self._num_batches(
                position.iteration, position.first_index, position.first_number, begun=True
            )
        return self._num_batches(self._upcoming, position.next_index, position.next_number, begun=False)

    @property
    def _upcoming(self) -> int:
        """Number of the next iteration, counted from 1."""
        return self._position.iteration + 1 if self._next_iteration is None else self._next_iteration

    def next_fresh_examples(self) -> int:
        """Wait for the next batch and return the value that ``fresh_examples`` will have after it.

        Use this to stop before a batch that would exceed a budget of fresh examples.
        """
        batch = self._look_ahead()
        return self.fresh_examples if batch is None else batch.position.fresh_examples

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch from ``next()``, for ``load_state_dict()``.

        Any thread may call this at any time.

        Returns:
            A flat dict from names to numbers, strings and lists of numbers. It does not contain the examples
            in the buffers, so it takes up only a few kilobytes. It can be stored as JSON, with
            ``torch.distributed.checkpoint``, or with ``torch.save`` and ``torch.load(weights_only=True)``.
        """
        self._check_process()
        last = self._before
        taken = last[0] if last is not None and holds_last_batch(last[1]) else self._position
        state = {**self._pipeline.state(taken), "timers": self._clocks.state()}
        return saved.of_all_ranks(state) if self._state_of_all_ranks else state

    def _check_process(self) -> None:
        if self._pipeline.pool is not None:
            self._pipeline.pool.check_process()
        if self._made_alone and self.batch_size is not None:
            given.check_still_alone()
        elif self._made_alone and given.is_distributed():
            self._made_alone = False  # no error here, because the source may shard whole batches itself
            warn_if_unshared(self.dataset, given.share(None, None)[1])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. The next batch is then the same as in the run that saved the state.

        A state does not contain examples, so the loader first rereads the examples in its buffers. The
        property ``reread_examples`` counts them.

        The source and most arguments must be the same as when the state was saved. ``factor``,
        ``max_factor`` and ``max_bad_examples`` may differ, and so may arguments that do not determine the
        batches, such as ``num_workers``.

        Between two iterations (complete loops over the loader), the buffers are empty. If the state was saved
        then, these arguments may also differ: ``batch_size``, ``echo``, ``shuffle_buffer``,
        ``batch_shuffle_buffer``, ``drop_last``, ``rank`` and ``world_size``.

        Raises:
            ValueError: the state does not fit the arguments, the source or this version of adaecho; the
                message names the difference and the remedy.
        """
        self._check_process()
        state, pipeline = saved.of_this_rank(state), self._pipeline
        saved.check(state, self.settings, pipeline.source_length)
        self._position, self._failed, self._before = pipeline.restore(state), None, None
        self._resume()
        self._clocks.load_state(state["timers"])
        self._resumed, self._next_iteration = True, None
        if self.settings.epochs is not None and self._position.in_pass:
            # If the state was saved after the last batch of an iteration, the next iter() must begin a new
            # one. Looking ahead shows this, but bad examples after the last batch must not count yet.
            fresh_examples = self._position.fresh_examples
            if self._look_ahead() is None:
                self._position = self._position._replace(fresh_examples=fresh_examples)

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` begin iteration number ``epoch``, counted from 0.

        An iteration is one complete loop over the loader. The call is optional, because each ``iter()``
        begins the next iteration anyway. It has no effect without ``epochs=``.

        It can be called after ``load_state_dict()``. If the state was saved within iteration ``epoch``, the
        next ``iter()`` continues this iteration after the last batch. If it was saved within another
        iteration, the next ``iter()`` abandons that one and begins iteration ``epoch``.

        A new loader around an iterable does not know how many examples the earlier iterations contained. If
        ``epoch`` is not 0, the next ``iter()`` warns about this and uses the random numbers of iteration 0.
        To use other random numbers, load a state or pass another ``seed``.
        """
        self._next_iteration = given.whole("epoch", epoch, 0) + 1
        if self._position.iteration != self._next_iteration:
            self._resumed = False

    # Lifetime

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the loader's threads within a ``with`` block, for example during an evaluation.

        The block begins when the threads have completed their current work. Requesting a batch within the
        block ends the pause.
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

    def close(self) -> None:
        """Stop all threads and processes and close the source. The loader cannot be iterated afterwards.

        If a call to the source does not return within ten seconds, a RuntimeWarning is issued and its thread
        continues in the background.
        """
        self._closed, self._ahead = True, None
        if self._finalizer.detach() is not None:
            self._pipeline.close()

    def __enter__(self) -> "EchoLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class EchoIterator:
    """Iterator of an EchoLoader. All iterators of a loader share its position and any batch made ahead."""

    def __init__(self, loader: EchoLoader) -> None:
        self._loader = loader

    def __iter__(self) -> "EchoIterator":
        return self

    def __next__(self) -> Any:
        loader = self._loader
        batch = loader._next()
        before = loader._position, id(batch.content)
        # No call may follow this statement, because an interrupt inside that call would lose the batch.
        loader._before, loader._position, loader._ahead, loader._resumed = before, batch.position, None, False
        return batch.content
