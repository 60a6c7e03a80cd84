"""What an EchoLoader tells about itself: counts, clocks, and what it was made with, as a DataLoader does."""

from typing import Any

from adaecho.echo.order.factor import History
from adaecho.echo.pipeline import Pipeline
from adaecho.echo.read.rows import RandomReader
from adaecho.echo.settings import Settings
from adaecho.echo.state import Position
from adaecho.echo.threads.timers import Timers


class Gauges:
    """All figures are those of the consumer's position, whatever has been read ahead."""

    _position: Position
    _pipeline: Pipeline
    _clocks: Timers
    _dataset: Any
    _sampler: Any
    _resumed: bool
    _iterating: bool
    _next_iteration: int | None
    settings: Settings

    @property
    def epoch(self) -> int:
        """Number, from 0, of the iteration that the next ``iter()`` goes on with or begins.

        After ``load_state_dict`` too, wherever in an epoch it was saved: ``for epoch in range(loader.epoch,
        epochs): for batch in loader: ...``
        """
        position, is_endless = self._position, self.settings.epochs is None
        if self._next_iteration is None or is_endless or (self._resumed and position.in_pass):
            goes_on = position.in_pass and (self._iterating or self._resumed or is_endless)
            return position.iteration - goes_on
        return self._next_iteration - 1

    @property
    def fresh_examples(self) -> int:
        """Examples of this rank that had to be read for the batches taken so far."""
        return self._position.fresh_examples

    @property
    def examples_read(self) -> int:
        """Examples of this rank that have gone into the pipeline, also ahead of the batches taken so far."""
        return self._pipeline.examples_read

    @property
    def fresh_examples_in_buffer(self) -> int:
        """Distinct fresh examples of which a shuffle buffer or the echo of a batch still holds a repeat."""
        return self._pipeline.streams.num_held(self._position)

    @property
    def reread_examples(self) -> int:
        """Examples read a second time to restore a position; not fresh."""
        return self._position.reread_examples

    @property
    def bad_examples(self) -> list[dict[str, Any]]:
        """Skipped examples: ``index`` (local number), ``origin``, ``error``."""
        return [
            bad for bad in self._pipeline.streams.log.bad.found if bad["index"] < self._position.next_index
        ]

    @property
    def factor(self) -> float:
        """The echoing factor in force."""
        return self._factors[-1][1]

    @property
    def factor_changes(self) -> list[tuple[int, float]]:
        """Each change by ``factor="auto"``: number of the first fresh item under it, and the factor."""
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
            raise TypeError("len() of an EchoLoader needs epochs=: without, it never ends")
        if settings.factor == "auto":
            raise TypeError("len() of an EchoLoader with factor='auto' isn't known beforehand")
        if isinstance(reader, RandomReader):
            first_index, end = reader.span(iteration)
        elif source.length is None:
            raise TypeError(f"len() of an EchoLoader around a {source.name} isn't known: that has no length")
        else:
            end = first_index + source.length * settings.epochs
        examples = streams.log.examples if begun else streams.log.examples.begun(first_index)
        items = examples.total(first_index, end - first_index)
        batches = items // streams.batch_size if settings.drop_last else -(-items // streams.batch_size)
        return streams.log.batches.total(first_number, batches)

    @property
    def wait_time_s(self) -> float:
        """Seconds that the consumer has waited for batches."""
        return self._clocks.wait_time_s

    @property
    def upstream_s_per_batch(self) -> float:
        """Time per fresh batch of upstream's slowest part, over as many workers as can work on it at once.

        A source that is iterated is read by one at a time. Of one that works ahead by itself, as a
        ``DataLoader`` with workers, it is the time spent waiting: too short with ``num_workers=0``.
        """
        return self._clocks.upstream_s_per_batch

    @property
    def downstream_s_per_step(self) -> float:
        """The larger of the loader's own work after the echo and the consumer's step."""
        return self._clocks.downstream_s_per_step

    @property
    def R(self) -> float | None:  # noqa: N802 (the paper's name)
        """t_upstream / t_downstream (paper, section 2), smoothed over some 50 steps; None until known."""
        return self._clocks.ratio

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
        """Threads that read and decode, and as many that augment and collate; or processes."""
        return self._pipeline.num_workers

    @property
    def processes(self) -> bool:
        """Whether workers are processes."""
        return self._pipeline.workers()[1]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "EchoLoader: its threads and its source can't be shared or sent, so no copy or pickle; make "
            "another with the same arguments (in each process its own), and give it state_dict()"
        )
