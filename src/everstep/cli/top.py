"""`everstep top`: a job in the terminal, redrawn in place; one picture in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep.base.leaving import before_leaving, until_ctrl_c
from everstep.cli.run_dir import refuse_no_run
from everstep.cli.seconds import Seconds
from everstep.cli.terminal import LEVEL_STYLES, SilentKeys, console, stdout_width
from everstep.dashboard.feed import RunFeed
from everstep.dashboard.run_view import WorkerRow, head, worker_rows
from everstep.report.facts import SET_BACK_NS
from everstep.report.headline import Headline
from everstep.report.words import rate_text, shortened, size_text, time_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from everstep.report.told_facts import Line

_STYLES = {"leader": "bold blue", "standby": "cyan", "healing": "yellow", "suspect": "yellow", "dead": "bold red"}
_STYLES |= {"ended": "dim", "left": "dim"}
_ORDER = ("dead", "suspect", "healing", "leader", "active", "standby", "spare", "ended", "left")
_WIDE = 100
_COLUMNS = ("worker", "state", "phase", "stage", "step", "lanes", "samples/s", "memory", "cpu", "pid", "host")
_NARROW = ((70, ("pid", "host")), (45, ("phase", "stage", "memory", "cpu")), (0, ("lanes",)))
"""Columns that are left out below _WIDE: (from this width on, names); narrower ones lack those before, too."""
_TROUBLED = ("dead", "suspect", "healing")
_SORTS: dict[str, Callable[[tuple[int, WorkerRow]], Any]] = {
    "worker": lambda item: item[0],
    "state": lambda item: (_ORDER.index(item[1].state) if item[1].state in _ORDER else 9, item[0]),
    "speed": lambda item: -(item[1].rate or 0),
    "memory": lambda item: -(item[1].rss or 0),
}


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print one picture and exit.")
@click.option("--interval", type=Seconds(0.1, 60), default=1.0, help="Seconds between pictures (1).")
@click.option("--sort", type=click.Choice(tuple(_SORTS)), default="worker", help="Order of the workers (worker).")
def command(run_dir: Path, once: bool, interval: float, sort: str) -> int:
    """Show the workers of the job in DIR, live. Ctrl-C ends it; the job goes on."""
    from rich.live import Live

    refuse_no_run(run_dir)
    feed = RunFeed(run_dir, logs=False)
    shown = console(width=None if sys.stdout.isatty() else stdout_width() or _WIDE)
    if once or not sys.stdout.isatty():
        shown.print(picture(feed, sort, 10_000, shown.width))
        return 0
    keys = SilentKeys()
    try:
        whole = Live(console=shown, screen=True, auto_refresh=False)
        with until_ctrl_c(), before_leaving(keys.leave_screen), whole as live:
            while True:
                live.update(picture(feed, sort, max(3, shown.height - 13), shown.width), refresh=True)
                time.sleep(interval)
    finally:
        keys.restore()


def picture(feed: RunFeed, sort: str, most: int, width: int) -> RenderableType:
    """Picture of the job now: its state, workers (at most `most`) and last events. width: in characters."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    feed.load()
    feed.ask()
    rows = worker_rows(feed)
    facts = head(feed, rows)
    said = Headline(**facts["headline"])
    title = Table.grid(padding=(0, 2))
    title.add_row(Text(facts["name"], style="bold"), Text(facts["state"], style=LEVEL_STYLES[said.level]))
    parts: list[RenderableType] = [title, Text(said.fitted(2 * width), style=LEVEL_STYLES[said.level])]
    if facts["total"]:
        bar = Table.grid()
        bar.add_row(ProgressBar(total=facts["total"], completed=facts["step"], width=60))
        parts.append(bar)
    parts.append(Text("\n".join(whole_lines(_numbers(facts), width))))
    for one in feed.history.incidents(feed.running)[-1:]:
        parts.append(Text(shortened(f"last {one.kind}: {one.line()}", width), style="yellow", no_wrap=True))
    parts.append(_table(rows, sort, most, width))
    for line in in_order(list(feed.history.facts.log)[-5:]):
        clock = time.strftime("%H:%M:%S", time.localtime(line.time_ns / 1e9))
        parts.append(Text(shortened(f"{clock} {line.text}", width), style="dim", no_wrap=True))
    return Group(*parts)


