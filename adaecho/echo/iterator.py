"""What ``iter()`` of an EchoLoader gives."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaecho.echo.loader import EchoLoader


class EchoIterator:
    """The iterator of an EchoLoader; all iterators of one share its position.

    When the newest is abandoned, the loader stops; what its threads have read ahead is kept.
    """

    def __init__(self, loader: "EchoLoader", number: int) -> None:
        self._loader, self._number = loader, number

    def __iter__(self) -> "EchoIterator":
        return self

    def __next__(self) -> Any:
        return self._loader._next()

    def __del__(self) -> None:
        # The garbage collector may come to an old one in the middle of a newer one's pass.
        if self._number == self._loader._iterators_made:
            self._loader.stop()
