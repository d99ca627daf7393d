"""Measure pgsched: scenes in order, their tables, and at the end the bars. See README.md, here.

Needs no database: it starts a PostgreSQL in a temporary folder.
"""

import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

import click
from measuring import Bar, Figures, Gate, Row, Sample, Server

from pgsched.embedded import EmbeddedError

ORDER = ("sql", "drain", "latency", "herd", "pinned", "backlogs", "cost")
PATIENCE = {False: 20.0, True: 600.0}
"""Seconds that samples wait for a quiet machine, together."""


def number(value: float) -> str:
    """Three significant digits, or all before the point."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


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


def measure(scenes: list[str], full: bool, out: Path | None) -> None:
    """Run the scenes, print what they say, and write every sample to `out`."""
    start = time.monotonic()
    gate = Gate(PATIENCE[full])
    rows: list[Row] = []
    bars: list[Bar] = []
    with Server(gate) as server:
        for name in scenes:
            module = import_module(f"scene_{name}")
            assert module.__doc__
            click.echo(f"## {name}\n\n{module.__doc__.strip()}\n")
            began = time.monotonic()
            found = module.run(server, full)
            server.forget_templates()
            print_rows(found)
            click.echo(f"({time.monotonic() - began:.0f} s)\n")
            rows += found
            bars += module.bars(found) if hasattr(module, "bars") else []
            if out:
                write(out, rows, bars, full)
    if bars:
        print_bars(bars)
    busy = sorted(gate.busy) or [0.0]
    click.echo(
        f"{os.cpu_count()} CPUs. {gate.noisy} of {gate.samples} samples began while others used"
        f" much of them, at most {busy[-1]:.0%}, in the median {busy[len(busy) // 2]:.0%}."
        f" {time.monotonic() - start:.0f} s."
    )


def write(out: Path, rows: list[Row], bars: list[Bar], full: bool) -> None:
    """All that was measured so far."""
    document = {
        "full": full,
        "cpus": os.cpu_count(),
        "rows": [
            {
                "scene": row.scene,
                "name": row.name,
                "unit": row.unit,
                "samples": [s._asdict() if isinstance(s, Sample) else s for s in row.samples],
            }
            for row in rows
        ],
        "bars": [
            {
                "what": bar.what,
                "measured": bar.measured._asdict(),
                "limit": bar.limit,
                "at_least": bar.at_least,
                "unit": bar.unit,
                "met": bar.met,
            }
            for bar in bars
        ],
    }
    out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--full", is_flag=True, help="All sizes and rounds: an hour or two.")
@click.option("--scenes", help=f"Some of: {','.join(ORDER)}. Default: all.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file for every sample.")
@click.option("--pg-bin", help="Folder of PostgreSQL's programs, pgbench included.")
def main(full: bool, scenes: str | None, out: Path | None, pg_bin: str | None) -> None:
    """Measure pgsched beside yardsticks and peers, on a PostgreSQL of its own."""
    if pg_bin:
        os.environ["PGSCHED_PG_BIN"] = pg_bin
    chosen = scenes.split(",") if scenes else list(ORDER)
    if unknown := set(chosen) - set(ORDER):
        raise click.BadParameter(f"no such scene: {', '.join(sorted(unknown))}")
    try:
        measure(chosen, full, out)
    except EmbeddedError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    # So that the server and all clients are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
