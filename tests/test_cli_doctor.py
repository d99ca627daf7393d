"""What diagnose() and pgsched doctor find that takes other sessions, or another server."""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from command_line import pgsched
from oracle import Connect
from pgbouncer import POOL_SIZE, PgBouncer
from test_read_only import standby_of
from workers import install, quick, running, wait_until

from pgsched import doctor, enqueue
from pgsched.embedded import Server
from pgsched.migrate import migrate

Finding = tuple[str, str]


def found(conn: psycopg.Connection, check: str) -> list[Finding]:
    """Level and finding of a check that found something."""
    return conn.execute(
        "select level, finding from pgsched.diagnose() where check_name = %s and level <> 'ok'",
        [check],
    ).fetchall()


def advice(conn: psycopg.Connection, check: str) -> str:
    [(text,)] = conn.execute(
        "select advice from pgsched.diagnose() where check_name = %s", [check]
    ).fetchall()
    assert isinstance(text, str)
    return text


# Objects


def indexes(conn: psycopg.Connection) -> list[str]:
    rows = conn.execute(
        "select indexname from pg_indexes where schemaname = 'pgsched' order by indexname"
    )
    return [name for (name,) in rows]


def test_every_index_is_missed(conn: psycopg.Connection) -> None:
    assert found(conn, "objects") == []
    for name in indexes(conn):
        with conn.transaction(force_rollback=True):
            conn.execute(f"alter index pgsched.{name} rename to gone".encode())
            assert found(conn, "objects") == [("error", f"Index {name} is missing.")]


def test_an_invalid_index_is_found_and_the_advice_cures_it(conn: psycopg.Connection) -> None:
    enqueue(conn, "type")
    enqueue(conn, "type")
    with pytest.raises(psycopg.errors.UniqueViolation):
        conn.execute(
            "create unique index concurrently scheduled_tasks_odd"
            " on pgsched.scheduled_tasks (task_type)"
        )
    assert found(conn, "objects") == [("error", "Index scheduled_tasks_odd is not valid.")]
    conn.execute("update pgsched.scheduled_tasks set task_type = id::text")
    cure = advice(conn, "objects").removeprefix("Build it again: ")
    assert cure.startswith("reindex index concurrently ")
    conn.execute(cure.encode())
    assert found(conn, "objects") == []


@pytest.mark.parametrize("name", ["scheduled_tasks_claim_idx_ccnew", "tasks_ccold12"])
def test_what_a_broken_reindex_left_is_found_and_the_advice_removes_it(
    conn: psycopg.Connection, name: str
) -> None:
    conn.execute(f"create index {name} on pgsched.scheduled_tasks (task_type)".encode())
    conn.execute(
        "update pg_index set indisvalid = false where indexrelid = %s::regclass",
        [f"pgsched.{name}"],
    )
    assert found(conn, "objects") == [("error", f"Index {name} is not valid.")]
    conn.execute(advice(conn, "objects").removeprefix("A reindex was broken off: ").encode())
    assert found(conn, "objects") == []


def test_what_belongs_to_another_role_is_found_and_the_advice_cures_it(
    conn: psycopg.Connection,
) -> None:
    conn.execute("drop role if exists doctor_other; create role doctor_other")
    things = ["routine pgsched.pause_queue(text)", "table pgsched.queues", "table pgsched.tasks"]
    for number, thing in enumerate(things, 1):
        conn.execute(f"alter {thing} owner to doctor_other".encode())
        objects = "1 object is" if number == 1 else f"{number} objects are"
        text = f"{objects} of doctor_other, not of postgres, who owns the schema: "
        assert found(conn, "objects") == [("error", f"{text}{', '.join(things[:number])}.")]
    for _ in things:
        conn.execute(advice(conn, "objects").partition(";")[0].encode())
    assert found(conn, "objects") == []
    conn.execute("drop role doctor_other")


