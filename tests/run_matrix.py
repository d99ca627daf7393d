"""pgTAP and pytest on versions of PostgreSQL and of Python; see `make test-matrix`.

Each PostgreSQL with this Python, then each other Python with the PostgreSQL that the tests usually
run on. Ends with a line for each of these combinations, and fails when one has failed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

from run_pgtap import ROOT

from pgsched.embedded import find_binaries

VENV = ROOT / ".venv"
RESULTS = VENV / "matrix"


def output(*command: str | Path) -> str:
    """What the command prints; nothing when it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode else done.stdout.strip()


def passes(*command: str | Path, **variables: str) -> bool:
    """Whether the command succeeds, in the project's folder and with these variables."""
    return not subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}).returncode


def version(python: str | Path) -> str:
    """The version of a Python that runs and can make virtual environments, else nothing."""
    return output(python, "-c", "import ensurepip, platform; print(platform.python_version())")


def find_python(name: str) -> Path | None:
    """The first of this name, on PATH or pyenv's, that can be used."""
    for folder in [*map(Path, os.get_exec_path()), *Path.home().glob(".pyenv/versions/*/bin")]:
        if (python := shutil.which(name, path=folder)) and version(python):
            return Path(python)
    return None


def environment(python: Path) -> Path:
    """The Python of a virtual environment of its own, with the project and what its tests need."""
    made = VENV / python.name / "bin" / "python"
    install = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", "-e", ".[dev]"]
    if not (passes(python, "-m", "venv", VENV / python.name) and passes(made, *install)):
        sys.exit(f"{python} has no virtual environment")
    return made


def run(python: Path, programs: Path, options: list[str]) -> str:
    """Run all tests with them and say how that went."""
    begin = time.monotonic()
    variables = {"PGSCHED_PG_BIN": str(programs)}
    pgtap, pytest = RESULTS / "pgtap.txt", RESULTS / "pytest.xml"
    if not passes(python, "tests/run_pgtap.py", "--summary", pgtap, **variables):
        return "FAILED in pgTAP"
    if not passes(python, "-m", "pytest", "--junitxml", pytest, *options, **variables):
        return "FAILED in pytest"
    [suite] = ElementTree.parse(pytest).getroot().iter("testsuite")
    tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    return (
        f"passed: {pgtap.read_text().strip()}, {tests - skipped} pytest tests"
        f" ({skipped} skipped), {time.monotonic() - begin:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--postgresql", nargs="*", default=[], help="folders with bin/postgres")
    parser.add_argument("--pythons", nargs="*", default=[], help="names or paths of interpreters")
    parser.add_argument("options", nargs="*", help="for pytest, after --")
    arguments = parser.parse_args()

    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir()
    this = Path(sys.executable)
    combinations = [(this, Path(folder).absolute() / "bin") for folder in arguments.postgresql]
    missing = []
    for name in arguments.pythons:
        python = find_python(name)
        if not python:
            missing.append(name)
        elif version(python).split(".")[:2] != version(this).split(".")[:2]:
            combinations.append((environment(python), find_binaries()))

    lines = []
    for python, programs in combinations:
        postgresql = output(programs / "postgres", "--version").split()[2]
        name = f"PostgreSQL {postgresql}, Python {version(python)}"
        print(f"Running pgTAP and pytest: {name}", flush=True)
        lines.append(f"{name}: {run(python, programs, arguments.options)}")
    print("\n".join([*lines, *(f"{name}: not here" for name in missing)]))
    sys.exit(any("FAILED" in line for line in lines))


if __name__ == "__main__":
    main()
