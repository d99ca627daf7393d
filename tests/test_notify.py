"""Enqueuing wakes those who listen, once for each transaction and queue, and nobody else.

A test that is also run against mutants takes the connection factory, and what is in its cases.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from threading import Event, Thread

import mutants
import oracle
import psycopg
import pytest
from mutants import Mutant
from oracle import Connect
from workers import PATIENCE, wait_until

NOTIFY_UNHEARD = Mutant("enqueue_task", "v_heard and p_run_at", "p_run_at")
NOTIFY_THOUGH_OFF = Mutant("enqueue_task", "and v_settings.notify is not false", "")
NOTIFY_TOO_EARLY = Mutant("enqueue_task", "and p_run_at = v_now", "")
NOTIFY_ALL = Mutant("enqueue_tasks", "t.queue = l.queue and", "")
NOTIFY_BATCH_THOUGH_OFF = Mutant("enqueue_tasks", "coalesce(q.notify, true)", "true")
NOTIFY_BATCH_TOO_EARLY = Mutant("enqueue_tasks", "(t.run_at > v_now) is not true", "true")


class Listener:
    """A session that listens on the channels of these queues, whether it has said so or not."""

    END = "end_of_this_look"

    def __init__(self, session: psycopg.Connection, *queues: str) -> None:
        self._session = session
        self._queues = {}
        for queue in queues:
            [(channel,)] = session.execute("select pgsched.notify_channel(%s)", [queue])
            self._queues[channel] = queue
        for channel in (*self._queues, self.END):
            session.execute(f"listen {channel}".encode())

    def heard(self, conn: psycopg.Connection) -> list[str]:
        """The queues of all notifications since the last look: they come in order of commits."""
        conn.execute(f"notify {self.END}".encode())
        queues: list[str] = []
        with closing(self._session.notifies(timeout=PATIENCE)) as notifications:
            for notification in notifications:
                if notification.channel == self.END:
                    return queues
                assert notification.payload == ""
                queues.append(self._queues[notification.channel])
        raise AssertionError(f"not heard within {PATIENCE} s")


def register(conn: psycopg.Connection, *queues: str, name: str = "idle") -> int:
    """The id of a worker that says that it listens for these queues."""
    [(worker_id,)] = conn.execute("select pgsched.register_worker(%s, array['any'], 1)", [name])
    conn.execute("select pgsched.register_listener(%s, %s)", [worker_id, list(queues)])
    assert isinstance(worker_id, int)
    return worker_id


def enqueue(conn: psycopg.Connection, queue: str = "mail") -> None:
    conn.execute("select pgsched.enqueue_task('test', p_queue => %s)", [queue])


LATER = "clock_timestamp() + interval '1 hour'"
# A call, and the queues that are told of it.
TOLD = {
    "enqueue_task('test', p_queue => 'mail')": ["mail"],
    "enqueue_task('test', p_queue => 'mail', p_run_at => '2000-01-01')": ["mail"],
    f"enqueue_task('test', p_queue => 'mail', p_run_at => {LATER})": [],
    "enqueue_task('test', p_queue => 'off')": [],
    "enqueue_task('test', p_queue => 'unheard')": [],
    """
    enqueue_tasks((
      select jsonb_agg(jsonb_build_object('task_type', 'test', 'queue', 'mail'))
        from generate_series(1, 1000)))
    """: ["mail"],
    f"""
    enqueue_tasks((
      select jsonb_agg(jsonb_build_object('task_type', 'test', 'queue', t.queue, 'run_at', t.at))
        from (values ('bulk', null), ('mail', null), ('mail', {LATER}), ('later', {LATER}),
                     ('off', null), ('unheard', null)) as t (queue, at)))
    """: ["bulk", "mail"],
    "enqueue_tasks('[]')": [],
}


@pytest.mark.parametrize(("call", "told"), TOLD.items(), ids=range(len(TOLD)))
def test_a_call_tells_the_queues_that_have_work_now(
    connect: Connect, call: str, told: list[str]
) -> None:
    conn = connect()
    queues = ("bulk", "later", "mail", "off")
    register(conn, *queues)
    conn.execute("select pgsched.configure_queue('off', p_notify => false)")
    listener = Listener(connect(), *queues, "unheard")
    rows = conn.execute(f"select * from pgsched.{call}".encode()).fetchall()
    assert sorted(listener.heard(conn)) == told
    tasks = conn.execute("select id from pgsched.scheduled_tasks order by id").fetchall()
    assert sorted(rows) == tasks


@pytest.mark.parametrize(
    ("mutant", "call"),
    [
        (NOTIFY_UNHEARD, 4),
        (NOTIFY_THOUGH_OFF, 3),
        (NOTIFY_TOO_EARLY, 2),
        (NOTIFY_ALL, 6),
        (NOTIFY_BATCH_THOUGH_OFF, 6),
        (NOTIFY_BATCH_TOO_EARLY, 6),
    ],
)
def test_a_broken_notification_is_seen(connect: Connect, mutant: Mutant, call: int) -> None:
    mutants.install(connect(), mutant)
    with pytest.raises(AssertionError):
        test_a_call_tells_the_queues_that_have_work_now(connect, *list(TOLD.items())[call])


def test_a_transaction_tells_once_and_when_it_commits(connect: Connect) -> None:
    conn, producer = connect(), connect()
    register(conn, "mail")
    listener = Listener(connect(), "mail")
    with producer.transaction():
        for _ in range(3):
            enqueue(producer)
        assert listener.heard(conn) == []
    assert listener.heard(conn) == ["mail"]
    with producer.transaction(force_rollback=True):
        enqueue(producer)
    assert listener.heard(conn) == []


def test_a_queue_is_told_as_long_as_a_worker_says_that_it_listens(connect: Connect) -> None:
    conn = connect()
    listener = Listener(connect(), "mail", "bulk")

    def told() -> list[str]:
        for queue in ("mail", "bulk"):
            enqueue(conn, queue)
        return listener.heard(conn)

    assert told() == []
    first, second = register(conn, "mail", "bulk"), register(conn, "mail", name="second")
    assert told() == ["mail", "bulk"]
    register(conn, "bulk")
    assert told() == ["mail", "bulk"]
    conn.execute("select pgsched.unregister_worker(%s)", [second])
    assert told() == ["bulk"]
    register(conn)
    assert told() == []
    register(conn, "bulk", "mail")
    assert told() == ["mail", "bulk"]
    conn.execute("update pgsched.workers set seen_at = seen_at - interval '10 minutes'")
    second = register(conn, "mail", name="second")
    assert told() == ["mail"]
    for worker_id in (first, second):
        conn.execute("select pgsched.unregister_worker(%s)", [worker_id])
    assert told() == []


def test_saying_that_one_listens_waits_for_nobody_for_long(connect: Connect) -> None:
    """Whoever registers deletes what others, not seen for long, listen to: until it commits."""
    conn, other, worker = connect(), connect(), connect()
    register = "select pgsched.register_worker(%s, array['mail'], 1)"
    [(worker_id,)] = worker.execute(register, ["quiet"]).fetchall()
    listen = "select pgsched.register_listener(%s, array['mail'])"
    worker.execute(listen, [worker_id])
    conn.execute("update pgsched.workers set seen_at = seen_at - interval '6 minutes'")
    with other.transaction():
        other.execute(register, ["other"])
        assert oracle.outcome(lambda: worker.execute(listen, [worker_id])) == "55P03"
    worker.execute(listen, [worker_id])
    assert conn.execute("select queue from pgsched.listeners").fetchall() == [("mail",)]


def test_notifications_of_a_queue_can_be_switched_off_and_on(connect: Connect) -> None:
    conn = connect()
    register(conn, "mail")
    listener = Listener(connect(), "mail")
    for notify in (False, True):
        conn.execute("select pgsched.configure_queue('mail', p_notify => %s)", [notify])
        enqueue(conn)
        assert listener.heard(conn) == ["mail"] * notify


def test_many_producers_commit_and_each_is_heard(connect: Connect) -> None:
    conn = connect()
    register(conn, "mail")
    listener = Listener(connect(), "mail")

    def produce(session: psycopg.Connection) -> None:
        for _ in range(50):
            enqueue(session)

    oracle.together(partial(produce, connect()) for _ in range(16))
    assert conn.execute("select count(*) from pgsched.scheduled_tasks").fetchall() == [(800,)]
    assert listener.heard(conn) == ["mail"] * 800


@contextmanager
def a_notifying_commit_that_does_not_end(connect: Connect) -> Iterator[None]:
    """Meanwhile a session commits, for which it has the lock that all notifying commits take.

    It waits there for a standby that is not there.
    """
    admin, session, over = connect(), connect(), Event()
    admin.execute("create table note (value integer)")

    def commit_until_it_waits() -> None:
        while not over.is_set():
            with session.transaction():
                session.execute("set local synchronous_commit = on")
                session.execute("insert into note values (1)")
                session.execute("notify anything")

    waits = "select from pg_stat_activity where pid = %s and wait_event = 'SyncRep'"
    thread = Thread(target=commit_until_it_waits)
    admin.execute("alter system set synchronous_standby_names = 'nobody'")
    try:
        admin.execute("select pg_reload_conf()")
        thread.start()
        wait_until(lambda: admin.execute(waits, [session.info.backend_pid]).fetchall())
        yield
    finally:
        over.set()
        admin.execute("alter system reset synchronous_standby_names")
        admin.execute("select pg_reload_conf()")
        thread.join(PATIENCE)
    assert not thread.is_alive()


def test_producers_that_nobody_listens_to_take_no_lock_of_the_whole_database(
    connect: Connect,
) -> None:
    conn, producer = connect(), connect()
    register(conn, "heard", "off")
    conn.execute("select pgsched.configure_queue('off', p_notify => false)")
    with a_notifying_commit_that_does_not_end(connect):
        for queue in ("unheard", "off"):
            oracle.at_once(conn, producer, partial(enqueue, producer, queue))
        call = oracle.Call(conn, producer, partial(enqueue, producer, "heard"))
        waiting = conn.execute(
            """
            select locktype, classid::regclass::text, objid
              from pg_locks
             where pid = %s and not granted
            """,
            [producer.info.backend_pid],
        )
        assert waiting.fetchall() == [("object", "pg_database", 0)]
    assert call.waits
    assert call.result() is None
