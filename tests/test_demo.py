"""The demo's verification sees whatever could be wrong; the demo itself runs and passes it."""

import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pgsched.demo import LIBRARY, Job, Row, plan, verify

NOW = datetime(2026, 1, 1, tzinfo=UTC)
JOBS = {
    1: Job(path="plain.py", answer={"sha256": "aa", "lines": 1}),
    2: Job(path="fails.py", answer={"sha256": "bb", "lines": 2}, fails_once=True),
    3: Job(path="held.py", answer={"sha256": "cc", "lines": 3}),
    4: Job(path="held_before_it_failed.py", answer={"sha256": "dd", "lines": 4}, fails_once=True),
    5: Job(path="held_after_it_failed.py", answer={"sha256": "ee", "lines": 5}, fails_once=True),
}
HELD = {3, 4, 5}
ENDINGS = {
    1: ["completed"],
    2: ["retried", "completed"],
    3: ["reaped", "completed"],
    4: ["reaped", "completed"],
    5: ["retried", "reaped", "completed"],
}
ROWS = [
    Row(task_id, "completed", len(endings), JOBS[task_id].answer, NOW, NOW, NOW, endings)
    for task_id, endings in ENDINGS.items()
]


def test_what_went_as_planned_is_right() -> None:
    assert verify(JOBS, ROWS, HELD) == []


@pytest.mark.parametrize(
    ("task_id", "change"),
    [
        (1, {"result": {"sha256": "ab", "lines": 1}}),
        (1, {"result": {"sha256": "aa", "lines": 2}}),
        (1, {"result": None}),
        (1, {"status": "queued", "endings": []}),
        (1, {"status": "processing", "endings": []}),
        (1, {"status": "failed", "endings": ["failed"]}),
        (1, {"status": "cancelled", "endings": ["cancelled"]}),
        (1, {"attempt": 2}),
        (1, {"attempt": 2, "endings": ["retried", "completed"]}),
        (1, {"attempt": 1, "endings": ["reaped", "completed"]}),
        (1, {"attempt": 2, "endings": ["completed", "reaped"]}),
        (1, {"endings": ["completed", "completed"]}),
        (1, {"endings": []}),
        (2, {"attempt": 1, "endings": ["completed"]}),
        (2, {"attempt": 3, "endings": ["retried", "retried", "completed"]}),
        (3, {"attempt": 1, "endings": ["completed"]}),
        (3, {"endings": ["retried", "completed"]}),
        (4, {"attempt": 3, "endings": ["reaped", "retried", "completed"]}),
        (5, {"attempt": 2, "endings": ["retried", "completed"]}),
    ],
)
def test_a_task_that_went_otherwise_is_named(task_id: int, change: dict[str, Any]) -> None:
    rows = [replace(row, **change) if row.id == task_id else row for row in ROWS]
    [problem] = verify(JOBS, rows, HELD)
    assert problem.startswith(f"task {task_id} ({JOBS[task_id].path}) ")


def test_a_task_may_also_be_lost_by_a_worker_that_stalled() -> None:
    lost = replace(ROWS[0], attempt=3, endings=["reaped", "reaped", "completed"])
    assert verify(JOBS, [lost, *ROWS[1:]], HELD) == []


def test_a_missing_a_repeated_and_an_unknown_task_are_named() -> None:
    rows = [*ROWS[1:], ROWS[1], replace(ROWS[0], id=6)]
    problems = verify(JOBS, rows, HELD)
    assert [problem.split()[1] for problem in problems] == ["1", "2", "6,"]


def test_the_plan_has_every_file_once_and_something_of_everything() -> None:
    jobs = plan(None)
    paths = {job.path for job in jobs}
    assert len(paths) == len(jobs) > 500
    assert {path.name for path in LIBRARY.glob("*.py")} <= paths
    assert not any("site-packages" in Path(path).parts for path in paths)
    assert {job.queue for job in jobs} == {"small", "large"}
    assert len({job.priority for job in jobs}) >= 3
    assert 10 <= sum(job.fails_once for job in jobs) <= 11
    assert 0 < sum(job.delay is not None for job in jobs) < len(jobs) / 40


def test_the_demo_runs_and_finds_everything_right() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pgsched", "demo", "--files", "200"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    figures = dict(re.findall(r"^  (\w\S*) +(\d+)  ", done.stdout, re.MULTILINE))
    killed = re.search(r"Killed worker 2 \(SIGKILL\) with (\d+) tasks in hand", done.stdout)
    assert killed
    tasks, attempts, retried, reaped = (
        int(figures[name]) for name in ("tasks", "attempts", "retried", "reaped")
    )
    assert tasks == 200
    assert reaped >= int(killed[1]) > 0
    assert 10 - reaped <= retried <= 10
    assert attempts == tasks + retried + reaped
    assert {"tasks/s", "contention"} <= figures.keys()
    assert re.search(r"latency +\d+\.\d+ / \d+\.\d+ s", done.stdout)
    assert "Verified: every hash and line count is right" in done.stdout
