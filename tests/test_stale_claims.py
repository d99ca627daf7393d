"""A claim that is over changes nothing; reaping and ending the same task in every order.

A test that is also run against mutants takes nothing but the connection factory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any
from uuid import uuid4

import mutants
import oracle
import psycopg
import pytest
from mutants import Mutant
from oracle import Claim, Connect, Use


@pytest.fixture(autouse=True)
def log(conn: psycopg.Connection) -> None:
    oracle.install(conn)


# What the holder of a claim may call, and the answer when the claim is over.
REFUSALS: dict[Use, Any] = {
    oracle.hold: "TS409",
    oracle.complete: "TS409",
    oracle.complete_in_batch: "stale",
    oracle.fail: "TS409",
    oracle.fail_in_batch: "stale",
    oracle.release: "TS409",
    oracle.release_in_batch: "stale",
    oracle.extend_in_batch: "lost",
    oracle.lengthen: "TS409",
}
# Those that change the task: the answer to the holder, then the task's status and attempt.
USES: dict[Use, tuple[Any, str, int]] = {
    oracle.complete: (True, "completed", 1),
    oracle.complete_in_batch: ("completed", "completed", 1),
    oracle.fail: ("queued", "queued", 1),
    oracle.fail_in_batch: ("queued", "queued", 1),
    oracle.release: (None, "queued", 0),
    oracle.release_in_batch: ("queued", "queued", 0),
    oracle.extend_in_batch: ("extended", "processing", 1),
    oracle.lengthen: (True, "processing", 1),
}
WAITING: list[Use] = [oracle.complete, oracle.fail, oracle.release, oracle.lengthen]
BATCHES: list[Use] = [
    oracle.complete_in_batch,
    oracle.fail_in_batch,
    oracle.release_in_batch,
    oracle.extend_in_batch,
]


def claim_one(session: psycopg.Connection, **options: Any) -> Claim:
    [held] = oracle.claim(session, **options)
    return held


def reaped(session: psycopg.Connection, held: Claim) -> None:
    oracle.expire(session, [held])
    assert oracle.reap(session) == [held.id]


def reaped_and_claimed_again(session: psycopg.Connection, held: Claim) -> None:
    reaped(session, held)
    assert claim_one(session, worker="w1").attempt == 2


def reaped_and_completed_by_another(session: psycopg.Connection, held: Claim) -> None:
    reaped(session, held)
    assert oracle.complete(session, claim_one(session, worker="w2"))


def reaped_at_the_last_attempt(session: psycopg.Connection, held: Claim) -> None:
    session.execute("update pgsched.scheduled_tasks set max_attempts = attempt")
    reaped(session, held)
    assert oracle.state(session, held.id) == ("failed", 1)


def released_and_claimed_again(session: psycopg.Connection, held: Claim) -> None:
    oracle.release(session, held)
    assert claim_one(session, worker="w1").attempt == held.attempt


def failed_for_good(session: psycopg.Connection, held: Claim) -> None:
    assert oracle.fail(session, held, permanent=True) == "failed"


ENDINGS: list[Use] = [
    reaped,
    reaped_and_claimed_again,
    reaped_and_completed_by_another,
    reaped_at_the_last_attempt,
    oracle.release,
    oracle.release_in_batch,
    released_and_claimed_again,
    oracle.fail,
    oracle.fail_in_batch,
    failed_for_good,
]


def refuse(conn: psycopg.Connection, held: Claim, refusals: dict[Use, Any]) -> None:
    """Every use of this claim gets its refusal, and no column of the task changes."""
    before = oracle.task(conn, held.id)
    for use, refusal in refusals.items():
        assert oracle.outcome(partial(use, conn, held)) == refusal, use
        assert oracle.task(conn, held.id) == before, use


@pytest.mark.parametrize("end", ENDINGS)
def test_a_claim_that_is_over_changes_nothing(connect: Connect, end: Use) -> None:
    conn = connect()
    oracle.enqueue(conn)
    held = claim_one(conn, worker="w1")
    end(conn, held)
    refuse(conn, held, REFUSALS)
    oracle.check(conn)


@pytest.mark.parametrize("complete", [oracle.complete, oracle.complete_in_batch])
def test_a_completed_claim_may_only_be_completed_again(connect: Connect, complete: Use) -> None:
    conn = connect()
    oracle.enqueue(conn)
    held = claim_one(conn)
    assert complete(conn, held) in {True, "completed"}
    refuse(conn, held, {**REFUSALS, oracle.complete: False, oracle.complete_in_batch: "already"})
    oracle.check(conn)


def test_a_current_token_is_good_for_its_own_task_only(connect: Connect) -> None:
    conn = connect()
    oracle.enqueue(conn, 2)
    first, second = oracle.claim(conn, limit=2)
    for one, other in ((first, second), (second, first)):
        refuse(conn, one._replace(token=other.token), REFUSALS)
    swapped = [first._replace(token=second.token), second._replace(token=first.token)]
    assert oracle.complete_batch(conn, swapped) == ["stale", "stale"]
    assert oracle.fail_batch(conn, swapped) == ["stale", "stale"]
    assert oracle.release_batch(conn, swapped) == ["stale", "stale"]
    assert oracle.extend(conn, swapped) == ["lost", "lost"]
    oracle.check(conn)


ENDING_BATCHES = [
    (oracle.complete_batch, "completed"),
    (oracle.fail_batch, "queued"),
    (oracle.release_batch, "queued"),
]


@pytest.mark.parametrize(("batch", "done"), ENDING_BATCHES)
def test_a_stale_claim_takes_no_part_in_the_batch_that_it_is_in(
    connect: Connect, batch: Callable[..., Sequence[str]], done: str
) -> None:
    """Neither as the answer to the current claim of the same task, nor as its end."""
    conn = connect()
    oracle.enqueue(conn, 2)
    first, second = oracle.claim(conn, limit=2)
    swapped = [first._replace(token=second.token), second._replace(token=first.token)]
    assert batch(conn, [swapped[0], first, swapped[1]]) == ["stale", done, "stale"]
    assert oracle.state(conn, second.id) == ("processing", 1)
    oracle.check(conn)


@pytest.mark.parametrize("use", BATCHES)
def test_a_stale_claim_in_a_batch_holds_up_nobody(connect: Connect, use: Use) -> None:
    conn, late, holder = connect(), connect(), connect()
    oracle.enqueue(conn)
    held = claim_one(conn)
    with late.transaction():
        assert use(late, held._replace(token=uuid4())) == REFUSALS[use]
        assert oracle.at_once(conn, holder, partial(oracle.complete, holder, held))
    oracle.check(conn)


def test_a_task_that_is_gone_is_told_from_a_stale_claim(connect: Connect) -> None:
    conn = connect()
    oracle.enqueue(conn)
    held = claim_one(conn)._replace(id=404)
    answers = [oracle.outcome(partial(use, conn, held)) for use in REFUSALS]
    assert answers == [
        "TS404", "TS404", "gone", "TS404", "gone", "TS404", "gone", "lost", "TS404"
    ]  # fmt: skip
    oracle.check(conn)


@pytest.mark.parametrize("use", USES)
def test_a_lease_that_ended_counts_until_it_is_reaped(connect: Connect, use: Use) -> None:
    conn = connect()
    [task_id] = oracle.enqueue(conn)
    held = claim_one(conn)
    oracle.expire(conn, [held])
    answer, *state = USES[use]
    assert use(conn, held) == answer
    assert oracle.reap(conn) == []
    assert oracle.state(conn, task_id) == tuple(state)
    oracle.check(conn)


@pytest.mark.parametrize("use", USES)
def test_reaping_passes_by_what_its_holder_is_acting_on(connect: Connect, use: Use) -> None:
    conn, holder, reaper = connect(), connect(), connect()
    ids = oracle.enqueue(conn, 2)
    held, abandoned = oracle.claim(conn, limit=2)
    oracle.expire(conn, [held, abandoned])
    answer, *state = USES[use]
    with holder.transaction():
        assert use(holder, held) == answer
        call = oracle.Call(conn, reaper, lambda: oracle.reap(reaper))
    assert call.result() == [abandoned.id]
    assert not call.waits
    assert oracle.state(conn, held.id) == tuple(state)
    assert oracle.reap(conn) == []
    assert [oracle.state(conn, task_id)[0] for task_id in ids] == [state[0], "queued"]
    oracle.check(conn)


@pytest.mark.parametrize("use", USES)
def test_reaping_takes_what_its_holder_rolled_back(connect: Connect, use: Use) -> None:
    conn, holder = connect(), connect()
    oracle.enqueue(conn)
    held = claim_one(conn)
    oracle.expire(conn, [held])
    before = oracle.task(conn, held.id)
    with holder.transaction(force_rollback=True):
        use(holder, held)
        assert oracle.reap(conn) == []
    assert oracle.task(conn, held.id) == before
    assert oracle.reap(conn) == [held.id]
    refuse(conn, held, REFUSALS)
    oracle.check(conn)


def test_reaping_passes_by_tasks_whose_lock_is_held(connect: Connect) -> None:
    """Also where nobody has the row; and they take no part of the limit."""
    conn, holder, reaper = connect(), connect(), connect()
    oracle.enqueue(conn, 10)
    held = oracle.claim(conn, limit=10)
    oracle.expire(conn, held)
    with holder.transaction():
        for each in held[:5]:
            holder.execute("select pg_advisory_xact_lock(1337, %s::integer)", [each.id])
        ids = oracle.at_once(conn, reaper, lambda: oracle.reap(reaper, limit=5))
        assert ids == [each.id for each in held[5:]]
    assert oracle.reap(conn) == [each.id for each in held[:5]]
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
@pytest.mark.parametrize("use", WAITING)
def test_a_call_waits_for_an_open_reaping(connect: Connect, use: Use, rolled_back: bool) -> None:
    conn, holder, reaper = connect(), connect(), connect()
    oracle.enqueue(conn)
    held = claim_one(conn)
    oracle.expire(conn, [held])
    with reaper.transaction(force_rollback=rolled_back):
        assert oracle.reap(reaper) == [held.id]
        call = oracle.Call(conn, holder, lambda: oracle.outcome(partial(use, holder, held)))
        assert call.waits
    answer, *state = USES[use] if rolled_back else (REFUSALS[use], "queued", 1)
    assert call.result() == answer
    assert oracle.state(conn, held.id) == tuple(state)
    oracle.check(conn)


@pytest.mark.parametrize("rolled_back", [False, True])
@pytest.mark.parametrize("use", BATCHES)
def test_a_batch_is_told_busy_during_an_open_reaping(
    connect: Connect, use: Use, rolled_back: bool
) -> None:
    conn, holder, reaper = connect(), connect(), connect()
    oracle.enqueue(conn)
    held = claim_one(conn)
    oracle.expire(conn, [held])
    with reaper.transaction(force_rollback=rolled_back):
        assert oracle.reap(reaper) == [held.id]
        assert oracle.at_once(conn, holder, partial(use, holder, held)) == "busy"
    answer, *state = USES[use] if rolled_back else (REFUSALS[use], "queued", 1)
    assert use(holder, held) == answer
    assert oracle.state(conn, held.id) == tuple(state)
    oracle.check(conn)


def busy_in_batch(connect: Connect, batch: Callable[..., Sequence[str]], done: str) -> None:
    """One task that another transaction acts on does not hold up the others of the batch."""
    conn, first, second = connect(), connect(), connect()
    oracle.enqueue(conn, len(USES) + 2)
    held = oracle.claim(conn, limit=100)
    with first.transaction(force_rollback=True):
        for use, each in zip(USES, held[1:-1], strict=True):
            use(first, each)
        outcomes = oracle.at_once(conn, second, lambda: batch(second, held))
        assert outcomes == [done, *["busy"] * len(USES), done]
    assert batch(second, held[1:-1]) == [done] * len(USES)
    oracle.check(conn)


def test_a_batch_completion_never_waits(connect: Connect) -> None:
    busy_in_batch(connect, oracle.complete_batch, "completed")


def test_a_batch_failure_never_waits(connect: Connect) -> None:
    busy_in_batch(connect, oracle.fail_batch, "queued")


def test_a_batch_release_never_waits(connect: Connect) -> None:
    busy_in_batch(connect, oracle.release_batch, "queued")


def test_a_batch_extension_never_waits(connect: Connect) -> None:
    busy_in_batch(connect, oracle.extend, "extended")


@pytest.mark.parametrize("analysed", [False, True])
def test_reaping_locks_no_more_than_it_returns(connect: Connect, analysed: bool) -> None:
    """Under any plan: what one reaper does not return, another one gets meanwhile."""
    conn, other = connect(), connect()
    oracle.enqueue(conn, 500)
    held = [each for _ in range(4) for each in oracle.claim(conn, limit=100)]
    oracle.expire(conn, held[:300])
    if analysed:
        conn.execute("analyze pgsched.scheduled_tasks")
    settings = ("enable_bitmapscan", "enable_indexscan", "enable_seqscan", "enable_sort")
    for off in (each for size in range(5) for each in combinations(settings, size)):
        with conn.transaction(force_rollback=True), other.transaction(force_rollback=True):
            conn.execute("discard plans")
            for setting in off:
                conn.execute(f"set local {setting} = off")
            ids = oracle.reap(conn, limit=5)
            assert len(ids) == 5
            assert oracle.task_locks(conn, conn) == 5, off
            rest = oracle.at_once(conn, other, lambda: oracle.reap(other))
            assert sorted(ids + rest) == [each.id for each in held[:300]], off
    oracle.check(conn)


def test_two_reapers_share_the_work(connect: Connect) -> None:
    conn = connect()
    oracle.enqueue(conn, 300)
    held = [each for _ in range(3) for each in oracle.claim(conn, limit=100)]
    oracle.expire(conn, held)
    reapers = [connect() for _ in range(4)]
    parts = oracle.together(partial(oracle.reap, each) for each in reapers)
    assert sorted(task_id for part in parts for task_id in part) == [each.id for each in held]
    assert oracle.reap(conn) == []
    oracle.check(conn)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        *(
            (mutant, partial(test_a_claim_that_is_over_changes_nothing, end=end))
            for mutant in (
                mutants.COMPLETE_WITHOUT_TOKEN,
                mutants.BATCH_COMPLETION_WITHOUT_TOKEN,
                mutants.FAILURE_WITHOUT_TOKEN,
                mutants.EXTENSION_WITHOUT_TOKEN,
                mutants.BATCH_EXTENSION_WITHOUT_TOKEN,
                mutants.HOLD_WITHOUT_CHECK,
            )
            for end in (reaped, reaped_and_claimed_again)
        ),
        *(
            (
                mutant,
                partial(
                    test_a_stale_claim_takes_no_part_in_the_batch_that_it_is_in,
                    batch=batch,
                    done="queued",
                ),
            )
            for mutant, batch in (
                (mutants.BATCH_FAILURE_WITHOUT_TOKEN, oracle.fail_batch),
                (mutants.BATCH_RELEASE_WITHOUT_TOKEN, oracle.release_batch),
            )
        ),
        *(
            (
                mutants.BATCH_LOCK_WITHOUT_TOKEN,
                partial(test_a_stale_claim_in_a_batch_holds_up_nobody, use=use),
            )
            for use in (oracle.fail_in_batch, oracle.release_in_batch)
        ),
        (mutants.BATCH_LOCK_THAT_WAITS, test_a_batch_failure_never_waits),
        (mutants.BATCH_LOCK_THAT_WAITS, test_a_batch_release_never_waits),
        (mutants.BATCH_COMPLETION_THAT_WAITS, test_a_batch_completion_never_waits),
        (mutants.BATCH_EXTENSION_THAT_WAITS, test_a_batch_extension_never_waits),
        (
            mutants.REAP_BY_ID_ONLY,
            partial(
                test_reaping_passes_by_what_its_holder_is_acting_on, use=oracle.extend_in_batch
            ),
        ),
        (mutants.REAP_WITHOUT_TASK_LOCK, test_reaping_passes_by_tasks_whose_lock_is_held),
        (
            mutants.REAP_WITH_TRY_LOCK_IN_CHOICE,
            partial(test_reaping_locks_no_more_than_it_returns, analysed=False),
        ),
    ],
)
def test_a_broken_function_is_seen(
    connect: Connect, mutant: Mutant, test: Callable[[Connect], None]
) -> None:
    mutants.install(connect(), mutant)
    with pytest.raises(AssertionError):
        test(connect)
