"""The command line, run in this process or in one of its own, as tests want it."""

import os
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result
from psycopg.conninfo import conninfo_to_dict

from pgsched.cli import main


def pgsched(*arguments: str, **environment: str) -> Result:
    """Run the command line in this process, without PGSCHED_DSN unless given."""
    runner = CliRunner(env={"PGSCHED_DSN": None, **environment})
    result = runner.invoke(main, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception  # it would have been a traceback
    return result


def refused(*arguments: str, **environment: str) -> str:
    """The one line that says why not."""
    result = pgsched(*arguments, **environment)
    assert result.exit_code
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    # A usage error has click's two lines above it.
    assert len(lines) == (4 if result.exit_code == 2 else 1), lines
    assert lines[-1].startswith("Error: ")
    return lines[-1].removeprefix("Error: ")


def process(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """The command line in a process of its own, with pipes, unless options say otherwise."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, **options.pop("env", {})}
    command = [sys.executable, "-m", "pgsched", *arguments]
    return subprocess.Popen(command, text=True, env=environment, **{**pipes, **options})


def keywords(url: str) -> str:
    """The same DSN in its other form."""
    return " ".join(f"{name}={value}" for name, value in conninfo_to_dict(url).items())
