"""Alerts, their runbook and the dashboard: against the documented metrics, which test_docs.py holds
against the code, and against Prometheus' own promtool."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from promtool import promtool
from test_docs import METRICS, ROOT, anchors, code, fenced, headings, prose, read, section, table

from pgsched.cli import main

RUNBOOK = ROOT / "docs" / "runbook.md"
PROMETHEUS = ROOT / "docs" / "prometheus"
DASHBOARD = json.loads(read(ROOT / "docs" / "grafana" / "pgsched.json"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}

TARGET = {"job", "instance"}
"""Labels that Prometheus adds to what it scrapes."""
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}


class Alert(NamedTuple):
    """What the rule file says of an alert."""

    name: str
    expr: str
    rest: str


ALERTS = [
    Alert(*match)
    for match in re.findall(
        r"^ {6}- alert: (\w+)\n(?: {8}#.*\n)*? {8}expr: \|\n((?: {10}.*\n)+)((?: {8}.*\n)+)",
        read(PROMETHEUS / "alerts.yml"),
        re.MULTILINE,
    )
]


class Exported(NamedTuple):
    """The labels of a series, and the values that a label may have, where these are few."""

    labels: set[str]
    values: set[str]


def exported() -> dict[str, Exported]:
    """What a worker's page has, and what Prometheus adds, by name."""
    values = {
        (*code(row["Label"]),): set(code(row["Values"]))
        for row in table(section(METRICS, "Labels"), "Label")
    }
    series = {
        "up": Exported(TARGET, set()),
        "ALERTS": Exported({"alertname", "alertstate", *TARGET}, {"firing"}),
    }
    for row in table(prose(METRICS), "Metric"):
        [name] = code(row["Metric"])
        few = values["outcome",] if "outcome" in code(row["Labels"]) else set()
        for suffix in SUFFIXES.get(row["Type"], ("",)):
            labels = {*code(row["Labels"]), *TARGET, *({"le"} if suffix == "_bucket" else ())}
            series[name + suffix] = Exported(labels, values.get(("status", name), few))
    return series


EXPORTED = exported()


def shown(expr: str) -> str:
    """An expression of the dashboard, as Grafana sends it when everything is selected."""
    for name in ("job", "queue", "task_type"):
        expr = expr.replace(f"${name}", VARIABLES[name]["allValue"])
    return expr.replace("$__rate_interval", "5m").replace("$__range", "1h")


PANEL_EXPRESSIONS = {
    f"{panel['id']}, {panel['title']}, {target['refId']}": shown(target["expr"])
    for panel in PANELS
    for target in panel["targets"]
}
EXPRESSIONS = {
    **{alert.name: alert.expr for alert in ALERTS},
    **PANEL_EXPRESSIONS,
    **{each["name"]: shown(each["expr"]) for each in DASHBOARD["annotations"]["list"]},
    **{
        f"variable {name}": shown(match[1])
        for name, variable in VARIABLES.items()
        if (match := re.fullmatch(r"label_values\((.*), \w+\)", variable.get("definition", "")))
    },
    **{f"runbook: {block}": block for block in fenced(RUNBOOK, "promql")},
}


def test_there_is_something_to_look_at() -> None:
    assert len(ALERTS) == read(PROMETHEUS / "alerts.yml").count("alert:") > 10
    assert len(PANELS) > 20
    assert len(EXPRESSIONS) > len(ALERTS) + len(PANELS) + len(VARIABLES)


@pytest.mark.parametrize("expr", EXPRESSIONS.values(), ids=list(EXPRESSIONS))
def test_an_expression_uses_what_is_exported(expr: str) -> None:
    selectors = re.findall(r"\b((?:pgsched_\w|up\b|ALERTS\b)\w*)(?:\{([^}]*)\})?", expr)
    assert selectors
    known: set[str] = set()
    for name, matchers in selectors:
        assert name in EXPORTED
        known |= EXPORTED[name].labels
        for label, values in re.findall(r'(\w+)[=!]~?"([^"]*)"', matchers):
            assert label in EXPORTED[name].labels
            if label in ("outcome", "status", "alertstate"):
                assert set(values.split("|")) <= EXPORTED[name].values
    groupings = re.findall(r"\b(?:by|on|without|ignoring|group_left) ?\(([^)]*)\)", expr)
    assert {label for each in groupings for label in each.split(", ")} <= known


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_says_how_bad_it_is_what_happened_and_what_to_do(alert: Alert) -> None:
    keys = ["for", "labels", "annotations"]
    assert re.findall(r"^ {8}(\w+):", alert.rest, re.MULTILINE) == keys
    assert re.findall(r"severity: (\w+)", alert.rest)[0] in ("critical", "warning")
    assert re.findall(r"^ {10}(\w+):", alert.rest, re.MULTILINE) == [
        "severity",
        "summary",
        "description",
        "runbook_url",
    ]
    assert f"runbook_url: docs/runbook.md#{alert.name.lower()}\n" in alert.rest


