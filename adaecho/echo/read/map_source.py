"""Map-style datasets, read in one thread or several."""

from typing import Any

from adaecho.echo.memory.tree import Rows, isolated
from adaecho.echo.read.access import Drawing, ThreadCopies, check_draws, may_be_shared
from adaecho.echo.read.failures import is_of_machine
from adaecho.echo.threads.seeded_process import global_generators_kept


class MapSource:
    """A map-style dataset: ``len(dataset)`` and ``dataset[row]``.

    It may have ``__getitems__(rows)`` for many rows at once, ``origin(row)`` for messages, and
    ``shard_lengths``, the number of examples in each of its shards, for the order "shards".

    Threads share it only if it says so with ``thread_safe = True`` (``access.may_be_shared``): that reading
    touches nothing that changes, such as an open file, a cache or a global generator. Otherwise each thread
    reads a copy of its own, or they take turns; and examples that it draws from the global generators are
    seeded, in processes where threads read.
    """

    resident = False

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._shared = may_be_shared(dataset)
        self._copies = ThreadCopies(dataset)
        self._drawing: Drawing | None = None
        self._begun = False
        self.length = len(dataset)
        self.shard_lengths = getattr(dataset, "shard_lengths", None)

    def begin(self, num_workers: int, echo: str) -> None:
        """See whether it draws, and copy it as it is now for the threads of an iteration to come."""
        if self._shared:
            return
        if self._drawing is None:
            self._copies.begin(num_workers)
        if not self._begun:
            with self._copies.here() as dataset:
                if check_draws(dataset, echo):
                    self._drawing = Drawing(self._dataset)
            self._begun = True
        if self._drawing is not None:
            self._drawing.begin(num_workers)
        elif num_workers > 1:
            self._copies.warn_of_turns()

    def peek(self, row: int) -> Any:
        """One example before any iteration, of a copy where there can be one: a file opened stays closed."""
        if self._shared:
            return self._dataset[row]
        self._copies.begin(num_workers=1)
        with global_generators_kept(), self._copies.here() as dataset:
            return isolated(dataset[row], pictures=False)

    @property
    def draws(self) -> bool:
        """Whether it draws from the global generators as it reads an example."""
        return self._drawing is not None

    def read_one(self, row: int, key: int = 0) -> Any:
        """One example; the key seeds what it draws."""
        if self._drawing is not None:
            return self._drawing.read(row, key)
        if self._shared:
            return self._dataset[row]
        with self._copies.here() as dataset:
            return dataset[row]

    def read_many(self, rows: Rows) -> tuple[list[Any] | None, Exception | None]:
        """Examples read at once; None where the dataset can't, with its error where one may be a bad one.

        Raises:
            ValueError: they are not as many as the rows.
        """
        if self._drawing is not None or not hasattr(self._dataset, "__getitems__"):
            return None, None
        try:
            if self._shared:
                examples = list(self._dataset.__getitems__(rows.tolist()))
            else:
                with self._copies.here() as dataset:
                    examples = list(dataset.__getitems__(rows.tolist()))
        except Exception as error:
            error.add_note(f"while reading {self.origin(int(rows[0]))} and {len(rows) - 1} more")
            if not is_of_machine(error):
                return None, error
            raise
        if len(examples) != len(rows):
            raise ValueError(
                f"source: {type(self._dataset).__name__}.__getitems__ returned {len(examples)} examples for "
                f"{len(rows)} rows; it must return one for each row, in their order"
            )
        return examples, None

    def origin(self, row: int) -> str:
        """What to call an example in a message."""
        own = getattr(self._dataset, "origin", None)
        return f"example {row} of {type(self._dataset).__name__}" if own is None else str(own(row))
