"""Dumps of a busy database: what comes back, that it works on, and how a copy is kept quiet.

QUIET and FORGET are what docs/operations.md says.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import busy
import psycopg
import pytest
from busy import content
from installing import IDS, marks
from psycopg import sql
from workers import PATIENCE, quick, row, running, shorten_grace, wait_for, wait_until

from pgsched import Task, calls
from pgsched.embedded import Server
from pgsched.migrate import migrate

OWNER, HEIR, APP = "backup_owner", "backup_heir", "backup_app"
"""Plain roles: of the original, of some copies, and one that enqueues."""

QUIET = "select queue, pgsched.pause_queue(queue) from pgsched.queue_stats() where not paused"
FORGET = "select pgsched.cancel_task(id) from pgsched.scheduled_tasks"

# Sequences show what is committed and what is not.
ISSUED = """
    select t.last_value, w.last_value
      from pgsched.scheduled_tasks_id_seq as t, pgsched.workers_id_seq as w
    """


class Backup(NamedTuple):
    """A database, the folder with its dumps, and what it held in their common snapshot.

    `issued`: the last ids of tasks and workers. `held`: a task that a worker with a presence was
    running then, and still runs.
    """

    dsn: str
    folder: Path
    content: dict[str, list[str]]
    issued: tuple[int, int]
    held: int


class Form(NamedTuple):
    """What is restored, by whom and how."""

    dump: str
    role: str
    options: tuple[str, ...] = ()


FORMS = [
    pytest.param(Form("database.dump", OWNER), id="database"),
    pytest.param(
        Form("schema.dump", HEIR, ("--no-owner", "--no-privileges")), id="schema without rights"
    ),
    pytest.param(
        Form("schema.dump", HEIR, ("--no-owner",)),
        id="schema of another owner",
        marks=pytest.mark.long,
    ),
    pytest.param(Form("schema.sql", HEIR), id="schema as SQL", marks=pytest.mark.long),
]


def pg_dump(server: Server, database: str, *options: str | Path) -> str:
    """What pg_dump prints, without its random words; nothing else is said."""
    done = server.run("pg_dump", *options, database, check=True, capture_output=True)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    return "\n".join(line for line in lines if not line.startswith(("\\restrict", "\\unrestrict")))


@pytest.fixture(scope="module")
def backup(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backup]:
    """Dumps taken while sessions and a worker are at work; the worker stays."""
    folder = tmp_path_factory.mktemp("backup")
    server.create_database("original")
    with psycopg.connect(server.dsn("original"), autocommit=True) as admin:
        for role in (OWNER, HEIR, APP):
            admin.execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
        admin.execute(f"grant create on database original to {OWNER}")
    dsn = server.dsn("original", user=OWNER)
    migrate(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn, hanging(dsn, conn) as held:
        conn.execute(f"grant usage on schema pgsched to {APP}")
        conn.execute(f"grant execute on function pgsched.enqueue_task to {APP}")
        conn.execute("create schema app create table invoices (task_id bigint)")
        busy.fill(conn)
        with psycopg.connect(dsn) as reader, busy.at_work(dsn):
            # Before the snapshot and after it.
            wait_for_toil(conn)
            reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            [(snapshot,)] = reader.execute("select pg_export_snapshot()")
            seen, issued = content(reader), reader.execute(ISSUED).fetchone()
            assert issued
            wait_for_toil(conn)
            for name, *options in (
                ("database.dump", "--format=custom"),
                ("schema.dump", "--format=custom", "--schema=pgsched"),
                ("schema.sql", "--schema=pgsched", "--no-owner"),
            ):
                options += [f"--username={OWNER}", f"--snapshot={snapshot}"]
                pg_dump(server, "original", f"--file={folder / name}", *options)
            assert content(reader) == seen
        yield Backup(dsn, folder, seen, issued, held)


def wait_for_toil(conn: psycopg.Connection) -> None:
    """Return when tasks and workers have come and gone that were not there before."""
    [(task, worker)] = conn.execute(ISSUED)
    gone = """
        select from generate_series(%(task)s + 1, %(task)s + 100) as g (id)
         where not exists (select from pgsched.tasks as t where t.id = g.id)
           and exists (select from pgsched.finished_tasks as f where f.id > g.id)
           and (select last_value from pgsched.workers_id_seq) > %(worker)s
        """
    wait_until(lambda: conn.execute(gone, {"task": task, "worker": worker}).fetchall())


@contextmanager
def hanging(dsn: str, conn: psycopg.Connection) -> Iterator[int]:
    """A worker that listens and has a presence; it runs the task that is yielded, for an hour."""
    worker = quick(dsn, queues=["hanging"], lease=3600)
    gate = Event()

    @worker.task("test")
    def wait(task: Task) -> None:
        gate.wait()

    with running(worker):
        try:
            wait_until(
                lambda: conn.execute(
                    "select from pgsched.workers as w join pgsched.listeners as l"
                    " on l.worker_id = w.id where w.presence"
                ).fetchall()
            )
            [(task_id,)] = conn.execute("select pgsched.enqueue_task('test', p_queue => 'hanging')")
            wait_for(conn, task_id, "processing")
            yield task_id
        finally:
            gate.set()


def restore(server: Server, backup: Backup, form: Form, name: str, and_then: str = "") -> str:
    """The DSN of a new database, restored by a role that may create schemas there.

    `and_then`: SQL that takes effect with a dump that is SQL.
    """
    server.create_database(name)
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(f"grant create on database {name} to {form.role}")
    where = [f"--username={form.role}", f"--dbname={name}"]
    path = backup.folder / form.dump
    if path.suffix == ".sql":
        options = [
            "-X",
            "--quiet",
            "--single-transaction",
            "--set=ON_ERROR_STOP=1",
            "--output=/dev/null",
        ]
        script = f"{path.read_text(encoding='utf-8')}\n{and_then};"
        done = server.run("psql", *options, *where, input=script, check=True, capture_output=True)
    else:
        done = server.run(
            "pg_restore", *where, *form.options, path, check=True, capture_output=True
        )
    assert done.stderr == ""
    return server.dsn(name, user=form.role)


def drop(server: Server, name: str) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    assert isinstance(request.param, Form)
    return request.param


@pytest.fixture(scope="module")
def untouched(server: Server, backup: Backup, form: Form) -> Iterator[str]:
    """The name of a database that nothing has touched since it was restored."""
    restore(server, backup, form, "untouched")
    yield "untouched"
    drop(server, "untouched")


@pytest.fixture
def copy(server: Server, form: Form, untouched: str) -> Iterator[psycopg.Connection]:
    """A connection to a restored database of this test's own, as the role that restored it."""
    server.create_database("copy", template=untouched)
    with psycopg.connect(server.dsn("copy", user=form.role), autocommit=True) as conn:
        yield conn
    drop(server, "copy")


