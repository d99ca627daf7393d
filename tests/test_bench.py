"""The replay runs a workload and passes it; its checks see whatever could be wrong."""

import gzip
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import mutants
import psycopg
import pytest
from click.testing import CliRunner
from mutants import Mutant
from workers import ask, is_running, wait_until

from pgsched import Task, enqueue
from pgsched.embedded import Server

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import replay
import swf
from replay_check import (
    Execution,
    Planned,
    Row,
    check,
    executions,
    peak,
    quantile,
    report,
    seconds_at,
)
from replay_worker import Records, read_records

JOBS = 60
CLAIM_WITHOUT_TIME = Mutant("claim_task", "and s.run_at <= v_now", "")
# Every call counts, as only some do else.
CLAIM_THAT_SAYS_EVERY_TENTH_TWICE = (
    Mutant("claim_task", "random() < 1.0 / 16", "p_worker not like '%+'"),
    Mutant("claim_task", "claim_task(p_worker, ", "claim_task(p_worker || '+', "),
    Mutant(
        "claim_task",
        "from claimed as c\n",
        "from claimed as c cross join generate_series(1, 1 + (c.id % 10 = 0)::integer)\n",
    ),
)


def line(number: int, submit: int, run_time: int, user: int) -> str:
    """A job as SWF has it."""
    return f"{number:5} {submit} -1 {run_time} 1 -1 -1 -1 -1 -1 -1 {user} 1 -1 -1 -1 -1 -1"


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """Jobs of three users and an unknown one, and two lines that are no whole job."""
    chance = random.Random(0)
    lines = ["; Version: 2.2", ";"]
    lines += [
        line(
            number, number * 10 + chance.randrange(10), chance.randrange(900), chance.choice(users)
        )
        for number, users in enumerate([(-1, 1, 2, 3)] * JOBS, start=1)
    ]
    lines += [line(JOBS + 1, -1, 5, 1), line(JOBS + 2, 700, -1, 1)]
    path = tmp_path / "workload.swf"
    path.write_text("\n".join(lines) + "\n")
    return path


def command(workload: Path, *options: str) -> list[str]:
    """A short replay, as a program."""
    small = ["--workers", "2", "--concurrency", "20", "--mean-sleep", "0.04"]
    return [sys.executable, "-W", "error", replay.__file__, str(workload), *small, *options]


def refusal(*arguments: str) -> tuple[int, str]:
    """Exit code and last line of a replay that does not come to run."""
    result = CliRunner().invoke(replay.main, arguments)
    return result.exit_code, result.output.splitlines()[-1]


# The whole


