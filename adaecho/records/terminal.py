"""The terminal as rich draws on it: tables and lines whose texts may be anyone's."""

from typing import Any

from rich.console import Console
from rich.text import Text

from adaecho.masking import presentable


class Terminal(Console):
    """A console that writes control characters of a text out, where rich would let the terminal obey them."""

    def render_str(self, text: str, **options: Any) -> Text:
        """What every text becomes that is printed, or lies in a table."""
        return super().render_str(presentable(text), **options)