def ids(conn: psycopg.Connection, query: str) -> set[int]:
    return {task_id for (task_id,) in conn.execute(query.encode())}


def reap(conn: psycopg.Connection) -> dict[int, str]:
    """What becomes of each task that is reaped."""
    return dict(conn.execute("select id, status from pgsched.reap_stale()").fetchall())


def end_leases(conn: psycopg.Connection) -> None:
    conn.execute(
        "update pgsched.scheduled_tasks set lease_expires_at = clock_timestamp()"
        " where status = 'processing'"
    )


def test_a_copy_holds_what_the_snapshot_of_the_dump_saw(
    backup: Backup, copy: psycopg.Connection
) -> None:
    assert content(copy) == backup.content
    states = copy.execute("select distinct status from pgsched.tasks")
    assert {status for (status,) in states} == {
        "queued", "processing", "completed", "failed", "cancelled",
    }  # fmt: skip
    both = "select id from pgsched.scheduled_tasks join pgsched.finished_tasks using (id)"
    assert ids(copy, both) == set()


def test_no_id_is_given_again(backup: Backup, copy: psycopg.Connection) -> None:
    last_task, last_worker = backup.issued
    assert max(ids(copy, "select id from pgsched.tasks")) <= last_task
    [(task,)] = copy.execute("select pgsched.enqueue_task('test')")
    assert task > last_task
    assert calls.register_worker(copy, "new", ["default"], 1, False) > last_worker