def test_every_alert_has_its_section_in_the_runbook_and_the_reverse() -> None:
    described = [heading for heading in headings(RUNBOOK) if heading.startswith("Pgsched")]
    assert described == [alert.name for alert in ALERTS]
    assert {alert.name.lower() for alert in ALERTS} <= set(anchors(RUNBOOK))


def test_the_runbook_calls_commands_that_exist() -> None:
    called = set(re.findall(r"(?:^|`)pgsched ([a-z]+)", read(RUNBOOK), re.MULTILINE))
    assert {"doctor", "retry"} <= called <= set(main.commands)


def test_every_alert_is_tested_both_ways() -> None:
    files = sorted(PROMETHEUS.glob("*_test.yml"))
    tests = "".join(map(read, files))
    pattern = (
        r"^ {6}- (?:\{alertname: (\w+), eval_time: \w+\}$|alertname: (\w+)\n.*\n +exp_alerts:)"
    )
    quiet, firing = zip(*re.findall(pattern, tests, re.MULTILINE), strict=True)
    names = {alert.name for alert in ALERTS}
    assert set(filter(None, quiet)) == names
    assert set(filter(None, firing)) == names


def test_every_metric_is_on_the_dashboard() -> None:
    expressions = " ".join(PANEL_EXPRESSIONS.values())
    for row in table(prose(METRICS), "Metric"):
        [name] = code(row["Metric"])
        assert re.search(rf"\b{name}(?:_bucket|_count)?\b", expressions), name


def test_every_panel_has_a_title_a_description_queries_and_a_place_of_its_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        here = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert here, panel["title"]
        assert not here & taken, panel["title"]
        assert max(x for x, _ in here) < 24, panel["title"]
        taken |= here
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert [target["refId"] for target in panel["targets"]], panel["title"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


def found(value: Any, key: str) -> Iterator[Any]:
    """What stands under this key, anywhere."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from found(each, key)


def test_the_dashboard_goes_by_its_variables() -> None:
    assert list(VARIABLES) == ["datasource", "job", "queue", "task_type"]
    sources = list(found(DASHBOARD, "datasource"))
    assert len(sources) >= len(PANELS)
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    for expr in found(DASHBOARD, "expr"):
        assert set(re.findall(r"\$(\w+)", expr)) <= {*VARIABLES, "__rate_interval", "__range"}
        for selector in re.findall(r"pgsched_\w+\{([^}]*)\}", expr):
            assert 'job=~"$job"' in selector
            assert ("queue" in selector) == ('queue=~"$queue"' in selector)


@pytest.mark.promtool
def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool(
        "check", "rules", PROMETHEUS / "alerts.yml"
    )


@pytest.mark.promtool
@pytest.mark.parametrize("path", sorted(PROMETHEUS.glob("*_test.yml")), ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_else_not(path: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", path)


@pytest.mark.promtool
def test_prometheus_takes_the_configuration_of_the_runbook(tmp_path: Path) -> None:
    [configuration] = fenced(RUNBOOK, "yaml")
    (tmp_path / "prometheus.yml").write_text(configuration)
    shutil.copy(PROMETHEUS / "alerts.yml", tmp_path)
    assert f"{len(ALERTS)} rules found" in promtool("check", "config", tmp_path / "prometheus.yml")


@pytest.mark.promtool
def test_prometheus_reads_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"n:{i}", "expr": expr} for i, expr in enumerate(EXPRESSIONS.values())]
    groups = {"groups": [{"name": "expressions", "rules": rules}]}
    (tmp_path / "rules.yml").write_text(json.dumps(groups))  # JSON is YAML
    assert f"{len(rules)} rules found" in promtool("check", "rules", tmp_path / "rules.yml")


@pytest.mark.promtool
def test_every_panel_shows_something_when_there_is_something(tmp_path: Path) -> None:
    """With all metrics of one worker: an empty answer, or NaN, would be a panel without data."""
    test = {
        "interval": "1m",
        "input_series": list(a_worker()),
        "promql_expr_test": [
            {
                "expr": f"count(({expr}) == ({expr})) > bool 0",
                "eval_time": "90m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
            for expr in PANEL_EXPRESSIONS.values()
        ],
    }
    (tmp_path / "test.yml").write_text(json.dumps({"tests": [test]}))
    promtool("test", "rules", tmp_path / "test.yml")


def a_worker() -> Iterator[dict[str, str]]:
    """Two hours of every documented metric."""
    labels = {"job": "app", "instance": "a", "queue": "mail", "task_type": "send"}
    for name, (names, values) in EXPORTED.items():
        few = names & {"outcome", "status"}
        for value in sorted(values) if few else [""]:
            for le in ("0.5", "+Inf") if "le" in names else [""]:
                its = {**labels, **dict.fromkeys(few, value), "le": le}
                text = ", ".join(f'{label}="{its[label]}"' for label in sorted(names & set(its)))
                counts = re.search("_(total|bucket|sum|count)$", name)
                yield {"series": f"{name}{{{text}}}", "values": "1+1x120" if counts else "1x120"}
