"""A progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bar(title: str, total: int, enabled: bool) -> Iterator[Any]:
    """Yield a function that advances a progress bar by one, with a note; shows nothing where stderr is no terminal."""
    if not (enabled and sys.stderr.isatty()):
        yield lambda note="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    note = TextColumn("{task.fields[note]}", markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda note="": bar.update(task, advance=1, note=note)