def test_every_due_task_is_claimed_at_once(copy: psycopg.Connection) -> None:
    queued = "select id from pgsched.tasks where status = 'queued' and queue <> 'paused'"
    due, all_queued = ids(copy, f"{queued} and run_at <= clock_timestamp()"), ids(copy, queued)
    claimed: set[int] = set()
    for queue in ("busy", "kept", "paused", "hanging", "only running", "only later"):
        claim = f"select id from pgsched.claim_task('w', '{queue}', p_limit => 100)"
        while some := ids(copy, claim):
            claimed |= some
    assert set() < due <= claimed < all_queued


def test_what_was_running_is_reaped_when_its_lease_ends_or_its_worker_is_missed(
    backup: Backup, copy: psycopg.Connection
) -> None:
    """The worker lives, but its presence is in the original only."""
    shorten_grace(copy, 0.1)
    running = "select id from pgsched.tasks where status = 'processing'"
    overdue = f"{running} and lease_expires_at <= clock_timestamp()"
    wait_until(lambda: ids(copy, f"{running} and queue = 'busy'") == ids(copy, overdue))
    stale, left = ids(copy, overdue), ids(copy, f"{running} and queue <> 'busy'")
    first_look = reap(copy)
    assert first_look.keys() == stale != set()

    wait_until(lambda: reap(copy) == {backup.held: "queued"})
    with psycopg.connect(backup.dsn) as original:
        assert row(original, backup.held).status == "processing"

    cancelled = ids(copy, f"{running} and cancel_requested_at is not null")
    assert ids(copy, running) == left - {backup.held}
    end_leases(copy)
    assert reap(copy) == {
        task_id: "cancelled" if task_id in cancelled else "queued"
        for task_id in left - {backup.held}
    }
    assert cancelled


def test_the_installer_has_nothing_to_do(
    server: Server, backup: Backup, form: Form, copy: psycopg.Connection
) -> None:
    assert migrate(server.dsn("copy", user=form.role)) == []
    assert content(copy) == backup.content


