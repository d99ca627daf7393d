"""pgTAP and pytest on a server with plpgsql_check, and what they ran; see `make coverage`.

Fails when too little was run of the PL/pgSQL functions or of the package; prints what was not.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import plpgsql_coverage
import run_pgtap
from plpgsql_coverage import FOLDER, Statement
from run_pgtap import ROOT
from workers import install

from pgsched.embedded import Server

FUNCTIONS = ROOT / "sql" / "schema" / "functions"

MIN_STATEMENTS = 95.0
"""Percent of all statements."""


def all_counts() -> Counter[Statement]:
    """How often the tests have run each statement of the schema."""
    with Server(settings={"fsync": "off"}) as server:
        dsn = server.create_database("schema")
        install(server, dsn)
        times = plpgsql_coverage.counts(dsn)
    for path in FOLDER.glob("plpgsql.*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            *fields, count = json.loads(line)
            if (statement := Statement(*fields)) in times:
                times[statement] += count
    return times


def branches(times: Mapping[Statement, int]) -> Iterator[tuple[Statement, str, int]]:
    """Each way that a statement may go: the statement, the way, and how often it went there.

    An `if` without an `else` has one way more than it has parts.
    """
    ways: defaultdict[tuple[str, int | None], dict[str, int]] = defaultdict(dict)
    for each in sorted(times, key=lambda statement: statement.number):
        if each.part and each.part != "body":  # that of a block is no choice
            ways[each.function, each.parent].setdefault(each.part, times[each])
    for each in times:
        went = ways[each.function, each.number]
        if each.name == "IF" and "else body" not in went:
            went = {**went, "no else": times[each] - sum(went.values())}
        for way, count in went.items():
            yield each, way, count


def places() -> dict[str, tuple[str, list[str], int]]:
    """Of each function the name and the lines of its file, and how many stand before its body."""
    found = {}
    for path in FUNCTIONS.glob("*.sql"):
        text = path.read_text(encoding="utf-8")
        begin = r"^create (?:function|procedure) pgsched\.(\w+)\(.*?\nas \$\$"
        for match in re.finditer(begin, text, re.MULTILINE | re.DOTALL):
            before = text.count("\n", 0, match.end())
            found[match[1]] = (str(path.relative_to(ROOT)), text.splitlines(), before)
    return found


def report(times: Mapping[Statement, int]) -> bool:
    """Print what of the functions was not run, and how much was; whether that is enough."""
    where = places()

    def tell(statement: Statement, what: str) -> None:
        path, lines, before = where[statement.function]
        line = before + statement.line
        print(f"{path}:{line}: {statement.function}: {what}: {lines[line - 1].strip()}")

    missed = [each for each in times if not times[each]]
    for each in sorted(missed):
        tell(each, f"{each.name} not run")
    ways = [*branches(times)]
    not_gone = [(each, way) for each, way, count in ways if not count]
    for each, way in sorted(not_gone):
        if times[each]:  # else it is in the list above
            tell(each, f"never {way}")
    percent = 100 * (1 - len(missed) / len(times))
    print(
        f"PL/pgSQL: {len({each.function for each in times})} functions,"
        f" {percent:.1f} % of {len(times)} statements,"
        f" {100 * (1 - len(not_gone) / len(ways)):.1f} % of {len(ways)} branches"
    )
    if percent < MIN_STATEMENTS:
        print(f"Too little: {MIN_STATEMENTS:g} % of the statements have to run")
    return percent >= MIN_STATEMENTS


def coverage(command: str, *arguments: str, **variables: str) -> int:
    """Run coverage.py and return its exit code."""
    words = [sys.executable, "-m", "coverage", command, *arguments]
    return subprocess.run(words, cwd=ROOT, env={**os.environ, **variables}).returncode


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    plpgsql_coverage.pytest_configure()
    print("Running the SQL tests (pg_prove)", flush=True)
    run_pgtap.run()

    print("Running the Python tests (pytest)", flush=True)
    data = f"--data-file={FOLDER / 'python'}"
    tests = ["-m", "pytest", "-p", "tests.plpgsql_coverage", *sys.argv[1:]]
    # Where another user gets, too: a test runs the command line as one.
    with TemporaryDirectory(prefix="pgsched-coverage-") as folder:
        Path(folder).chmod(0o1777)
        failed = coverage("run", *tests, COVERAGE_FILE=f"{folder}/python")
        failed = failed or coverage("combine", "--quiet", data, folder)
    if failed:
        sys.exit(failed)
    enough = report(all_counts())
    sys.exit(coverage("report", data) or not enough)


if __name__ == "__main__":
    main()