def test_an_unlogged_table_is_found_and_the_advice_cures_it(conn: psycopg.Connection) -> None:
    conn.execute("alter table pgsched.queues set unlogged")
    text = "Table queues is unlogged: a crash of the server empties it."
    assert found(conn, "objects") == [("error", text)]
    conn.execute(advice(conn, "objects").encode())
    assert found(conn, "objects") == []


# Vacuum


def test_autovacuum_that_is_off_for_a_table_is_found(conn: psycopg.Connection) -> None:
    conn.execute("alter table pgsched.finished_tasks set (autovacuum_enabled = off)")
    text = "Autovacuum is switched off for table finished_tasks."
    assert found(conn, "vacuum") == [("error", text)]
    conn.execute(advice(conn, "vacuum").encode())
    assert found(conn, "vacuum") == []


def test_dead_rows_are_found(conn: psycopg.Connection) -> None:
    conn.execute("alter table pgsched.scheduled_tasks set (autovacuum_enabled = off)")
    conn.execute(
        """
        insert into pgsched.scheduled_tasks (
               queue, task_type, payload, priority, run_at, max_attempts, created_at)
        select 'default', 'type', '{}', 5, now(), 1, now() from generate_series(1, 50001)
        """
    )
    conn.execute("delete from pgsched.scheduled_tasks")
    wait_until(lambda: len(found(conn, "vacuum")) == 2)
    [_, (level, text)] = found(conn, "vacuum")
    assert level == "warning"
    assert text == (
        "scheduled_tasks has 50001 dead rows, which take room and time; "
        "autovacuum has not come yet."
    )
    conn.execute("vacuum pgsched.scheduled_tasks")
    wait_until(lambda: len(found(conn, "vacuum")) == 1)


# Snapshots


def hurry(conn: psycopg.Connection, transactions: int = 100_000) -> None:
    """Half a second becomes a minute, one and a half are ten; and so with transactions."""
    [(definition,)] = conn.execute("select pg_get_functiondef('pgsched._find_snapshots'::regproc)")
    for words, instead in (
        ("interval '1 minute'", "interval '0.5 seconds'"),
        ("interval '10 minutes'", "interval '1.5 seconds'"),
        ("transactions > 100000\n", f"transactions > {transactions}\n"),
    ):
        assert definition.count(words) == 1
        definition = definition.replace(words, instead)
    conn.execute(definition)


def oldest(conn: psycopg.Connection) -> timedelta:
    [(age,)] = conn.execute("select oldest_snapshot_age from pgsched.server_stats()")
    assert isinstance(age, timedelta)
    return age


def test_an_old_snapshot_is_found_with_who_holds_it(connect: Connect) -> None:
    conn, holder = connect(), connect(application_name="a report")
    hurry(conn)
    with holder.transaction():
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select from pgsched.queues")
        wait_until(lambda: [level for level, _ in found(conn, "snapshots")] == ["note"])
        wait_until(lambda: [level for level, _ in found(conn, "snapshots")] == ["warning"])
        [(_, text)] = found(conn, "snapshots")
        pid = holder.info.backend_pid
        assert text.startswith(f"Session {pid} (role 'postgres', application 'a report') has kept ")
        assert oldest(conn) > timedelta(seconds=1.5)
        assert f"pg_terminate_backend({pid})" in advice(conn, "snapshots")
    assert found(conn, "snapshots") == []
    assert oldest(conn) == timedelta()


def test_a_session_that_holds_nothing_is_not_found(connect: Connect) -> None:
    conn, idle, other = connect(), connect(), connect(dbname="postgres")
    hurry(conn)
    with idle.transaction(), other.transaction():
        idle.execute("select from pgsched.queues")
        other.execute("set transaction isolation level repeatable read")
        other.execute("select 1")
        conn.execute("select pg_sleep(0.6)")
        assert found(conn, "snapshots") == []
        assert oldest(conn) == timedelta()


def test_a_transaction_with_an_id_is_found(connect: Connect) -> None:
    conn, writer = connect(), connect()
    hurry(conn)
    with writer.transaction():
        enqueue(writer, "type")
        wait_until(lambda: found(conn, "snapshots"))
        assert oldest(conn) > timedelta(seconds=0.5)


