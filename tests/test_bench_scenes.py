"""What the benchmarks measure is counted right, and their tables come out; not how fast it is."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner
from pgbouncer import PROGRAM
from workers import wait_until

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import scene_backlogs
import scene_cost
import scene_herd
import scene_pinned
import scene_sql
from designs import DESIGNS
from measuring import (
    Bar,
    Figures,
    Gate,
    Row,
    Sample,
    Server,
    TooFewTasksError,
    ask,
    cpu_seconds,
    execute,
    interleaved,
    ratio,
    row_of,
)

import bench

BURN = "import time\nwhile time.process_time() < 0.4: pass\n"


@pytest.fixture(scope="module")
def private() -> Iterator[Server]:
    """A server as the benchmarks have it."""
    with Server(Gate(patience=0)) as server:
        yield server


# The measuring


def test_a_ratio_is_of_the_samples_of_one_round() -> None:
    ours = Row("ours", [Sample(40, 1.0, 8.0, 1.0), Sample(10, 1.0, 6.0, 1.0)])
    base = Row("base", [Sample(20, 1.0, 2.0, 1.0), Sample(20, 2.0, 3.0, 1.0)])
    assert ratio(ours, base) == Figures(1.5, 1.0, 2.0)
    assert ratio(ours, base, "server_us") == Figures(3.0, 2.0, 4.0)


def test_a_round_has_all_variants_in_turn() -> None:
    order: list[str] = []

    def measure(name: str) -> int:
        order.append(name)
        return len(order)

    found = interleaved({"a": lambda: measure("a"), "b": lambda: measure("b")}, 2)
    assert order == ["a", "b", "a", "b"]
    assert found == {"a": [1, 3], "b": [2, 4]}


def test_no_round_begins_for_which_there_is_no_time() -> None:
    assert interleaved({"a": lambda: 1}, 3, patience=0.0) == {"a": [1]}


def test_a_copy_has_what_was_filled_once_and_is_dropped_in_the_end(private: Server) -> None:
    made = "create table made as select 1 as i"
    databases = "select count(*) from pg_database"
    with private.filled(made) as dsn:
        execute(dsn, "insert into made values (2)")
        before = ask(dsn, databases)
    with private.filled(made) as dsn:
        assert [before, 1] == [ask(dsn, databases), ask(dsn, "select count(*) from made")]
    with pytest.raises(psycopg.Error), private.filled(made) as dsn:
        execute(dsn, "nonsense")
    assert ask(private.dsn(), databases) == before - 1


@pytest.mark.parametrize("waits", [True, False], ids=["ended", "running"])
def test_cpu_is_that_of_children_too(waits: bool) -> None:
    """Of a child that was waited for, and of one that still runs."""
    code = BURN if waits else BURN + "time.sleep(60)"
    start = f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {code!r}])\n"
    then = "child.wait()\n" if waits else ""
    # When its stdin ends it takes along a child that still runs.
    command = start + then + "sys.stdin.read()\nchild.kill()\nchild.wait()"
    with subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE) as process:
        wait_until(lambda: cpu_seconds(process.pid) >= 0.4)
        assert process.stdin
        process.stdin.close()
    assert cpu_seconds(process.pid) == 0.0


def test_tasks_are_made_more_until_they_are_enough(private: Server) -> None:
    asked: list[int] = []

    def measure(plenty: int) -> int:
        asked.append(plenty)
        if plenty < 4:
            raise TooFewTasksError
        return plenty

    assert private.with_enough(measure) == 4
    assert private.with_enough(measure) == 4
    assert asked == [1, 2, 4, 4]


# The designs


@pytest.mark.parametrize("limit", [1, 10])
@pytest.mark.parametrize("name", DESIGNS)
def test_a_design_finishes_what_it_claims(private: Server, name: str, limit: int) -> None:
    design = DESIGNS[name]
    with private.filled(*design.prepare(100), pgsched=design.pgsched) as dsn:
        assert ask(dsn, design.unfinished) == 100
        done = private.pgbench(dsn, design.pair(limit), 1, transactions=5)
        assert len(done.latencies) == 5
        assert ask(dsn, design.unfinished) == 100 - 5 * limit
        if design.pgsched:
            kept = 0 if "no history" in name else 5 * limit
            assert ask(dsn, "select count(*) from pgsched.finished_tasks") == kept


def test_too_few_tasks_are_noticed(private: Server) -> None:
    design = DESIGNS["pgsched"]
    with private.filled(*design.prepare(100)) as dsn, pytest.raises(TooFewTasksError):
        private.pgbench(dsn, design.pair(1), 1, transactions=101)


def test_a_herd_that_does_things_twice_is_seen(
    private: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    naive = DESIGNS["N"]
    careless = replace(naive, claim=lambda limit: naive.claim(limit).replace(" for update", ""))
    monkeypatch.setitem(DESIGNS, "N", careless)
    assert scene_herd.herd(private, "N", 2000, 1).doubles > 0


# The scenes


def numbers(rows: list[Row], name: str) -> list[float]:
    """One for each round."""
    return row_of(rows, name).numbers()


@pytest.mark.long
def test_sql(private: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {
        (1, 1): scene_sql.EVERYTHING,
        (1, 64): ("pgsched", "B"),
        (100, 4): scene_sql.EVERYTHING,
    }
    monkeypatch.setattr(scene_sql, "SHAPES", shapes)
    monkeypatch.setattr(scene_sql, "PATIENCE", {False: 0.0})  # one round
    rows = scene_sql.run(private, full=False)
    pooled = {(1, 256): scene_sql.POOLED} if PROGRAM.exists() else {}
    assert [
        *(
            f"{scene_sql.title(*shape)}: {name}"
            for shape, names in {**shapes, **pooled}.items()
            for name in names
        ),
        *scene_sql.ENQUEUE,
    ] == [row.name for row in rows]
    assert [1.4, 0.7, 0.85, *[0.8] * (1 + len(pooled)), 1.25, 2.5] == [
        bar.limit for bar in scene_sql.bars(rows)
    ]


@pytest.mark.long
def test_herd(private: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene_herd, "N_SECONDS", 1)
    rows = scene_herd.run(private, full=False, tasks=5000)
    assert numbers(rows, "pgsched: doubles") == [0] * 3
    assert row_of(rows, "pgsched").numbers("tasks") == [5000] * 3
    assert [bar.limit for bar in scene_herd.bars(rows)] == [0, 5]


@pytest.mark.long
def test_pinned(private: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene_pinned, "PATIENCE", {False: 0.0})  # one round
    rows = scene_pinned.run(private, full=False, churn=2000)
    assert [
        f"pgsched, {pin}, {stage}: {what}"
        for pin in ("snapshot", "writer")
        for stage in ("fresh", "pinned", "after")
        for what in ("claim", "throughput")
    ] == [row.name for row in rows]
    assert [bar.limit for bar in scene_pinned.bars(rows)] == [1.5, 0.85]


@pytest.mark.long
def test_backlogs(private: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene_backlogs, "PATIENCE", {False: 0.0})  # one round
    rows = scene_backlogs.run(private, full=False, backlog=5000)
    assert [row.name for row in rows] == list(scene_backlogs.FILLS)
    assert [bar.limit for bar in scene_backlogs.bars(rows)] == [0.85] * 3


@pytest.mark.long
def test_cost(private: Server) -> None:
    rows = [
        *scene_cost.run(private, full=False, transactions=50),
        *scene_cost.steady(private, 4),
        *scene_cost.idle(private, 2),
        *scene_cost.memory(private, 20_000, 10_000),
    ]
    assert [
        *("WAL a task: pgsched", "WAL a task: pgsched, no history"),
        *("steady: rate that was reached", "steady: most dead rows"),
        *("steady: size after a minute", "steady: size at the end"),
        "idle: statements of a worker",
        *("memory: after 10,000 tasks", "memory: after 20,000 tasks", scene_cost.MEMORY_GROWTH),
    ] == [row.name for row in rows]
    kept, not_kept = (min(row.numbers()) for row in rows[:2])
    assert not_kept < kept
    assert [bar.limit for bar in scene_cost.bars(rows)] == [1.2, 0.95, 20]


# The command line


def test_the_bars_say_what_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    bench.print_bars(
        [
            Bar("much", Figures(0.8, 0.5, 12.34), 0.8, at_least=True),
            Bar("little", Figures(1234.5, 1.0, 2000.0), 20, at_least=False, unit="MB"),
        ]
    )
    assert capsys.readouterr().out.splitlines()[2:6] == [
        "| what | measured | bar | met |",
        "| --- | ---: | ---: | ---: |",
        "| much | 0.80 (0.50-12.3) x | ≥ 0.8 x | yes |",
        "| little | 1,234 (1.00-2,000) MB | ≤ 20 MB | NO |",
    ]


def test_a_scene_that_is_not_there_is_named() -> None:
    result = CliRunner().invoke(bench.main, ["sql", "nonsense"])
    assert result.exit_code == 2
    assert "'nonsense' is not one of 'sql', 'drain'" in result.output


@pytest.mark.long
def test_a_run_prints_tables_and_writes_every_sample(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-W", "error", bench.__file__, "--out", str(out), "cost"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.findall(r"^\| (WAL a task, .*?) \|", done.stdout, re.MULTILINE) == [
        *("WAL a task, pgsched", "WAL a task, pgsched, no history")
    ]
    document = json.loads(out.read_text())
    assert [(row["scene"], row["name"], row["unit"]) for row in document["rows"]] == [
        *(("cost", f"WAL a task: {name}", "bytes") for name in scene_cost.HISTORIES)
    ]
    assert [
        [number / 1024 for number in (min(row["samples"]), max(row["samples"]))]
        for row in document["rows"]
    ] == [[bar["measured"]["low"], bar["measured"]["high"]] for bar in document["bars"]]