def test_a_workload_is_replayed_and_found_right(workload: Path) -> None:
    done = subprocess.run(
        command(workload, "--window", "1"), capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert f"workload.swf: {JOBS} jobs, 2 lines left out" in done.stdout
    figures = dict(re.findall(r"^  (\w[\w ]*\w)  +(\d+\.?\d*)", done.stdout, re.MULTILINE))
    assert {"jobs": str(JOBS), "window": "1", "slots": "40", "offered load": "0.06"}.items() <= (
        figures.items()
    )
    assert figures.keys() > {"start delay", "drain time", "peak backlog", "throughput"}
    assert "Verified: every job ran exactly once" in done.stdout


def test_early_and_doubled_jobs_make_it_fail_and_other_tasks_are_left_alone(
    workload: Path, dsn: str, conn: psycopg.Connection
) -> None:
    for mutant in (CLAIM_WITHOUT_TIME, *CLAIM_THAT_SAYS_EVERY_TENTH_TWICE):
        mutants.install(conn, mutant)
    enqueue(conn, "job", {"job": 1, "sleep": 0})
    others = "select * from pgsched.tasks where queue = 'default'"
    before = conn.execute(others).fetchall()

    done = subprocess.run(
        command(workload, "--window", "100", "--dsn", dsn),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 1
    # What says that it is claimed twice need not run twice: the worker may be waiting to run it.
    assert re.search(r"not as it should be \([1-6] doubled, ", done.stderr)
    assert re.search(
        r"early: started \d+\.\d+ s before its run_at \(job \d+, task \d+\)", done.stderr
    )
    assert re.search(r"doubled: started 2 times \(job \d+, task \d+\)", done.stderr)
    assert "Verified" not in done.stdout
    assert conn.execute(others).fetchall() == before


@contextmanager
def working(workload: Path, dsn: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A replay and the process ids of its two workers, which have registered."""
    pids: list[int] = []
    with subprocess.Popen(
        command(workload, "--mean-sleep", "60", "--window", "100", "--dsn", dsn),
        env={**os.environ, "TMPDIR": str(workload.parent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            query = "select split_part(name, ':', 2)::integer from pgsched.workers"
            wait_until(lambda: len(ask(dsn, query)) == 2)
            pids = ask(dsn, query)
            yield process, pids
        finally:
            process.kill()
            for pid in filter(is_running, pids):
                os.kill(pid, signal.SIGKILL)


def test_the_workers_end_with_a_replay_that_is_killed(workload: Path, dsn: str) -> None:
    with working(workload, dsn) as (process, pids):
        assert all(map(is_running, pids))
        process.kill()
        wait_until(lambda: not any(map(is_running, pids)))


def test_a_worker_that_dies_makes_it_fail(workload: Path, dsn: str) -> None:
    with working(workload, dsn) as (process, pids):
        os.kill(pids[0], signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert re.match(r"Error: worker [12] ended unexpectedly, exit code -9", stderr)
        assert not any(map(is_running, pids))


def test_when_the_time_is_over_it_says_what_is_left(
    workload: Path, conn: psycopg.Connection
) -> None:
    jobs, _ = swf.read(workload)
    run = replay.Replay(conn, deadline=time.monotonic())
    run.enqueue(jobs[:4], window=100, factor=1)
    finished, running, *_ = run.planned
    for task_id in (finished, running):
        conn.execute(
            """
            update pgsched.scheduled_tasks set queue = %s, run_at = clock_timestamp() where id = %s
            """,
            [run.prefix, task_id],
        )
        [(token,)] = conn.execute(
            "select claim_token from pgsched.claim_task('w', %s)", [run.prefix]
        )
        if task_id == finished:
            conn.execute("select pgsched.complete_task(%s, %s)", [task_id, token])
    with pytest.raises(click.ClickException) as caught:
        run.drain()
    left = "2 (processing), 3 (queued), 4 (queued)"
    assert caught.value.message == f"gave up: 3 jobs are not finished: {left}"


def test_jobs_are_due_as_in_the_log_once_all_are_enqueued(
    workload: Path, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "LEAD_SECONDS", 0.2)  # too short at first
    monkeypatch.setattr(replay, "BATCH", 7)
    jobs, _ = swf.read(workload)
    run = replay.Replay(conn, deadline=time.monotonic())
    run.enqueue(jobs, window=10, factor=0.5)
    assert min(task.run_at for task in run.planned.values()) > run.now()
    assert [(row.id, row.queue, row.run_at) for row in run.rows()] == [
        (task_id, task.queue, task.run_at) for task_id, task in sorted(run.planned.items())
    ]
    planned = list(run.planned.values())
    opening = planned[0].run_at
    length = jobs[-1].submit - jobs[0].submit
    assert [(task.job, task.sleep) for task in planned] == [
        (job.number, job.run_time * 0.5) for job in jobs
    ]
    assert [task.run_at - opening for task in planned] == pytest.approx(
        [(job.submit - jobs[0].submit) * 10 / length for job in jobs], abs=1e-5
    )
    assert {task.queue.removeprefix(run.prefix) for task in planned} == {
        *("-1", "-2", "-3", "-unknown")
    }


def test_a_record_is_there_at_once_by_the_servers_clock(
    dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    records = Records(tmp_path / "records", dsn)
    task = Task(
        id=7,
        queue="q",
        task_type="job",
        payload={"job": 57},
        priority=5,
        attempt=1,
        max_attempts=20,
        run_at=datetime.now(UTC),
        created_at=datetime.now(UTC),
    )
    run = replay.Replay(conn, deadline=0)
    before = run.now()
    records.end(records.start(task))
    after = run.now()

    [execution] = executions(read_records(tmp_path / "records"))
    assert (execution.task, execution.job, execution.attempt) == (7, 57, 1)
    assert execution.end is not None
    assert before <= execution.start <= execution.end <= after + records.uncertainty


# The checks

PLANNED = {
    task: Planned(job=50 + task, queue="q", run_at=100.0 + task, sleep=1.0) for task in (1, 2, 3)
}
EXECUTIONS = [
    Execution(task=task, job=job.job, attempt=1, start=job.run_at + 0.5, end=job.run_at + 1.5)
    for task, job in PLANNED.items()
]
ROWS = [
    Row(task, "q", "completed", 1, job.run_at, job.run_at + 0.25, job.run_at + 1.75, None)
    for task, job in PLANNED.items()
]


def test_what_went_as_planned_is_right() -> None:
    assert check(PLANNED, EXECUTIONS, ROWS) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"start": 101.0}, None),
        ({"start": 100.75}, "early: started 0.250000 s before its run_at"),
        ({"end": None}, "failed: did not end"),
        ({"attempt": 2}, "failed: started as attempt 2"),
        ({"job": 52}, "invented: ran as job 52"),
    ],
)
def test_a_record_that_says_otherwise_is_named(change: dict[str, Any], problem: str | None) -> None:
    runs = [replace(EXECUTIONS[0], **change), *EXECUTIONS[1:]]
    expected = [f"{problem} (job 51, task 1)"] if problem else []
    assert check(PLANNED, runs, ROWS) == expected


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"status": "failed"}, "failed: failed, attempt 1, last error: None"),
        ({"status": "queued", "last_error": "x"}, "failed: queued, attempt 1, last error: x"),
        ({"attempt": 2}, "failed: completed, attempt 2, last error: None"),
        ({"claimed_at": 100.75}, "early: claimed 0.250000 s before its run_at"),
        ({"run_at": 100.5}, f"invented: due 100.500000 in q, added as {PLANNED[1]}"),
        ({"queue": "r"}, f"invented: due 101.000000 in r, added as {PLANNED[1]}"),
    ],
)
def test_a_row_that_says_otherwise_is_named(change: dict[str, Any], problem: str) -> None:
    rows = [replace(ROWS[0], **change), *ROWS[1:]]
    assert check(PLANNED, EXECUTIONS, rows) == [f"{problem} (job 51, task 1)"]


def test_a_missing_a_doubled_and_an_invented_job_are_named() -> None:
    assert check(PLANNED, EXECUTIONS[1:], ROWS) == ["missing: never started (job 51, task 1)"]
    assert check(PLANNED, EXECUTIONS, ROWS[1:]) == [
        "missing: not in pgsched.tasks (job 51, task 1)"
    ]
    assert check(PLANNED, [*EXECUTIONS, EXECUTIONS[1]], ROWS) == [
        "doubled: started 2 times (job 52, task 2)"
    ]
    assert check(PLANNED, EXECUTIONS, [*ROWS, ROWS[1]]) == [
        "doubled: 2 rows in pgsched.tasks (job 52, task 2)"
    ]
    assert check(PLANNED, [*EXECUTIONS, replace(EXECUTIONS[1], task=9)], ROWS) == [
        "invented: task 9, which nobody added, was started 1 times, 0 rows in pgsched.tasks"
    ]


def test_a_problem_ends_the_replay() -> None:
    conn: Any = None
    run = replay.Replay(conn, deadline=0, planned=PLANNED)
    run.verify(EXECUTIONS, ROWS)
    with pytest.raises(click.ClickException, match=r"\(1 failed, 1 missing\):\n  missing: never"):
        run.verify(EXECUTIONS[1:], [replace(ROWS[0], status="failed"), *ROWS[1:]])


# The figures


def test_figures_are_those_of_the_records() -> None:
    figures = {
        name: figure for name, figure, _ in report(PLANNED, EXECUTIONS, ROWS, slots=2, window=2.0)
    }
    assert figures == {
        "jobs": "3",
        "window": "2 s",
        "slots": "2",
        "offered load": "0.75",
        "start delay": "0.500 / 0.500 / 0.500 s",
        "last start": "2.5 s",
        "drain time": "3.8 s",
        "peak backlog": "1",
        "all slots busy": "1.0 s",
        "slots in use": "60.0 %",
        "throughput": "0.8 /s",
    }


def test_a_span_does_not_contain_its_end() -> None:
    assert peak([(0, 2), (1, 3), (2, 4), (3, 3)]) == (2, 1)
    assert seconds_at([(0, 2), (1, 3), (2, 4), (3, 3)], 2) == 2
    assert seconds_at([(0, 2), (1, 3)], 1) == 3


def test_quantiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 201)]
    assert [quantile(values, share) for share in (0.5, 0.99, 1.0)] == [100, 198, 200]
    assert quantile([7.0, 8.0, 9.0], 0.5) == 8


# Refusals


def test_gzipped_or_not_makes_no_difference(workload: Path, tmp_path: Path) -> None:
    compressed = tmp_path / "workload.swf.gz"
    compressed.write_bytes(gzip.compress(workload.read_bytes()))
    jobs, left_out = swf.read(compressed)
    assert (jobs, left_out) == swf.read(workload)
    assert (len(jobs), left_out) == (JOBS, 2)


def test_a_job_whose_number_was_there_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "parts.swf"
    path.write_text("\n".join([line(1, 5, 9, 1), line(1, 5, 4, 1), line(2, 0, 3, -1)]))
    assert swf.read(path) == ([swf.Job(2, 0, 3, -1), swf.Job(1, 5, 9, 1)], 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "cannot read {}: No such file or directory"),
        (b"", "{} has no job with a submit time and a run time"),
        (b"; Version: 2\n", "{} has no job with a submit time and a run time"),
        (line(1, -1, 5, 1).encode(), "{} has no job with a submit time and a run time"),
        (b"; Version: 2\n1 2 3\n", "{} is not SWF: line 2 is not 18 numbers"),
        (b"name,age\nada,36\n", "{} is not SWF: line 1 is not 18 numbers"),
        (line(1, 0, 5, 1).replace("5", "x").encode(), "{} is not SWF: line 1 is not 18 numbers"),
        (line(1, 0, 5, 1).replace("5", "inf").encode(), "{} is not SWF: line 1 is not 18 numbers"),
        (
            gzip.compress(b"x" * 99, mtime=0)[:-9],
            "cannot read {}: Compressed file ended before the end-of-",
        ),
    ],
)
def test_a_file_without_jobs_is_refused(data: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if data is not None:
        path.write_bytes(data)
    code, text = refusal(str(path))
    assert code == 1
    assert text.startswith(f"Error: {message.format(path)}")


@pytest.mark.parametrize(
    "arguments",
    [
        "--window 0",
        "--window nan",
        "--window inf",
        "--window x",
        "--mean-sleep -1",
        "--workers 0",
        "--concurrency 0",
        "--concurrency 1.5",
        "--timeout 0",
        "--setting heavy",
    ],
)
def test_a_bad_number_is_refused(arguments: str, workload: Path) -> None:
    option, value = arguments.split()
    code, text = refusal(str(workload), option, value)
    assert code == 2
    assert text.startswith(f"Error: Invalid value for '{option}': ")


def test_a_database_without_the_schema_is_refused(workload: Path, server: Server) -> None:
    code, text = refusal(str(workload), "--dsn", server.dsn())
    assert code == 1
    assert text == 'Error: schema "pgsched" does not exist: run pgsched migrate'
