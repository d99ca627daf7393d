"""Run the pgTAP files with pg_prove, on a server of their own; see `make pgtap`."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from pgsched.embedded import Server

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / ".venv" / "pgtap"


def prove(files: list[Path]) -> str:
    """Run these files, show what pg_prove says, and return it; exit when one fails."""
    with Server(settings={"fsync": "off", "synchronous_commit": "off"}) as server:
        server.create_database("pgtap")
        for script in (ROOT / "sql" / "schema" / "schema.sql", TOOLS / "pgtap.sql"):
            options = ["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", "pgtap"]
            server.run("psql", *options, "-f", script, check=True)
        options = ["--ext", ".sql", "--psql-bin", str(server.bin_dir / "psql"), "-d", "pgtap"]
        done = server.run(
            str(TOOLS / "pg_prove"),
            *options,
            *files,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    print(done.stdout, end="", flush=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--summary", type=Path, help="file for one line with the counts")
    summary = parser.parse_args().summary

    files = sorted((ROOT / "pgtap").glob("*.sql"))
    files = [path.relative_to(ROOT) for path in files if path.name != "fixtures.sql"]
    # pg_prove passes when it runs nothing, so its own count has to be ours.
    counts = re.search(r"^Files=(\d+), Tests=(\d+)", prove(files), re.MULTILINE)
    if not files or not counts or int(counts[1]) != len(files):
        sys.exit(f"pg_prove ran {counts[1] if counts else 'none'} of {len(files)} files")
    if summary:
        summary.write_text(f"{counts[1]} pgTAP files ({counts[2]} assertions)\n")


if __name__ == "__main__":
    main()
