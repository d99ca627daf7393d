"""Functions of pgsched, each with one rule broken: the tests have to see it."""

from typing import NamedTuple

import psycopg


class Mutant(NamedTuple):
    """A function, the words of it that keep a rule, and what stands there instead."""

    function: str
    words: str
    instead: str


# Found by its place, a row is not claimed twice even without a lock.
CLAIM_BY_ID = Mutant("claim_task", "t.ctid = picked.place", "t.id = picked.id")
CLAIM_WITHOUT_ROW_LOCK = Mutant("claim_task", "for no key update skip locked", "")
CLAIM_WITH_ROW_LOCK_TOO_STRONG = Mutant("claim_task", "for no key update", "for update")
CLAIM_THAT_WAITS = Mutant("claim_task", "for no key update skip locked", "for no key update")
CLAIM_WITH_TRY_LOCK_IN_CHOICE = Mutant(
    "claim_task",
    "and s.run_at <= v_now",
    "and s.run_at <= v_now and pg_try_advisory_xact_lock(1337, (s.id % 2147483647)::integer)",
)
CLAIM_WITH_TRY_LOCK_IN_UPDATE = Mutant(
    "claim_task",
    "(picked.id % 2147483647)::integer)",
    "(t.id % 2147483647)::integer)",
)
CLAIM_WITH_CUT_KEY = Mutant("claim_task", "% 2147483647)", "& 2147483647)")
CLAIM_BY_TRANSACTION_TIME = Mutant("claim_task", "v_now := clock_timestamp()", "v_now := now()")
COMPLETE_WITHOUT_TOKEN = Mutant("complete_task", "and t.claim_token = p_claim_token", "")
BATCH_COMPLETION_WITHOUT_TOKEN = Mutant("complete_tasks", "and g.claim_token = t.claim_token", "")
FAILURE_WITHOUT_TOKEN = Mutant("_lock_claim", "and t.claim_token = p_claim_token", "")
BATCH_FAILURE_WITHOUT_TOKEN = Mutant("fail_tasks", "and t.claim_token = g.claim_token", "")
BATCH_RELEASE_WITHOUT_TOKEN = Mutant("release_tasks", "and t.claim_token = g.claim_token", "")
# The lock of fail_tasks and release_tasks.
BATCH_LOCK_WITHOUT_TOKEN = Mutant("_lock_claims", "and g.claim_token = t.claim_token)", ")")
BATCH_LOCK_THAT_WAITS = Mutant("_lock_claims", "for update of t skip locked", "for update of t")
BATCH_COMPLETION_THAT_WAITS = Mutant(
    "complete_tasks", "for update of t skip locked", "for update of t"
)
BATCH_COMPLETION_IN_REVERSE = Mutant(
    "complete_tasks", "t.id\n       for update of t skip locked", "t.id desc for update of t"
)
EXTENSION_WITHOUT_TOKEN = Mutant("extend_task", "and t.claim_token = p_claim_token", "")
BATCH_EXTENSION_WITHOUT_TOKEN = Mutant("extend_tasks", "and g.claim_token = t.claim_token)", ")")
BATCH_EXTENSION_THAT_WAITS = Mutant("extend_tasks", "for no key update of t skip locked", "")
HOLD_WITHOUT_LOCK = Mutant("hold_task", "p_id := pgsched._lock_task(p_id);", "")
HOLD_WITHOUT_CHECK = Mutant("hold_task", "and t.claim_token = p_claim_token", "")
RELEASE_THAT_SLEEPS = Mutant(
    "release_task",
    "perform pgsched._release_claims",
    "perform pg_sleep(1); perform pgsched._release_claims",
)
REAP_BY_ID_ONLY = Mutant("reap_stale", "for update of t skip locked", "")
REAP_WITHOUT_TASK_LOCK = Mutant(
    "reap_stale", "pg_try_advisory_xact_lock(1337, (s.id % 2147483647)::integer)", "true"
)
REAP_WITH_TRY_LOCK_IN_CHOICE = Mutant("reap_stale", "offset 0\n", "\n")
ENQUEUE_IN_INPUT_ORDER = Mutant(
    "enqueue_tasks", "order by t.queue, t.unique_key, t.ordinal", "order by t.ordinal"
)
CANCEL_WITH_TASK_LOCK = Mutant(
    "cancel_task", "  loop\n", "  p_id := pgsched._lock_task(p_id);\n  loop\n"
)
RETRY_OF_ANY_STATUS = Mutant(
    "retry_task", "exit when v_task.status in ('failed', 'cancelled')", "exit when found"
)
RESCHEDULE_OF_ANY_STATUS = Mutant(
    "reschedule_task", "exit when v_status = 'queued'", "exit when found"
)


def install(conn: psycopg.Connection, mutant: Mutant) -> None:
    """Replace the function in this database."""
    [(definition,)] = conn.execute(
        "select pg_get_functiondef(%s::regproc)", [f"pgsched.{mutant.function}"]
    )
    assert mutant.words in definition
    conn.execute(definition.replace(mutant.words, mutant.instead))
