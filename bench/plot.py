"""Draw scenes of a run: `python bench/plot.py FILE.json`, which `bench.py --out FILE.json` wrote.

Writes docs/performance/SCENE.svg: a bar is the median of a row, the thin line goes from the least
to the greatest. Each says the commands that made it.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

import click
from measuring import number

DOCS = Path(__file__).parent.parent / "docs" / "performance"
CHARTS = {
    "drain": {"tasks/s": "no-op tasks a second"},
    "herd": {"tasks/s": "tasks a second", "ms": "claim and completion of ten, in ms"},
    "pinned": {"ms": "claim of one, in ms", "tasks/s": "tasks a second"},
}
"""The units that are drawn of a scene, and what they mean."""

WIDTH, LABELS, VALUES, LINE = 760, 290, 90, 22
STYLE = """
text { font: 13px sans-serif; fill: #1f2328; }
.title { font-weight: bold; }
.label { text-anchor: end; }
.small { font-size: 11px; fill: #59636e; }
.paper { fill: #ffffff; }
.ours { fill: #1a7f5a; }
.other { fill: #9aa4b0; }
.range { stroke: #1f2328; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .small { fill: #9198a1; }
  .paper { fill: #0d1117; }
  .ours { fill: #3fb98a; }
  .other { fill: #5c6672; }
  .range { stroke: #e6edf3; }
}
"""

Document = dict[str, Any]


def numbers(row: Document) -> list[float]:
    """One for each round: the tasks a second of a sample, or the number itself."""
    return [
        each["tasks"] / each["seconds"] if isinstance(each, dict) else each
        for each in row["samples"]
    ]


def panel(title: str, rows: list[Document], top: int) -> list[str]:
    """A bar for each row, below each other, from `top` on."""
    measured = {row["name"]: numbers(row) for row in rows}
    unit = (WIDTH - LABELS - VALUES) / (max(map(max, measured.values())) or 1)
    lines = [f'<text class="title" x="{LABELS}" y="{top + 15}">{escape(title)}</text>']
    for at, (name, values) in enumerate(measured.items(), start=1):
        y = top + at * LINE
        middle = median(values)
        kind = "ours" if name.startswith("pgsched") else "other"
        low, high = (LABELS + value * unit for value in (min(values), max(values)))
        lines += [
            f'<text class="label" x="{LABELS - 8}" y="{y + 15}">{escape(name)}</text>',
            f'<rect class="{kind}" x="{LABELS}" y="{y + 3}" width="{middle * unit:.1f}"'
            f' height="{LINE - 6}"/>',
            f'<path class="range" d="M{low:.1f} {y + LINE / 2}H{high:.1f}"/>',
            f'<text x="{high + 6:.1f}" y="{y + 15}">{number(middle)}</text>',
        ]
    return lines


def chart(scene: str, rows: Iterable[Document], command: str) -> str:
    """The SVG of a scene."""
    lines: list[str] = []
    top = 10
    for unit, meaning in CHARTS[scene].items():
        those = [row for row in rows if row["unit"] == unit]
        if those:
            lines += panel(f"{scene}: {meaning}", those, top)
            top += (len(those) + 2) * LINE
    lines.append(f'<text class="small" x="10" y="{top}">{escape(command)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 14}">'
    paper = f'<rect class="paper" width="{WIDTH}" height="{top + 14}"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", paper, *lines, "</svg>", ""])


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--to", type=click.Path(path_type=Path), default=DOCS, help="The folder for them.")
def main(file: Path, to: Path) -> None:
    """Draw the scenes drain, herd and pinned, as far as FILE has them."""
    document = json.loads(file.read_text())
    full = " --full" if document["full"] else ""
    command = f"python bench/bench.py{full} --out {file.name} && python bench/plot.py {file.name}"
    to.mkdir(parents=True, exist_ok=True)
    for scene in CHARTS:
        rows = [row for row in document["rows"] if row["scene"] == scene]
        if rows:
            (to / f"{scene}.svg").write_text(chart(scene, rows, command), encoding="utf-8")
            click.echo(f"{to / f'{scene}.svg'}")


if __name__ == "__main__":
    main()
