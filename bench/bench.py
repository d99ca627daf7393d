"""Measure pgsched: scenes in order, their tables, and at the end the bars. See README.md, here.

Needs no database: it starts a PostgreSQL in a temporary folder.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import click
from measuring import BUSY, Bar, Figures, Gate, Row, Sample, Server, number

from pgsched.embedded import EmbeddedError

ORDER = ("sql", "drain", "latency", "herd", "pinned", "backlogs", "cost")
PATIENCE = {False: 20.0, True: 600.0}
"""Seconds that samples wait for a quiet machine, together."""


def shown(figures: Figures) -> str:
    """Median, and from where to where."""
    return f"{number(figures.median)} ({number(figures.low)}-{number(figures.high)})"


def print_table(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> None:
    """In Markdown; columns of numbers to the right."""
    click.echo(f"| {' | '.join(head)} |")
    click.echo(f"| --- |{' ---: |' * (len(head) - 1)}")
    for line in lines:
        click.echo(f"| {' | '.join(line)} |")
    click.echo()


def print_rows(rows: list[Row]) -> None:
    """Samples in one table, other numbers in another one."""
    samples = [row for row in rows if isinstance(row.samples[0], Sample)]
    if samples:
        print_table(
            ("", "tasks/s", "server µs a task", "client µs a task"),
            [
                (row.name, *(shown(row.figures(of)) for of in ("rate", "server_us", "client_us")))
                for row in samples
            ],
        )
    others = [row for row in rows if row not in samples]
    if others:
        print_table(
            ("", "measured", "unit"),
            [(row.name, shown(row.figures()), row.unit) for row in others],
        )


def print_bars(bars: list[Bar]) -> None:
    """The last table."""
    click.echo("## Bars\n")
    print_table(
        ("what", "measured", "bar", "met"),
        [
            (
                bar.what,
                f"{shown(bar.measured)} {bar.unit}",
                f"{'≥' if bar.at_least else '≤'} {bar.limit:,g} {bar.unit}",
                "yes" if bar.met else "NO",
            )
            for bar in bars
        ],
    )


def measure(scenes: Sequence[str], full: bool, out: Path | None) -> None:
    """Run the scenes, print what they say, and write every sample to `out`."""
    start = time.monotonic()
    gate = Gate(PATIENCE[full])
    rows: dict[str, list[Row]] = {}
    bars: list[Bar] = []
    with Server(gate) as server:
        for name in scenes:
            module = import_module(f"scene_{name}")
            assert module.__doc__
            click.echo(f"## {name}\n\n{module.__doc__.strip()}\n")
            began = time.monotonic()
            rows[name] = module.run(server, full)
            server.forget_templates()
            print_rows(rows[name])
            click.echo(f"({time.monotonic() - began:.0f} s)\n")
            bars += module.bars(rows[name])
            if out:
                write(out, rows, bars, full)
    print_bars(bars)
    busy = sorted(gate.busy) or [0.0]
    noisy = sum(share > BUSY for share in gate.busy)
    click.echo(
        f"{os.cpu_count()} CPUs. {noisy} of {len(gate.busy)} samples began while others used"
        f" much of them, at most {busy[-1]:.0%}, in the median {busy[len(busy) // 2]:.0%}."
        f" {time.monotonic() - start:.0f} s."
    )


def write(out: Path, rows: Mapping[str, list[Row]], bars: list[Bar], full: bool) -> None:
    """All that was measured so far."""
    document = {
        "full": full,
        "cpus": os.cpu_count(),
        "rows": [{"scene": scene, **asdict(row)} for scene in rows for row in rows[scene]],
        "bars": [{**asdict(bar), "met": bar.met} for bar in bars],
    }
    out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--full", is_flag=True, help="All sizes and rounds: an hour or two.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file for every sample.")
@click.argument("scenes", nargs=-1, type=click.Choice(ORDER))
def main(full: bool, out: Path | None, scenes: tuple[str, ...]) -> None:
    """Measure pgsched beside yardsticks and peers, on a PostgreSQL of its own.

    SCENES: those alone; otherwise all.
    """
    try:
        measure(scenes or ORDER, full, out)
    except EmbeddedError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    # So that the server and all clients are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
