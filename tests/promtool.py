"""Prometheus' own tool: see `make test-metrics`."""

import subprocess
from pathlib import Path

PROGRAM = Path(__file__).parent.parent / ".venv" / "promtool" / "promtool"


def promtool(*arguments: str | Path, text: str = "") -> str:
    """What it says, without a complaint; ``text`` is its stdin."""
    assert PROGRAM.exists(), "no promtool: make test-metrics fetches one"
    done = subprocess.run(
        [PROGRAM, *arguments], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout
