"""Tables on the terminal, as rich draws them."""

import re
from typing import Any

from rich.table import Table

from adaecho.records.table import NARROW, TERMINAL, Column

NARROW_WIDTH = 76  # columns of a terminal below which a table keeps to its main figures


def terminal_table(columns: list[Column], width: int, *, one_line_each: bool = False) -> Table:
    """The columns for which a terminal of this width has room, a 0 as ``-``.

    A count that is 0 in every arm gives its room to the arms' names, unless it is one of the main figures.
    Names that are too long go on in a next line, or are cut.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    most = NARROW if width < NARROW_WIDTH else TERMINAL
    shown = [
        column
        for column in columns
        if column.medium == NARROW or (column.medium <= most and set(column.cells) != {"0"})
    ]
    overflow: Any = "ellipsis" if one_line_each else "fold"
    table.add_column(shown[0].heading, overflow=overflow, no_wrap=one_line_each, min_width=12)
    for column in shown[1:]:
        heading = re.sub(r" (?!%)", "\n", column.heading)  # a number stays beside its unit
        table.add_column(heading, justify="right", no_wrap=True)
    for cells in zip(*(column.cells for column in shown), strict=True):
        table.add_row(cells[0], *("-" if cell == "0" else cell.replace(" to ", "-") for cell in cells[1:]))
    return table
