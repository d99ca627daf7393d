"""Benchmarks with whole workers count right, leave out who fails, and draw what was measured."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from workers import PATIENCE, wait_until

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import measuring
import plot
import scene_drain
import scene_latency
from contestants import Contestant, LeftOut, filled, go, loop, ours, peers, ready
from measuring import Gate, Row, Sample, Server, ask
from scene_drain import KEPT, NOT_KEPT, OVER_B, OVER_D, Entry

BENCH = Path(plot.__file__).parent
TASKS = 250
CONTESTANTS = [ours(KEPT), ours(NOT_KEPT), loop(OVER_B, "B", 100), loop(OVER_D, "D", 100)]
ANSWERS_NOTHING = [sys.executable, "-c", "raise SystemExit('no such peer')"]
STAYS = [sys.executable, "-c", "print('READY', flush=True); input(); input()"]
HURRY = (math.inf, PATIENCE)
ENDS = [sys.executable, "-c", "print('READY', flush=True); input()"]

each_worker = pytest.mark.parametrize("contestant", CONTESTANTS[::2], ids=[KEPT, OVER_B])


@pytest.fixture(scope="module")
def bench_server() -> Iterator[Server]:
    """A server of the benchmarks, but that it is in a hurry."""
    with pytest.MonkeyPatch.context() as patch:
        for setting in ("fsync", "full_page_writes"):
            patch.setitem(measuring.SETTINGS, setting, "off")
        with Server(Gate(patience=0)) as server:
            yield server


def fake(command: list[str], *, optional: bool = True) -> Contestant:
    """A contestant that has one task and never does it."""
    return Contestant("fake", 1, "select 1", lambda *_: None, lambda _: command, optional)


# Drain


@each_worker
def test_all_tasks_are_drained_and_counted(bench_server: Server, contestant: Contestant) -> None:
    few = replace(contestant, tasks=TASKS)
    entries = [Entry(few, 1, 1), Entry(few, 2, 1)]
    rows = scene_drain.measure(bench_server, entries, *HURRY)
    assert [(contestant.name, [TASKS]), (f"{contestant.name}, 2 processes", [TASKS])] == [
        (each.name, each.numbers("tasks")) for each in rows
    ]


def test_of_a_drain_that_takes_too_long_those_tasks_count_that_are_done(
    bench_server: Server,
) -> None:
    half_done = replace(fake(STAYS), tasks=8, left="select 2")
    sample = scene_drain.drain(bench_server, half_done, 1, 0.0)
    assert sample.tasks == 6


@pytest.mark.parametrize(
    ("contestant", "kept", "finished"),
    [
        (CONTESTANTS[0], 3, "select count(*) from pgsched.tasks where status = 'completed'"),
        (CONTESTANTS[1], 0, "select count(*) from pgsched.tasks"),
        (CONTESTANTS[2], 3, "select count(*) from plain_tasks where status = 'completed'"),
        (CONTESTANTS[3], 0, "select count(*) from plain_tasks"),
    ],
    ids=[each.name for each in CONTESTANTS],
)
def test_finished_tasks_are_kept_as_the_name_says(
    bench_server: Server, contestant: Contestant, kept: int, finished: str
) -> None:
    few = replace(contestant, tasks=3)
    with filled(bench_server, few) as dsn, ready(few, dsn, 1) as workers:
        assert ask(dsn, few.left) == 3
        go(workers)
        wait_until(lambda: ask(dsn, few.left) == 0)
        assert kept == ask(dsn, finished)


def test_calls_of_claim_task_are_timed(
    bench_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(CONTESTANTS[0], tasks=TASKS)
    calls = scene_drain.AVERAGE_CLAIM.replace("total_time / calls", "calls")
    monkeypatch.setattr(scene_drain, "AVERAGE_CLAIM", calls)
    # None gets more than a hundred.
    assert scene_drain.average_claim(bench_server, few, PATIENCE) > TASKS / 100


@pytest.mark.parametrize(
    ("command", "reason"),
    [(ANSWERS_NOTHING, "does not start\nno such peer"), (ENDS, "1 of 1 tasks are left after 0 s")],
)
def test_a_peer_that_fails_is_named_and_left_out(
    bench_server: Server, command: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = replace(CONTESTANTS[3], tasks=1)
    entries = [Entry(fake(command), 1, 2), Entry(few, 1, 2)]
    [row] = scene_drain.measure(bench_server, entries, *HURRY)
    assert [few.name, 2] == [row.name, len(row.samples)]
    errors = capsys.readouterr().err
    assert errors.count("fake is left out") == 1
    assert reason in errors


def test_a_run_without_pgsched_itself_fails(bench_server: Server) -> None:
    failing = Entry(fake(ENDS, optional=False), 1, 1)
    with pytest.raises(LeftOut, match="1 of 1"):
        scene_drain.measure(bench_server, [failing], *HURRY)


@each_worker
def test_a_worker_ends_with_the_benchmark(bench_server: Server, contestant: Contestant) -> None:
    few = replace(contestant, tasks=1)
    with filled(bench_server, few) as dsn, ready(few, dsn, 1) as [worker]:
        go([worker])
        wait_until(lambda: ask(dsn, few.left) == 0)
        assert worker.stdin
        worker.stdin.close()
        worker.wait(PATIENCE)


def row(name: str, *rates: int, server_us: float = 50) -> Row:
    """What a drain of so many tasks a second, each round, leaves."""
    return Row(name, [Sample(rate, 1.0, server_us, 10.0) for rate in rates])


def test_the_bars_are_ratios_to_the_fastest_of_each_kind() -> None:
    rows = [
        row(KEPT, 10_000, 12_000),
        row(NOT_KEPT, 20_000, 40_000),
        row(OVER_D, 40_000, 40_000),
        row(f"{KEPT}, 2 processes", 20_000, 24_000, server_us=80),
        row(f"{NOT_KEPT}, 2 processes", 30_000, 30_000),
        row(f"{OVER_D}, 2 processes", 60_000, 60_000),
        row("graphile-worker 1.0, best", 20_000, 20_000),
        row("graphile-worker 1.0, best, 2 processes", 60_000, 60_000),
        row("graphile-worker 1.0, default", 2_000),
        row("pg-boss 1.0, default", 10),
        row("pg-boss 1.0, best", 9_000),
        row("PgQueuer 1.0, best", 5_000),
        row("awa-pg 1.0, best", 4_000),
        Row(scene_drain.CLAIM, [2.0, 4.0], "ms"),
    ]
    assert [
        ("drain, pgsched, no history / graphile-worker 1.0, best", 1.5, 1.1),
        (
            "drain, pgsched, no history, 2 processes / graphile-worker 1.0, best, 2 processes",
            *(0.5, 1.1),
        ),
        ("drain, pgsched, no history / P over D", 0.75, 0.6),
        ("drain, pgsched, no history, 2 processes / P over D, 2 processes", 0.5, 0.6),
        ("drain, pgsched / graphile-worker 1.0, default", 5.5, 3.0),
        ("drain, pgsched / PgQueuer 1.0, best", 2.2, 1.5),
        ("drain, tasks through Python", 22_000, 27_500),
        ("drain, their server CPU", 80, 91),
        ("drain, average call of claim_task", 3, 3),
    ] == [(bar.what, round(bar.measured.median, 6), bar.limit) for bar in scene_drain.bars(rows)]
    without_peers = [each for each in rows if "1.0" not in each.name]
    assert len(scene_drain.bars(without_peers)) == 5


# Peers


def test_peers_that_are_installed_take_part_in_two_settings_and_the_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "python/lib/python3.11/site-packages/awa_pg-1.2.dist-info/METADATA"
    manifest = tmp_path / "node/node_modules/pg-boss/package.json"
    for file, text in (
        (metadata, "Metadata-Version: 2.1\nName: awa-pg\nVersion: 1.2\n"),
        (manifest, json.dumps({"name": "pg-boss", "version": "3.4"})),
    ):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert [each.name for each in peers(tmp_path)] == [
        "pg-boss 3.4, default",
        "pg-boss 3.4, best",
        "awa-pg 1.2, default",
        "awa-pg 1.2, best",
    ]
    assert [
        f"{name} is left out: not installed"
        for name in ("graphile-worker", "PgQueuer", "Procrastinate")
    ] == capsys.readouterr().err.splitlines()


def test_a_peer_that_cannot_be_installed_is_named_and_the_others_are(tmp_path: Path) -> None:
    called = tmp_path / "called"
    for program in ("python/bin/python", "bin/npm"):
        file = tmp_path / program
        file.parent.mkdir(parents=True)
        file.write_text(
            f'#!/bin/sh\necho "$@" >> {called}\ncase "$*" in *pgqueuer*) exit 1; esac\n'
        )
        file.chmod(0o755)
    done = subprocess.run(
        ["sh", BENCH / "install_peers.sh", tmp_path],
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == (
        f"PgQueuer cannot be installed and is left out: see {tmp_path / 'install.log'}\n"
    )
    asked = called.read_text()
    for package in ("procrastinate", "awa-pg", "graphile-worker", "pg-boss"):
        assert package in asked


# Latency


@pytest.mark.parametrize("name", [scene_latency.OURS, scene_latency.LOOP])
def test_the_delay_of_every_task_is_measured(
    bench_server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene_latency, "SETTLED", 0)
    contestant, produce = scene_latency.producers()[name]
    delays = scene_latency.trickle(bench_server, contestant, produce, 5)
    assert len(delays) == 5
    assert delays[0] > 0


def test_the_bar_of_latency_is_the_ratio_of_the_medians() -> None:
    rows = [
        Row(f"{name}, p50", numbers, "ms")
        for name, numbers in (("pgsched", [3.0, 2.0]), ("LISTEN + claim loop", [2.0, 2.0]))
    ]
    [bar] = scene_latency.bars(rows)
    assert (bar.measured.median, bar.limit, bar.met) == (1.25, 1.5, True)


# Plots


def test_each_scene_that_was_measured_is_drawn(tmp_path: Path) -> None:
    sample = {"tasks": 100, "seconds": 0.5, "server_us": 1.0, "client_us": 1.0}
    rows = [
        {"scene": "drain", "name": "pgsched", "unit": "tasks/s", "samples": [sample] * 3},
        {"scene": "drain", "name": "P & B", "unit": "tasks/s", "samples": [sample]},
        {"scene": "pinned", "name": "B: claim", "unit": "ms", "samples": [0.5, 0.25, 1.0]},
        {"scene": "sql", "name": "B", "unit": "tasks/s", "samples": [sample]},
    ]
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"full": True, "rows": rows}))
    folder = tmp_path / "plots"
    done = CliRunner().invoke(plot.main, [str(file), "--to", str(folder)])
    assert done.exit_code == 0, done.output
    assert {"drain.svg", "pinned.svg"} == {each.name for each in folder.iterdir()}
    command = "python bench/bench.py --full --out run.json && python bench/plot.py run.json"
    for scene, texts in (
        ("drain", ["pgsched", "P & B", "200", command]),
        ("pinned", ["B: claim", "0.50", command]),
    ):
        drawn = ElementTree.parse(folder / f"{scene}.svg")
        assert set(texts) <= {element.text for element in drawn.iter()}
