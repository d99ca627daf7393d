"""The demo's verification sees whatever could be wrong; the demo itself runs and passes it."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from workers import is_running, wait_until

from pgsched.demo import LIBRARY, measured, plan, verify

LOST = "worker host:1:ab was lost: its lease ended during attempt {}".format
FAILED = "OSError: planned"
ANSWER = measured("os.py")

# The fifth was lost before its handler began.
FAILS = {1: False, 2: True, 3: False, 4: True, 5: True}
TASKS = {
    task_id: {"payload": {"path": "os.py", "fails": fails}} for task_id, fails in FAILS.items()
}
LOSSES = {3: (1, LOST(1)), 4: (1, LOST(1)), 5: (2, LOST(2))}
CALLS = ["1 1", "2 1", "2 2", "3 1", "3 2", "4 1", "4 2", "5 1", "5 3"]
ROWS: dict[int, tuple[Any, ...]] = {
    1: (1, "completed", 1, None, ANSWER, True),
    2: (2, "completed", 2, FAILED, ANSWER, True),
    3: (3, "completed", 2, LOST(1), ANSWER, True),
    4: (4, "completed", 2, LOST(1), ANSWER, True),
    5: (5, "completed", 3, LOST(2), ANSWER, True),
}
COLUMNS = ("id", "status", "attempt", "last_error", "result", "due")


def test_an_answer_is_the_files_hash_and_its_number_of_lines() -> None:
    data = (LIBRARY / "os.py").read_bytes()
    with (LIBRARY / "os.py").open("rb") as lines:
        expected = {"sha256": hashlib.sha256(data).hexdigest(), "lines": len(list(lines))}
    assert measured("os.py") == expected


def test_what_went_as_planned_is_right() -> None:
    assert verify(TASKS, CALLS, ROWS.values(), LOSSES) == []


def test_a_lost_attempt_may_have_begun() -> None:
    assert verify(TASKS, [*CALLS, "5 2"], ROWS.values(), LOSSES) == []


@pytest.mark.parametrize(
    ("task_id", "change"),
    [
        (1, {"result": ANSWER | {"sha256": "ab"}}),
        (1, {"result": ANSWER | {"lines": 2}}),
        (1, {"result": None}),
        (1, {"status": "queued"}),
        (1, {"status": "processing"}),
        (1, {"status": "failed"}),
        (1, {"attempt": 2}),
        (1, {"last_error": FAILED}),
        (1, {"attempt": 2, "last_error": LOST(1)}),
        (1, {"due": False}),
        (2, {"attempt": 1, "last_error": None}),
        (2, {"attempt": 3}),
        (2, {"last_error": LOST(1)}),
        (3, {"attempt": 1, "last_error": None}),
        (3, {"last_error": FAILED}),
        (4, {"attempt": 3, "last_error": FAILED}),
        (5, {"attempt": 2, "last_error": FAILED}),
    ],
)
def test_a_task_that_went_otherwise_is_named(task_id: int, change: dict[str, Any]) -> None:
    changed = dict(zip(COLUMNS, ROWS[task_id], strict=True)) | change
    [problem] = verify(TASKS, CALLS, (ROWS | {task_id: (*changed.values(),)}).values(), LOSSES)
    assert problem.startswith(f"task {task_id} is ")


@pytest.mark.parametrize("call", ["1 1", "1 2", "2 2", "3 1", "3 3", "5 1"])
def test_a_call_of_the_handler_too_many_is_seen(call: str) -> None:
    [problem] = verify(TASKS, [*CALLS, call], ROWS.values(), LOSSES)
    assert problem.startswith(f"task {call[0]} is ")


@pytest.mark.parametrize("call", ["1 1", "2 1", "2 2", "3 2", "5 1", "5 3"])
def test_a_call_of_the_handler_too_few_is_seen(call: str) -> None:
    calls = [other for other in CALLS if other != call]
    [problem] = verify(TASKS, calls, ROWS.values(), LOSSES)
    assert problem.startswith(f"task {call[0]} is ")


def test_a_missing_a_repeated_and_an_unknown_task_are_named() -> None:
    rows = [*list(ROWS.values())[1:], ROWS[2], (6, *ROWS[1][1:])]
    problems = verify(TASKS, CALLS, rows, LOSSES)
    assert [problem.split()[1] for problem in problems] == ["1", "2", "6"]


def test_the_plan_has_every_file_once_and_something_of_everything() -> None:
    tasks = plan(None)
    payloads = [task["payload"] for task in tasks]
    paths = {payload["path"] for payload in payloads}
    assert len(paths) == len(tasks) > 500
    assert {path.name for path in LIBRARY.glob("*.py")} <= paths
    assert not any("site-packages" in Path(path).parts for path in paths)
    assert {task["queue"] for task in tasks} == {"small", "large"}
    assert len({task["priority"] for task in tasks}) >= 3
    assert 10 <= sum(payload["fails"] for payload in payloads) <= 11
    assert 40 <= sum(payload["seconds"] for payload in payloads) <= 50
    assert 0 < sum(task["run_at"] is not None for task in tasks) < len(tasks) / 40


def test_the_demo_runs_and_finds_everything_right() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pgsched", "demo", "--files", "200"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    figures = dict(re.findall(r"^  (\w+) +(\d+)  ", done.stdout, re.MULTILINE))
    tasks, attempts, failed, reaped = map(int, figures.values())
    killed = re.search(r"Killed worker 2 \(SIGKILL\) with (\d+) tasks in hand", done.stdout)
    assert killed
    assert tasks == 200
    assert reaped == int(killed[1]) > 0
    assert 10 - reaped <= failed <= 10
    assert attempts == tasks + failed + reaped
    assert re.search(r"^ +\d+ %$", done.stdout, re.MULTILINE)
    assert "Verified: every hash and line count is right" in done.stdout


@pytest.mark.long
def test_a_wrong_answer_fails_the_demo_and_shows_the_workers_logs() -> None:
    program = """
from pgsched import cli, demo
demo.measured = lambda path: None  # in this process: the workers' answers are not what it expects
cli.main(["demo", "--files", "100"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Verified" not in done.stdout
    assert "Error: 100 tasks are not right:\n  task 1 is " in done.stderr
    logs = re.findall(r"^The log of (.*) ends:\n.", done.stderr, re.MULTILINE)
    assert logs == ["worker 1", "worker 2", "worker 3"]
    assert "WARNING pgsched reaped: task=" in done.stderr


def test_a_killed_demo_leaves_no_process_and_no_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        demo = subprocess.Popen(
            [sys.executable, "-m", "pgsched", "demo"],
            stdout=subprocess.PIPE,
            env=os.environ | {"TMPDIR": folder},
            text=True,
        )
        with demo:
            assert demo.stdout
            started = map(re.compile(r"^Started worker \d, process (\d+)$").match, demo.stdout)
            workers = [int(next(filter(None, started))[1]) for _ in range(2)]
            [server] = Path(folder).iterdir()
            wait_until(lambda: (server / "worker 2").stat().st_size > 0)
            demo.kill()
        wait_until(lambda: not server.exists())
        wait_until(lambda: not any(map(is_running, workers)))
