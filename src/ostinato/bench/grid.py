"""A table that can be printed to the console or written as Markdown."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

EDGES, GAP = 2, 2  # characters around a table in the console, and between its columns
WRONG = 0.1  # relative error above which a result counts as wrong
WRONG_NOTE = f"† its error against float64 is more than {WRONG:g} of the result."


@dataclass
class Grid:
    """A table that rich can print; ``**`` around a cell makes it bold, and columns of only dashes are left out."""

    head: list[str]
    rows: list[list[str]]
    title: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def _lines(self) -> Iterator[list[str]]:
        kept = [i for i in range(len(self.head)) if not self.rows or any(row[i] != "–" for row in self.rows)]
        yield from ([line[i] for i in kept] for line in (self.head, *self.rows))

    @property
    def _wrong_note(self) -> list[str]:
        return [WRONG_NOTE] * any("†" in cell for row in self.rows for cell in row)

    def markdown(self) -> str:
        """The table as Markdown, without its title."""
        head, *rows = self._lines
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        table = "".join(f"| {' | '.join(cell.strip() for cell in line)} |\n" for line in lines)
        return "\n\n".join((table.rstrip(), *self._wrong_note, *self.notes)) + "\n"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print one table if it fits, else several that repeat the first column: rich itself would truncate figures."""
        lines = list(self._lines)
        columns = [[cell.replace("**", "") for cell in column] for column in zip(*lines, strict=True)]
        whole = [max(map(cell_len, column)) for column in columns]
        wrapped = [max(map(cell_len, (*heading.split(), *cells))) for heading, *cells in columns]
        first = max(1, min(whole[0], options.max_width - EDGES - GAP - max(wrapped[1:])))
        widths, groups = whole, _groups_that_fit(whole[1:], options.max_width - EDGES - first)
        if len(groups) > 1:
            widths, groups = wrapped, _groups_that_fit(wrapped[1:], options.max_width - EDGES - first)
        if self.title:
            yield Text(self.title, style="italic")
        for group in groups:
            table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
            table.add_column(Text(lines[0][0]), width=first, no_wrap=True)
            for i in group:
                table.add_column(Text(lines[0][i]), width=widths[i], justify="right")
            for line in lines[1:]:
                cells = (re.sub(r"\*\*(.*)\*\*", r"[bold]\1[/bold]", escape(line[i])) for i in (0, *group))
                table.add_row(*map(Text.from_markup, cells))
            yield table
        yield from (Text(note, style="dim") for note in (*self._wrong_note, *self.notes))


def _groups_that_fit(widths: list[int], room: int) -> list[list[int]]:
    """Group consecutive columns, numbered from 1, so that the widths of each group sum to at most `room`."""
    groups: list[list[int]] = []
    left = 0
    for number, width in enumerate(widths, 1):
        left -= GAP + width
        if left < 0 or not groups:
            groups.append([])
            left = room - GAP - width
        groups[-1].append(number)
    return groups