def test_a_copy_without_data_is_a_new_installation(server: Server, dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        dumped = pg_dump(server, conn.info.dbname, "--schema-only")
    with psycopg.connect(server.create_database("empty_copy"), autocommit=True) as conn:
        conn.execute(dumped.encode())
        conn.execute("reset all")
        assert migrate(server.dsn("empty_copy")) == []
        assert migrate(server.dsn("empty_copy"), to=IDS[-1]) == []
        assert marks(conn) == IDS


def test_functions_and_rights_are_those_of_the_original(
    server: Server, backup: Backup, form: Form, copy: psycopg.Connection
) -> None:
    options = ["--schema-only", "--schema=pgsched", "--no-owner"]
    lost = "--no-privileges" in form.options
    if lost:
        options.append("--no-privileges")
    assert pg_dump(server, "copy", *options) == pg_dump(server, "original", *options)
    owners = copy.execute(
        "select distinct proowner::regrole::text from pg_proc"
        " where pronamespace = 'pgsched'::regnamespace"
    )
    assert owners.fetchall() == [(form.role,)]

    def public() -> list[tuple[str, Any]]:
        rows = copy.execute(
            "select level, advice from pgsched.diagnose() where check_name = 'public'"
        )
        return rows.fetchall()

    assert [level for level, _ in public()] == (["warning", "note"] if lost else ["note"])
    if lost:  # as default privileges of the role may have done
        copy.execute("grant select on pgsched.tasks, pgsched.workers_id_seq to public")
        assert [level for level, _ in public()] == ["warning", "warning", "warning", "note"]
    for _, advice in public():
        copy.execute(advice.encode())
    assert public() == [("ok", None)]
    allowed = copy.execute(
        "select proname from pg_proc where pronamespace = 'pgsched'::regnamespace"
        " and has_function_privilege('public', oid, 'execute')"
    )
    assert allowed.fetchall() == []


# A copy that works on


def test_a_quiet_copy_runs_nothing_that_was_there(
    server: Server, backup: Backup, reaping_often: None
) -> None:
    """But what is added to a queue that was not; what was not paused before can be resumed."""
    dsn = restore(server, backup, Form("schema.sql", HEIR), "quiet", and_then=QUIET)
    executed: list[str] = []
    queues = ["busy", "kept", "paused", "hanging", "only running", "only later", "new"]
    worker = quick(dsn, queues=queues)

    @worker.task("test")
    def note(task: Task) -> None:
        executed.append(task.queue)

    with psycopg.connect(dsn, autocommit=True) as conn:
        end_leases(conn)
        conn.execute("update pgsched.scheduled_tasks set run_at = clock_timestamp()")
        with running(worker):
            wait_until(
                lambda: (
                    ids(conn, "select id from pgsched.tasks where status = 'processing'") == set()
                )
            )
            for _ in range(5):
                [(task_id,)] = conn.execute("select pgsched.enqueue_task('test', p_queue => 'new')")
                wait_for(conn, task_id, "completed")
            assert executed == ["new"] * 5
            conn.execute(
                "select pgsched.resume_queue(queue)"
                " from pgsched.queue_stats() where queue <> 'paused'"
            )
            wait_until(lambda: set(executed) == {*queues} - {"paused"})
    drop(server, "quiet")


def test_a_copy_that_forgot_its_tasks_runs_new_ones_only(
    server: Server, backup: Backup, reaping_often: None
) -> None:
    dsn = restore(server, backup, Form("schema.sql", HEIR), "forgetful", and_then=FORGET)
    executed: list[int] = []
    worker = quick(dsn, queues=["busy", "kept", "hanging", "only running", "only later"])

    @worker.task("test")
    def note(task: Task) -> None:
        executed.append(task.id)

    with psycopg.connect(dsn, autocommit=True) as conn:
        end_leases(conn)
        with running(worker):
            wait_until(lambda: ids(conn, "select id from pgsched.scheduled_tasks") == set())
            [(task_id,)] = conn.execute("select pgsched.enqueue_task('test', p_queue => 'kept')")
            wait_for(conn, task_id, "completed")
            assert executed == [task_id]
    drop(server, "forgetful")


def test_a_copy_and_its_original_on_one_server_have_nothing_to_do_with_each_other(
    server: Server, backup: Backup
) -> None:
    """Neither locks nor notifications of one are seen in the other."""
    dsn = restore(server, backup, Form("schema.dump", HEIR, ("--no-owner",)), "beside")
    with ExitStack() as stack:
        original, holder, copy = (
            stack.enter_context(psycopg.connect(where, autocommit=True))
            for where in (backup.dsn, backup.dsn, dsn)
        )
        claim = {"id": backup.held}
        [(claim["token"],)] = original.execute(
            "select claim_token from pgsched.tasks where id = %(id)s", claim
        )
        hold = "select pgsched.hold_task(%(id)s, %(token)s)"
        holder.execute("begin")
        holder.execute(hold, claim)
        for conn in (original, copy):
            conn.execute("set lock_timeout = '100 ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            original.execute(hold, claim)
        copy.execute(hold, claim)

        for conn in (original, copy):
            worker = calls.register_worker(conn, "listener", ["heard"], 1, False)
            calls.register_listener(conn, worker, ["heard"])
            [(channel,)] = conn.execute("select pgsched.notify_channel('heard')")
            conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        for sender in (original, copy, original, copy):
            sender.execute("select pgsched.enqueue_task('test', p_queue => 'heard')")
        for conn in (original, copy):
            heard = conn.notifies(timeout=PATIENCE, stop_after=2)
            assert [note.pid for note in heard] == [conn.info.backend_pid] * 2
    drop(server, "beside")
