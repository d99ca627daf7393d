"""A page's commands, run as they stand there, and its output, compared."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import sql_examples
from psycopg.conninfo import conninfo_to_dict
from workers import PATIENCE

from pgsched.embedded import Server

# What may be another one than the page shows, wherever it stands.
VARIES = [
    r"autovacuum (?:came .+ ago|has not come yet)",
    r"oldest snapshot: \S+(?: s| min)?",
    r"\d+(?: or more)? tasks?",
    r"\d+ (?:bytes|kB|MB|GB)",
    r"\d+ (?:seconds|minutes|hours|days)",
    r"\d+(?:\.\d+)? (?:s|min)\b",
    r"\d+",
    r"-{3,}|-*(?:\+-+)+",
    "…",
]


class Place(NamedTuple):
    """A database, and a folder to work in."""

    server: Server
    dsn: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Where libpq finds the database, and the shell the programs."""
        names = {"dbname": "PGDATABASE"}
        where = {
            names.get(name, f"PG{name.upper()}"): str(value)
            for name, value in conninfo_to_dict(self.dsn).items()
        }
        return {
            "PATH": f"{Path(sys.executable).parent}:{self.server.bin_dir}:/usr/bin:/bin",
            **where,
        }

    def shell(self, block: str, *, code: int = 0, **environment: str) -> str:
        """Run a block of the page as it is, and return all that it printed."""
        done = subprocess.run(
            ["sh", "-c", block],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def sql(self, block: str) -> str:
        """Run a block of SQL in psql, and return what that printed."""
        [output] = sql_examples.run(self.server, self.dsn, [block])
        return output


def blocks(page: Path, heading: str, language: str) -> list[str]:
    """The blocks of this language under a heading, which has no lower ones."""
    text = page.read_text(encoding="utf-8")
    start = re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE)
    assert start, f"{page.name} has no {heading}"
    text = re.split(r"^#+ ", text[start.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)


def instead(block: str, words: str, other: object) -> str:
    """The block with something that the reader has to fill in."""
    assert block.count(words) == 1
    return block.replace(words, str(other))


def says(output: str, shown: str) -> None:
    """Each line that the page shows is one of the output, with what may vary."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    for line in filter(None, (" ".join(each.split()) for each in shown.splitlines())):
        pattern, end = "", 0
        for match in re.finditer("|".join(f"({each})" for each in VARIES), line):
            assert match.lastindex
            varies = VARIES[match.lastindex - 1].replace("…", ".*")
            pattern += re.escape(line[end : match.start()]) + f"(?:{varies})"
            end = match.end()
        pattern += re.escape(line[end:])
        assert any(re.fullmatch(pattern, each) for each in lines), f"{line}\n\n{output}"
