"""Run the pgTAP files with pg_prove, on a server of their own; see `make pgtap`."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from pgsched.embedded import Server

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / ".venv" / "pgtap"
TESTS = ROOT / "pgtap"


def prove(
    server: Server, database: str, path: Path = TESTS, *, user: str = "postgres"
) -> subprocess.CompletedProcess[str]:
    """Run a pgTAP file, or all of a folder, in this database as this user."""
    return server.run(
        str(TOOLS / "pg_prove"),
        *["--ext", ".sql", "--psql-bin", str(server.bin_dir / "psql")],
        *["-d", database, "-U", user, os.path.relpath(path, ROOT)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ran(output: str) -> tuple[int, int]:
    """How many files and assertions pg_prove says it ran; it passes when there were none."""
    counts = re.search(r"^Files=(\d+), Tests=(\d+)", output, re.MULTILINE)
    return (int(counts[1]), int(counts[2])) if counts else (0, 0)


def run() -> str:
    """Run all files and return one line with the counts; SystemExit when one fails."""
    with Server(settings={"fsync": "off", "synchronous_commit": "off"}) as server:
        dsn = server.create_database("pgtap")
        for script in (ROOT / "sql" / "schema" / "schema.sql", TOOLS / "pgtap.sql"):
            server.run("psql", "-Xqv", "ON_ERROR_STOP=1", "-d", dsn, "-f", script, check=True)
        done = prove(server, "pgtap")
    print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(done.returncode)
    files, assertions = ran(done.stdout)
    there = len(list(TESTS.glob("*.sql")))
    if files != there:
        sys.exit(f"pg_prove ran {files} of {there} files")
    return f"{files - 1} pgTAP files ({assertions} assertions)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--summary", type=Path, help="file for one line with the counts")
    arguments = parser.parse_args()
    counts = run()
    if arguments.summary:
        arguments.summary.write_text(f"{counts}\n")


if __name__ == "__main__":
    main()
