# SPDX-License-Identifier: Apache-2.0
"""What a terminal shows of the demo, while it runs and at its end. Needs rich, of the extra `embedded`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from reconciler.demo.counting import Figures
from reconciler.demo.run import Watch
from reconciler.demo.summary import Part, Table, ways_table


@contextmanager
def live() -> Iterator[Watch]:
    """Give what shows the demo's course in place; the terminal is as it was afterwards."""
    begun = time.monotonic()
    with Live(auto_refresh=False, transient=True) as screen:

        def watch(phase: str, figures: Figures | None) -> None:
            screen.update(_moment(time.monotonic() - begun, phase, figures), refresh=True)

        yield watch


def _moment(seconds: float, phase: str, figures: Figures | None) -> RenderableType:
    title = Text(f"{seconds:3.0f} s  {phase}", style="bold")
    if figures is None:
        return title
    ledger = figures.ledger
    held = ", ".join(f"{reason} {n}" for reason, n in ledger.reasons.most_common())
    return Group(
        title,
        Text(f"{figures.made:,} of {figures.wanted:,} messages, {figures.unanswered} calls without a usable answer"),
        _grid(ways_table(figures)),
        Text(f"reconciler: proved sent {ledger.proved}, undecided {figures.undecided}"),
        Text(f"            released {len(ledger.sent_again)}, stated risk {ledger.risk:.2g} duplicates in all"),
        Text(f"            held {len(ledger.held)}" + (f": {held}" if held else "")),
    )


def conclude(parts: Iterable[Part]) -> None:
    """Print the summary, as wide as the terminal is."""
    console = Console(highlight=False)
    for part in parts:
        console.print()
        console.print(Text(part.title, style="bold"))
        for piece in part.content:
            shown = _grid(piece) if isinstance(piece, Table) else Text(piece or " ")
            console.print(Padding(shown, (0, 0, 0, 2), expand=False))


def _grid(table: Table) -> Grid:
    grid = Grid(box=None, pad_edge=False, padding=(0, 1))
    for title, *cells in zip(table.header, *table.rows, strict=True):
        are_numbers = bool(cells) and all(isinstance(cell, int) for cell in cells)
        grid.add_column(Text(title, style="dim"), justify="right" if are_numbers else "left")
    for row in table.rows:
        grid.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
    return grid
