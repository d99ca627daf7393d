"""What operators do with tasks and queues on the command line, as text and as JSON."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from command_line import pgsched, process, refused
from oracle import Connect
from workers import NEWEST, row

from pgsched import enqueue


def as_json(*arguments: str) -> Any:
    """The document that a command prints, which is all that it prints."""
    result = pgsched(*arguments, "--json")
    assert result.stderr == ""
    assert result.stdout.isascii()
    return json.loads(result.stdout)


def failed(conn: psycopg.Connection, **options: Any) -> int:
    """A new task that failed for good."""
    task_id = enqueue(conn, "type", queue="dead", **options)
    conn.execute(
        """
        select pgsched.fail_task(id, claim_token, 'boom', p_permanent => true)
          from pgsched.claim_task('worker', 'dead')
        """
    )
    return task_id


# show


def test_a_task_is_shown_with_all_that_is_known(dsn: str, conn: psycopg.Connection) -> None:
    conn.execute(f"alter database {conn.info.dbname} set timezone to 'Asia/Tokyo'".encode())
    conn.execute(f"alter database {conn.info.dbname} set datestyle to 'German'".encode())
    task_id = enqueue(conn, "type", {"n": 1}, queue="mail", unique_key="u")
    conn.execute("select pgsched.claim_task('worker 1', 'mail', p_lease => '1 hour')")
    document = as_json("show", str(task_id), "--dsn", dsn)
    [(stored,)] = conn.execute("select to_json(g) from pgsched.get_task(%s) as g", [task_id])
    now = document.pop("now")
    assert sorted(document) == sorted(stored)
    for name, value in stored.items():
        if name.endswith("_at") and value is not None:
            assert document[name].endswith("+00:00")
            assert datetime.fromisoformat(document[name]) == datetime.fromisoformat(value)
        else:
            assert document[name] == value
    assert abs(datetime.fromisoformat(now) - datetime.now(UTC)) < timedelta(minutes=1)
    lines = dict(
        line.split(maxsplit=1)
        for line in pgsched("show", str(task_id), "--dsn", dsn).stdout.splitlines()
    )
    assert lines.pop("now") > now
    assert lines == {
        name: json.dumps(value) if name in ("payload", "result") else str(value)
        for name, value in document.items()
        if value is not None
    }


def test_the_token_of_a_claim_is_not_shown(dsn: str, conn: psycopg.Connection) -> None:
    task_id = enqueue(conn, "type")
    [(token,)] = conn.execute("select claim_token from pgsched.claim_task('worker')")
    for options in ([], ["--json"]):
        assert str(token) not in pgsched("show", str(task_id), "--dsn", dsn, *options).output


def test_a_big_payload_is_cut_in_text_and_whole_in_json(dsn: str, conn: psycopg.Connection) -> None:
    payload = {"text": 100_000 * "x"}
    task_id = enqueue(conn, "type", payload)
    text = pgsched("show", str(task_id), "--dsn", dsn).stdout
    assert len(text) < 2_000
    assert "(100012 characters: --json shows them all)" in text
    assert as_json("show", str(task_id), "--dsn", dsn)["payload"] == payload


@pytest.mark.parametrize(
    "payload",
    [
        6_000 * "9",
        "0.1234567890123456789012345678901234567890",
        "1e400",
        5_000 * "[" + 5_000 * "]",
        '"\\u0001\\u0085\\u202e\\ud83d\\udc18 \u00e9"',
    ],
    ids=lambda payload: payload[:20],
)
def test_any_payload_is_shown_as_the_server_has_it(
    dsn: str, conn: psycopg.Connection, payload: str
) -> None:
    [(task_id,)] = conn.execute("select pgsched.enqueue_task('type', %s)", [payload])
    assert pgsched("show", str(task_id), "--dsn", dsn).exit_code == 0
    result = pgsched("show", str(task_id), "--dsn", dsn, "--json")
    assert (result.exit_code, result.stdout.isascii()) == (0, True)
    [(same,)] = conn.execute(
        "select %s::jsonb -> 'payload' = %s::jsonb", [result.stdout, payload]
    ).fetchall()
    assert same


# retry and cancel


def test_tasks_are_retried_one_by_one_and_refusals_said(dsn: str, conn: psycopg.Connection) -> None:
    first, second = failed(conn), failed(conn)
    queued = enqueue(conn, "type")
    result = pgsched("retry", str(first), str(queued), "999", str(second), "--dsn", dsn)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"Task {first} is queued again, and due now.",
        f"Task {second} is queued again, and due now.",
    ]
    assert result.stderr.splitlines() == [
        f"Error: task {queued} is queued (Only a failed or cancelled task can be retried.)",
        "Error: there is no task 999 (The id is wrong, or the finished task has been deleted.)",
    ]
    assert [row(conn, task_id).status for task_id in (first, second)] == ["queued", "queued"]


def test_what_became_of_each_is_in_the_document(dsn: str, conn: psycopg.Connection) -> None:
    dead = failed(conn)
    assert as_json("retry", str(dead), "--dsn", dsn) == [{"id": dead, "outcome": "queued"}]
    result = pgsched("retry", str(dead), "--json", "--dsn", dsn)
    assert result.exit_code == 1
    refusal = f"task {dead} is queued (Only a failed or cancelled task can be retried.)"
    assert json.loads(result.stdout) == [{"id": dead, "outcome": None, "error": refusal}]


def test_tasks_are_cancelled(dsn: str, conn: psycopg.Connection) -> None:
    running = enqueue(conn, "type")
    conn.execute("select pgsched.claim_task('worker')")
    queued, dead = enqueue(conn, "type"), failed(conn)
    result = pgsched("cancel", str(queued), str(running), str(dead), "--dsn", dsn)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        f"Task {queued} is cancelled.",
        f"Task {running} is running: its worker is told to stop. If it completes, it counts.",
        f"Task {dead} had ended already.",
    ]
    assert row(conn, queued).status == "cancelled"


@pytest.mark.parametrize("command", ["retry", "cancel", "show"])
@pytest.mark.parametrize("task_id", ["", "x", "1.5", "\u0661x"])
def test_what_is_no_id_is_wrong_usage(command: str, task_id: str) -> None:
    assert pgsched(command, task_id).exit_code == 2


@pytest.mark.parametrize("command", ["retry", "cancel", "show"])
def test_an_id_that_no_task_can_have_is_refused(command: str, dsn: str) -> None:
    assert "is not in the range" in refused(command, str(10**30), "--dsn", dsn)


# pause and resume


def test_a_queue_is_paused_and_resumed(dsn: str, conn: psycopg.Connection) -> None:
    def paused() -> list[Any]:
        return conn.execute("select name, paused from pgsched.queues").fetchall()

    assert pgsched("pause", "mail", "--dsn", dsn).stdout == "Queue mail is paused.\n"
    assert paused() == [("mail", True)]
    assert pgsched("resume", "mail", "--dsn", dsn).stdout == "Queue mail is not paused.\n"
    assert paused() == [("mail", False)]
    assert as_json("pause", "mail", "--dsn", dsn) == {"queue": "mail", "paused": True}
    assert as_json("resume", "mail", "--dsn", dsn) == {"queue": "mail", "paused": False}
    result = pgsched("pause", 64 * "q", "--dsn", dsn)
    assert (result.exit_code, result.stderr.partition(" is not")[0]) == (1, "Error: p_queue")
    assert "surrogates" in refused("resume", "\udcff", "--dsn", dsn)


def test_of_ids_that_none_can_be_nothing_is_done(dsn: str, conn: psycopg.Connection) -> None:
    task_id = enqueue(conn, "type")
    for command in ("cancel", "retry"):
        said = refused(command, str(task_id), str(2**63), "--dsn", dsn)
        assert said.startswith(f"Invalid value for 'ID...': {2**63} is not in the range")
    assert row(conn, task_id).status == "queued"


def test_output_that_cannot_be_written_is_no_traceback(dsn: str) -> None:
    with Path("/dev/full").open("w") as full:
        result = process("status", "--dsn", dsn, stdout=full)
        _, stderr = result.communicate()
    # Python may say something of its own when it ends.
    assert stderr.splitlines()[0] == "Error: [Errno 28] No space left on device"
    assert result.returncode != 0


# reap and maintain


def test_reaping_takes_back_all_there_is(dsn: str, conn: psycopg.Connection) -> None:
    assert pgsched("reap", "--dsn", dsn).stdout == "No task is held by a worker that is lost.\n"
    tasks = [enqueue(conn, "type", max_attempts=1 + number % 2) for number in range(2)]
    conn.execute("select pgsched.claim_task('worker', p_limit => 2)")
    conn.execute("update pgsched.scheduled_tasks set lease_expires_at = clock_timestamp()")
    assert pgsched("reap", "--dsn", dsn).stdout.splitlines() == [
        f"Task {tasks[0]} is failed.",
        f"Task {tasks[1]} is queued.",
    ]
    assert as_json("reap", "--dsn", dsn) == []


def test_more_is_reaped_than_one_call_takes(dsn: str, conn: psycopg.Connection) -> None:
    conn.execute(
        """
        insert into pgsched.scheduled_tasks (
               queue, task_type, payload, priority, run_at, max_attempts, created_at, status,
               claim_token, lease_expires_at)
        select 'default', 'type', '{}', 5, now(), 9, now(), 'processing', gen_random_uuid(), now()
          from generate_series(1, 1500)
        """
    )
    assert len(as_json("reap", "--dsn", dsn)) == 1500


def test_maintaining_says_what_each_step_did(dsn: str, connect: Connect) -> None:
    conn, holder = connect(), connect()
    old = failed(conn)
    conn.execute("update pgsched.finished_tasks set finished_at = finished_at - interval '1 year'")
    with holder.transaction():
        holder.execute("select pg_advisory_xact_lock(1338, 2)")
        done = pgsched("maintain", "--dsn", dsn).stdout
    assert done.splitlines() == [
        "move_claim_marks: 0",
        "prune_finished: 1",
        "reap_stale: not now",
    ]
    assert as_json("maintain", "--dsn", dsn) == {
        "move_claim_marks": 0,
        "prune_finished": 0,
        "reap_stale": 0,
    }
    with pytest.raises(ValueError, match="unpack"):
        row(conn, old)


def test_why_a_step_could_not_run_is_a_warning(dsn: str, connect: Connect) -> None:
    conn, holder = connect(), connect()
    conn.execute(f"alter database {conn.info.dbname} set lock_timeout to '1s'".encode())
    with holder.transaction():
        holder.execute("lock table pgsched.finished_tasks")
        result = pgsched("maintain", "--dsn", dsn)
    assert result.stdout.splitlines() == [
        "move_claim_marks: 0",
        "prune_finished: not now",
        "reap_stale: 0",
    ]
    assert result.stderr.startswith("Warning: prune_finished could not run now: ")
    assert result.exit_code == 0


# status, top, enqueue and migrate, as JSON


def test_the_queues_as_json(dsn: str, conn: psycopg.Connection) -> None:
    assert as_json("status", "--dsn", dsn) == {"schema": NEWEST, "queues": []}
    enqueue(conn, "type", queue="mail")
    conn.execute("select pgsched.pause_queue('idle')")
    document = as_json("status", "--dsn", dsn)
    age = document["queues"][1].pop("oldest_due_age")
    assert 0 < age < 60
    nothing = {"queued": 0, "due": 0, "processing": 0, "failed": 0}
    assert document["queues"] == [
        {"queue": "idle", "paused": True, "oldest_due_age": 0.0, **nothing},
        {"queue": "mail", "paused": False, **nothing, "queued": 1, "due": 1},
    ]


def test_no_queues_are_said_to_be_none(dsn: str) -> None:
    assert pgsched("status", "--dsn", dsn).stdout == (
        f"schema {NEWEST}, 0 queues: none has tasks that are live or failed for good,"
        " or settings of its own\n"
    )


def test_one_look_at_the_top_as_text_and_as_json(dsn: str, conn: psycopg.Connection) -> None:
    failed(conn)
    done = enqueue(conn, "type", queue="busy")
    conn.execute(
        """
        select pgsched.complete_task(id, claim_token) from pgsched.claim_task('worker', 'busy');
        select pgsched.register_worker('worker', array['busy', 'dead'], 5);
        """
    )
    enqueue(conn, "type", queue="mail")
    assert row(conn, done).status == "completed"
    text = pgsched("top", "--dsn", dsn).stdout
    assert re.sub(r"\d\.\d s\b", "x.x s", text).splitlines() == [
        "workers: 1, slots: 5, running: 0, oldest snapshot: -",
        "",
        "queue  queued  due  oldest due  running  failed  done/s  fail/s",
        "mail        1    1       x.x s        0       0     0.0     0.0",
        "busy        0    0           -        0       0     0.1     0.0",
        "dead        0    0           -        0       1     0.0     0.1",
        "",
        "worker              running  slots  last seen",
        "worker  busy, dead        0      5      x.x s",
    ]
    document = as_json("top", "--dsn", dsn)
    assert document["schema"] == NEWEST
    assert document["server"] == {
        "workers": 1,
        "slots": 5,
        "oldest_snapshot_age": 0.0,
        "in_recovery": False,
    }
    assert [(queue["queue"], queue["ended"]) for queue in document["queues"]] == [
        ("mail", {"completed": 0, "failed": 0, "cancelled": 0}),
        ("busy", {"completed": 1, "failed": 0, "cancelled": 0}),
        ("dead", {"completed": 0, "failed": 1, "cancelled": 0}),
    ]
    keys = {frozenset(queue) for queue in document["queues"]}
    assert len(keys) == 1
    [worker] = document["workers"]
    assert (worker["name"], worker["queues"]) == ("worker", ["busy", "dead"])
    assert worker["seen_at"].endswith("+00:00")
    assert 0 < worker["seen_age"] < 60


def test_enqueuing_and_migrating_as_json(dsn: str, connect: Connect) -> None:
    document = as_json("enqueue", "type", "--dsn", dsn)
    assert [*document] == ["id"]
    assert row(connect(), document["id"]).status == "queued"
    assert as_json("migrate", "--dsn", dsn) == {"applied": []}
