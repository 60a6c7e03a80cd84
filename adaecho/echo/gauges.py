"""Counters, timers and DataLoader-compatible attributes of an EchoLoader."""

import weakref
from typing import Any

from adaecho.echo.order.factor import History
from adaecho.echo.pipeline import Pipeline
from adaecho.echo.read.rows import RandomReader
from adaecho.echo.settings import Settings
from adaecho.echo.state import Position
from adaecho.echo.threads.timers import Timers


class Gauges:
    """Read-only properties. Values refer to the last batch returned, not to what was read ahead."""

    _position: Position
    _pipeline: Pipeline
    _clocks: Timers
    _dataset: Any
    _sampler: Any
    _resumed: bool
    _newest: "weakref.ref[Any] | None" = None  # of the iterators
    _next_iteration: int | None
    settings: Settings

    @property
    def _iterating(self) -> bool:
        """Whether the newest iterator has not been given up."""
        return self._newest is not None and self._newest() is not None

    @property
    def epoch(self) -> int:
        """Zero-based number of the epoch that the next ``iter()`` starts or continues.

        After ``load_state_dict()``, resume with ``for epoch in range(loader.epoch, epochs)``.
        """
        position, is_endless = self._position, self.settings.epochs is None
        if self._next_iteration is None or is_endless or (self._resumed and position.in_pass):
            goes_on = position.in_pass and (self._iterating or self._resumed or is_endless)
            return position.iteration - goes_on
        return self._next_iteration - 1

    @property
    def fresh_examples(self) -> int:
        """Number of examples this rank had to read for the batches returned so far."""
        return self._position.fresh_examples

    @property
    def examples_read(self) -> int:
        """Number of examples this rank has read, including read-ahead."""
        return self._pipeline.examples_read

    @property
    def fresh_examples_in_buffer(self) -> int:
        """Number of distinct fresh examples with repeats still in a buffer."""
        return self._pipeline.streams.num_held(self._position)

    @property
    def reread_examples(self) -> int:
        """Number of examples read again after a resume; not included in ``fresh_examples``."""
        return self._position.reread_examples

    @property
    def bad_examples(self) -> list[dict[str, Any]]:
        """Skipped examples, as dicts with ``index`` (number within this rank), ``origin`` and ``error``."""
        return [
            bad for bad in self._pipeline.streams.log.bad.found if bad["index"] < self._position.next_index
        ]

    @property
    def factor(self) -> float:
        """The current echoing factor."""
        return self._factors[-1][1]

    @property
    def factor_changes(self) -> list[tuple[int, float]]:
        """Changes made by ``factor="auto"``: (number of the first fresh item, new factor)."""
        return self._factors[1:]

    @property
    def _factors(self) -> History:
        streams, position = self._pipeline.streams, self._position
        index = position.next_number if streams.echoes_batches else position.next_index
        return streams.factor.before(index)

    def _num_batches(self, iteration: int, first_index: int, first_number: int, *, begun: bool) -> int:
        """Batches of one iteration, which begins at a local number and at a number of a fresh batch.

        Raises:
            TypeError: it isn't known.
        """
        settings, streams, source = self.settings, self._pipeline.streams, self._pipeline.source
        reader = self._pipeline.reader
        if settings.epochs is None:
            raise TypeError("len(EchoLoader) needs epochs=; without it, iteration is endless")
        if settings.factor == "auto":
            raise TypeError("len(EchoLoader) is unknown with factor='auto'; count steps instead")
        if isinstance(reader, RandomReader):
            first_index, end = reader.span(iteration)
        elif source.length is None:
            raise TypeError(f"len(EchoLoader) is unknown: the wrapped {source.name} has no length")
        else:
            end = first_index + source.length * settings.epochs
        examples = streams.log.examples if begun else streams.log.examples.begun(first_index)
        items = examples.total(first_index, end - first_index)
        batches = items // streams.batch_size if settings.drop_last else -(-items // streams.batch_size)
        return streams.log.batches.total(first_number, batches)

    @property
    def wait_time_s(self) -> float:
        """Total seconds spent waiting for batches."""
        return self._clocks.wait_time_s

    @property
    def upstream_s_per_batch(self) -> float:
        """Seconds per fresh batch of the slowest stage before the echo, divided by its number of workers.

        A source that is iterated is read by one at a time. Of one that works ahead by itself, as a
        ``DataLoader`` with workers, it is the time spent waiting: too short with ``num_workers=0``.
        """
        return self._clocks.upstream_s_per_batch

    @property
    def downstream_s_per_step(self) -> float:
        """Seconds per step: the larger of the training step and the loader's work after the echo."""
        return self._clocks.downstream_s_per_step

    @property
    def R(self) -> float | None:  # noqa: N802 (the paper's name)
        """Loading time / step time (paper, section 2), smoothed over about 50 steps; None until known."""
        return self._clocks.ratio

    def __repr__(self) -> str:
        return f"EchoLoader({type(self._dataset).__name__}, {self.settings})"

    @property
    def dataset(self) -> Any:
        """The given source."""
        return self._dataset

    @property
    def batch_size(self) -> int | None:
        """Examples per batch; None if the source yields whole batches."""
        return self.settings.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a short last batch is dropped."""
        return self.settings.drop_last

    @property
    def num_workers(self) -> int:
        """Number of threads or processes that read and decode, and of those that augment and collate."""
        return self._pipeline.num_workers

    @property
    def processes(self) -> bool:
        """Whether workers are processes."""
        return self._pipeline.processes

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an EchoLoader cannot be copied or pickled, because it owns threads and an open source. Create "
            "it in each process with the same arguments, and pass state_dict() to load_state_dict()"
        )
