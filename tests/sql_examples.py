"""The SQL blocks of a document, each followed by a text block: what psql prints for it.

A block without one prints nothing. The blocks of a document are one psql session, in order.
"""

import re
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from pgsched.embedded import Server

EXAMPLE = re.compile(
    r"^```sql\n(?P<sql>.*?)^```\n(?:\s*^```text\n(?P<output>.*?)^```$)?", re.MULTILINE | re.DOTALL
)
UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?[+-]\d\d(?::\d\d)?")
MARK = "---- end of block ----"


class Example(NamedTuple):
    """SQL, the output that the document shows for it, and the number of its first line."""

    sql: str
    output: str
    line: int


def examples(text: str) -> list[Example]:
    """The SQL blocks of a Markdown text."""
    return [
        Example(match["sql"], match["output"] or "", text.count("\n", 0, match.start("sql")) + 1)
        for match in EXAMPLE.finditer(text)
    ]


def run(server: Server, dsn: str, statements: Sequence[str]) -> list[str]:
    """What psql prints for each, errors too."""
    script = "".join(f"{each}\n\\echo '{MARK}'\n" for each in statements)
    options = ["-X", "-q", "-v", "SHOW_CONTEXT=never", "-d", dsn]
    done = server.run(
        "psql", *options, input=script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True
    )
    *outputs, rest = done.stdout.split(f"{MARK}\n")
    assert not rest, rest
    return outputs


def normalised(output: str) -> str:
    """The output with one token for all tokens, and one time for all times.

    A timestamp's length varies, and with it the width of its table: there, a run of spaces or of
    dashes counts as one.
    """
    output = UUID.sub("00000000-0000-0000-0000-000000000000", output)
    if TIMESTAMP.search(output):
        output = re.sub(r"--+", "-", re.sub(r"  +", " ", TIMESTAMP.sub("a time", output)))
    return "\n".join(line.rstrip() for line in output.rstrip().splitlines())