def test_a_prepared_transaction_is_found() -> None:
    with Server(settings={"max_prepared_transactions": "5", "fsync": "off"}) as server:
        dsn = server.create_database("app")
        install(server, dsn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            hurry(conn)
            conn.execute("begin; select pgsched.enqueue_task('type'); prepare transaction 'it''s'")
            wait_until(lambda: found(conn, "snapshots"))
            [(_, text)] = found(conn, "snapshots")
            assert text.startswith("Prepared transaction 'it''s' (role 'postgres') has kept vacuum")
            assert oldest(conn) > timedelta(seconds=0.5)
            conn.execute(advice(conn, "snapshots").partition(": ")[2].encode())
            assert found(conn, "snapshots") == []


def test_a_standby_that_holds_back_vacuum_is_found_with_and_without_a_slot(
    server: Server, conn: psycopg.Connection
) -> None:
    hurry(conn, transactions=-1)
    conn.execute("select pg_create_physical_replication_slot('old')")

    def holders() -> str:
        return "\n".join(text for _, text in found(conn, "snapshots"))

    with standby_of(server, conn) as standby:
        with psycopg.connect(standby.dsn(), autocommit=True) as other:
            other.execute("alter system set hot_standby_feedback = on")
            other.execute("select pg_reload_conf()")
            wait_until(lambda: "(role 'postgres', application 'walreceiver')" in holders())
            assert "Walsender " in holders()
            other.execute("alter system set primary_slot_name = 'old'")
            other.execute("select pg_reload_conf()")
        wait_until(lambda: "Replication slot 'old' (in use) has kept vacuum" in holders())
    wait_until(lambda: "Replication slot 'old' (not in use) has kept vacuum" in holders())
    conn.execute("select pg_drop_replication_slot('old')")
    assert "Replication slot" not in holders()


def test_what_the_owner_may_not_see_is_said(server: Server, connect: Connect) -> None:
    """Of sessions of other roles, a plain owner sees no times; what it does see is found, too."""
    admin = connect()
    name = admin.info.dbname
    admin.execute(
        'drop schema pgsched cascade; drop role if exists "an owner"; create role "an owner" login'
    )
    admin.execute(f'grant create on database {name} to "an owner"'.encode())
    migrate(server.dsn(name, "an owner"))
    unseen = (
        "note",
        "How long transactions of other roles have been open cannot be seen: an old one is found"
        " when 100000 have begun since.",
    )
    try:
        assert found(admin, "snapshots") == [unseen]
        cure = advice(admin, "snapshots")
        assert cure == 'grant pg_read_all_stats to "an owner"'
        hurry(admin, transactions=-1)
        holder = connect()
        with holder.transaction():
            enqueue(holder, "type")
            [first, (_, text)] = found(admin, "snapshots")
            assert first == unseen
            assert "for a time that cannot be seen and" in text
            assert oldest(admin) == timedelta()
            admin.execute(cure.encode())
            wait_until(lambda: oldest(admin) > timedelta(seconds=0.5))
            [(_, text)] = found(admin, "snapshots")
            assert "seconds and" in text
        assert found(admin, "snapshots") == []
    finally:
        admin.execute('drop owned by "an owner" cascade; drop role "an owner"')


# Settings and limits of another server


HARMFUL = {
    "autovacuum": ("off", "error"),
    "fsync": ("off", "error"),
    "full_page_writes": ("off", "error"),
    "idle_in_transaction_session_timeout": ("0", "note"),
    "jit_above_cost": ("10", "note"),
    "synchronous_commit": ("off", "warning"),
    "track_counts": ("off", "error"),
}


def test_harmful_settings_and_narrow_limits_are_found() -> None:
    settings = {name: value for name, (value, _) in HARMFUL.items()}
    limits = {"max_connections": "10", "max_locks_per_transaction": "10"}
    reserved = {"superuser_reserved_connections": "3"}
    with Server(settings={**settings, **limits, **reserved, "jit": "on"}) as server:
        dsn = server.create_database("app")
        install(server, dsn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            assert {text.split()[0]: level for level, text in found(conn, "settings")} == {
                name: level for name, (_, level) in HARMFUL.items()
            }
            assert found(conn, "limits") == []
            conn.execute(
                "select pgsched.register_worker('w' || n, '{q}', 1) from generate_series(1, 2) as n"
            )
            text = (
                "2 workers may want 200 locks at once, 100 each, and the server has room for 100:"
                " claims fail with out of shared memory."
            )
            assert found(conn, "limits") == [("warning", text)]
            assert (
                advice(conn, "limits") == "Set max_locks_per_transaction to 20 or more and restart."
            )
            conn.execute("delete from pgsched.workers")
            others = [psycopg.connect(dsn) for _ in range(6)]
            text = "7 of 7 connections are in use: soon nobody else can connect."
            assert found(conn, "limits") == [("warning", text)]
            for each in others:
                each.close()


def test_a_standby_and_what_is_wrong_there(server: Server, conn: psycopg.Connection) -> None:
    enqueue(conn, "type")
    conn.execute("update pgsched.scheduled_tasks set run_at = run_at - interval '1 hour'")
    with standby_of(server, conn) as standby:
        result = pgsched("doctor", "--dsn", standby.dsn(conn.info.dbname))
    assert "warning  standby       This server is a standby: it can only be read." in result.stdout
    assert "Queue 'default' has 1 task due, the oldest for 60 minutes" in result.stdout


# The report


def report(*arguments: str) -> dict[str, list[dict[str, Any]]]:
    """The findings of doctor by check."""
    result = pgsched("doctor", "--json", *arguments)
    checks: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(result.stdout):
        assert [*row] == ["check_name", "level", "finding", "advice"]
        checks.setdefault(row["check_name"], []).append(row)
    worst = any(row["level"] in ("warning", "error") for rows in checks.values() for row in rows)
    assert result.exit_code == (1 if worst else 0)
    return checks


def test_the_report_is_that_of_diagnose_and_of_the_client(
    dsn: str, conn: psycopg.Connection
) -> None:
    checks = report("--dsn", dsn)
    assert [*checks][:3] == ["client", "database", "schema"]
    rows = conn.execute("select check_name, level, finding, advice from pgsched.diagnose()")
    of_server = [tuple(row.values()) for name in [*checks][3:] for row in checks[name]]
    assert of_server == rows.fetchall()


def test_a_worker_and_its_queue_are_found_well(dsn: str, conn: psycopg.Connection) -> None:
    worker = quick(dsn, queues=["mail"])
    with running(worker):
        wait_until(lambda: conn.execute("select from pgsched.workers where presence").fetchall())
        checks = report("--dsn", dsn)
    assert [row["level"] for name in ("workers", "queues") for row in checks[name]] == ["ok", "ok"]


def test_workers_without_a_presence_are_found(conn: psycopg.Connection) -> None:
    for name, text in (
        ("1", "1 worker has no presence: if it dies, its tasks wait for their leases."),
        ("2", "2 workers have no presence: if they die, their tasks wait for their leases."),
    ):
        conn.execute("select pgsched.register_worker(%s, '{mail}', 1)", [name])
        assert found(conn, "workers") == [("note", text)]


def test_the_advice_names_the_queues_that_are_served(conn: psycopg.Connection) -> None:
    enqueue(conn, "type", queue="mial")
    conn.execute("update pgsched.scheduled_tasks set run_at = run_at - interval '1 hour'")
    text = advice(conn, "queues")
    assert "correct the queue's name where tasks are added. If" in text
    conn.execute("select pgsched.register_worker('w', '{reports,mail}', 1)")
    assert "are added; workers serve: 'mail', 'reports'. If" in advice(conn, "queues")


@pytest.mark.parametrize(
    ("oldest", "newest", "level"), [(14, 18, "ok"), (99, 99, "error"), (1, 2, "note")]
)
def test_an_untested_server_is_told(
    dsn: str, monkeypatch: pytest.MonkeyPatch, oldest: int, newest: int, level: str
) -> None:
    monkeypatch.setattr(doctor, "OLDEST", oldest)
    monkeypatch.setattr(doctor, "NEWEST", newest)
    [row] = report("--dsn", dsn)["database"]
    assert row["level"] == level
    assert (row["advice"] is None) == (level == "ok")


def test_a_pooler_is_told(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgsched.calls.is_pooled", lambda connection: True)
    [row] = report("--dsn", dsn)["pooler"]
    assert row["level"] == "note"


@pytest.mark.pgbouncer
def test_commands_work_through_a_pooler_and_leave_its_sessions_clean(
    server: Server, dsn: str, conn: psycopg.Connection
) -> None:
    task_id = str(enqueue(conn, "type"))
    conn.execute("select pgsched.register_worker('worker', '{default}', 1)")
    conn.execute(f"alter database {conn.info.dbname} set timezone to 'Asia/Tokyo'".encode())
    with PgBouncer(server) as pooler:
        url = pooler.dsn(conn.info.dbname)
        for command in (["status"], ["top", "--json"], ["show", task_id], ["cancel", task_id]):
            assert pgsched(*command, "--dsn", url).exit_code == 0
        for command in (
            ["retry", task_id],
            ["pause", "q"],
            ["resume", "q"],
            ["maintain"],
            ["reap"],
        ):
            assert pgsched(*command, "--dsn", url).exit_code == 0
        assert [row["level"] for row in report("--dsn", url)["pooler"]] == ["note"]
        for _ in range(2 * POOL_SIZE):
            with psycopg.connect(url, autocommit=True, prepare_threshold=None) as session:
                assert session.execute("show timezone").fetchall() == [("Asia/Tokyo",)]


@pytest.fixture
def stranger(server: Server, conn: psycopg.Connection) -> Iterator[str]:
    """The URL of this database for a role with a name that has to be quoted."""
    conn.execute('create role "A ""b""" login')
    yield server.dsn(conn.info.dbname, 'A "b"')
    conn.execute('drop owned by "A ""b"""; drop role "A ""b"""')


# What a role was given before, and what doctor advises: it sees nothing without.
@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ("", "observer"),
        ('grant usage on schema pgsched to "A ""b"""', "observer"),
        ("select pgsched.grant_access('A \"b\"', 'producer')", "observer"),
        (
            'grant usage on schema pgsched to "A ""b""";'
            ' grant execute on function pgsched.claim_task to "A ""b"""',
            "worker",
        ),
    ],
)
def test_the_advice_to_a_role_that_sees_nothing_can_be_copied(
    stranger: str, conn: psycopg.Connection, before: str, kind: str
) -> None:
    conn.execute(before.encode())
    [row] = report("--dsn", stranger)["rights"]
    assert row["level"] == "error"
    cure = row["advice"].removeprefix("As the owner of the schema: ")
    assert cure == f"""select pgsched.grant_access('A "b"', '{kind}')"""
    conn.execute(cure.encode())
    checks = report("--dsn", stranger)
    assert "rights" not in checks
    assert "queues" in checks


@pytest.mark.parametrize("kind", ["worker", "observer", "admin"])
def test_a_role_that_sees_all_is_told_of_no_right(
    stranger: str, conn: psycopg.Connection, kind: str
) -> None:
    conn.execute("select pgsched.grant_access('A \"b\"', %s)", [kind])
    assert "rights" not in report("--dsn", stranger)


def test_who_may_only_execute_sees_what_the_owner_sees(
    stranger: str, conn: psycopg.Connection
) -> None:
    conn.execute("select pgsched.grant_access('A \"b\"', 'observer')")
    conn.execute("select pgsched.pause_queue('mail')")
    with psycopg.connect(stranger) as session:
        assert ("note", "Queue 'mail' is paused.") in found(session, "queues")