def in_order(lines: Sequence[Line]) -> list[Line]:
    """Lines in the order of time, as some are told a little late; but what follows a clock's being set back stays
    behind what was before."""
    kept: list[tuple[int, int, Line]] = []
    clocks, newest_ns = 0, 0
    for line in lines:
        back = newest_ns - line.time_ns > SET_BACK_NS
        clocks, newest_ns = clocks + back, line.time_ns if back else max(newest_ns, line.time_ns)
        kept.append((clocks, line.time_ns, line))
    return [line for _, _, line in sorted(kept, key=lambda one: one[:2])]


def whole_lines(parts: Sequence[str], width: int) -> list[str]:
    """Lines of at most so many characters, as far as no part is broken: no number loses its unit."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}  {part}" if lines[-1] else part
        lines[-1:] = [longer] if len(longer) <= width else [*filter(None, lines[-1:]), part]
    return lines


def _numbers(facts: dict[str, Any]) -> list[str]:
    total = f"/{facts['total']}" if facts["total"] else ""
    found = [
        f"step {facts['step']}{total}",
        f"generation {facts['generation']}",
        *([f"workers {facts['members']}/{facts['wanted']}"] if facts["running"] and facts["wanted"] else []),
    ]
    if facts["loss_text"]:
        found.append(f"loss {facts['loss_text']}" + (f" (of step {facts['loss_step']})" if facts["loss_step"] else ""))
    if facts["rate"]:
        found.append(f"{rate_text(facts['rate'])} samples/s")
    if facts["eta_s"]:
        found.append(f"{time_text(facts['eta_s'])} left")
    if facts["goodput"] is not None:
        found.append(f"goodput {100 * facts['goodput']:.1f} %")
        if facts["goodput_by_capacity"] is not None and facts["goodput_by_capacity"] < facts["goodput"] - 0.005:
            found[-1] += f" ({100 * facts['goodput_by_capacity']:.1f} % by capacity)"
    if facts["scaling"]:
        found.append(facts["scaling"])
    return found


def _shown_columns(width: int) -> list[str]:
    """Columns that so many characters hold without cutting any."""
    left_out: set[str] = set()
    for from_width, names in _NARROW if width < _WIDE else ():
        left_out |= set(names)
        if width >= from_width:
            break
    return [name for name in _COLUMNS if name not in left_out]


def _table(rows: dict[int, WorkerRow], sort: str, most: int, width: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), header_style="bold")
    names = _shown_columns(width)
    for name in names:
        table.add_column(name, justify="left" if name in ("state", "phase", "host") else "right", no_wrap=True)
    kept = sorted(rows.items(), key=lambda item: (item[1].state not in _TROUBLED, _SORTS[sort](item)))[:most]
    for i, row in sorted(kept, key=_SORTS[sort]):
        cells: tuple[RenderableType, ...] = (
            f"{i}.{row.life}",
            row.state,
            row.phase or "-",
            ",".join(map(str, row.stages)) or "-",
            str(row.step),
            str(len(row.lanes)),
            rate_text(row.rate) if row.rate else "-",
            size_text(row.rss) if row.rss else "-",
            f"{100 * row.cpu:.0f} %" if row.cpu is not None else "-",
            str(row.pid or "-"),
            Text(row.host or "-"),
        )
        shown = [cell for name, cell in zip(_COLUMNS, cells, strict=True) if name in names]
        table.add_row(*shown, style=_STYLES.get(row.state, ""))
    if len(rows) > most:
        table.caption = f"and {len(rows) - most} more; workers in trouble are listed first"
    return table
