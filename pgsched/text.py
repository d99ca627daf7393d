"""Text for a terminal, whatever names, errors and payloads hold: it takes no order from them."""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate
from unicodedata import category, east_asian_width

import psycopg

from pgsched.errors import PgschedError, from_database

CURES = {
    "08001": "check --dsn or PGSCHED_DSN, and that the server runs",
    "25006": "connect to the primary server, or as a role that may write",
    "42501": "as the owner of the schema: pgsched grant KIND ROLE",
}
"""What to do, where neither the server nor pgsched.errors says it, by SQLSTATE."""


def explained(error: Exception) -> str:
    """What went wrong and what to do, in one line."""
    cause = error.__cause__ if isinstance(error, PgschedError) else error
    text, cure = str(error), None
    if isinstance(cause, psycopg.Error):
        known = from_database(cause)
        text = str(known) if known is not cause else cause.diag.message_primary or text
        # Whoever cannot connect gets no SQLSTATE.
        lost = isinstance(cause, psycopg.OperationalError) and cause.sqlstate is None
        cure = CURES.get("08001" if lost else cause.sqlstate or "")
    return plain(" ".join(text.split())) + (f" ({cure})" if cure else "")


def plain(text: str) -> str:
    """The text with escapes in place of what moves the cursor, turns the direction or hides."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


def ascii_json(text: str) -> str:
    """The same JSON, with escapes for all but ASCII."""
    return re.sub(r"[^ -~]+", lambda found: json.dumps(found[0])[1:-1], text)


def width(text: str) -> int:
    """How many columns the text takes."""
    return sum(
        0 if category(sign) in ("Mn", "Me") else 2 if east_asian_width(sign) in "WF" else 1
        for sign in text
    )


def fit(text: str, columns: int) -> str:
    """The text, cut to so many columns."""
    if width(text) <= columns:
        return text
    return text[: sum(size < columns for size in accumulate(map(width, text)))] + "…"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], columns: int) -> list[str]:
    """The lines of a table, its first column cut where all would be wider than ``columns``."""
    cells = [[plain(cell) for cell in row] for row in (header, *rows)]
    first, *others = (max(map(width, column)) for column in zip(*cells, strict=True))
    first = min(first, max(columns - sum(others) - 2 * len(others), 1))
    lines = []
    for name, *figures in cells:
        name = fit(name, first)
        name += " " * (first - width(name))
        lines.append("  ".join([name, *map(str.rjust, figures, others)]).rstrip())
    return lines


def count(number: int) -> str:
    """Counts stop at 10,000."""
    return "10000+" if number >= 10_000 else str(number)


def age(seconds: float) -> str:
    """A length of time in one unit; none is a dash."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds else "-"
