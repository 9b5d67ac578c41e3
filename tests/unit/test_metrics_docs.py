"""The page on metrics, the alerts and the dashboard name the metrics that a running dispatcher and Airflow have."""

from __future__ import annotations

import ast
import json
import re
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from airflow_delay_provider import metrics
from airflow_delay_provider.brokers.ledger import scheduling
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import SystemClock, floor_ms
from airflow_delay_provider.domain.exceptions import BrokerError
from airflow_delay_provider.domain.message import Message
from tests.unit.cli.commandline import parser
from tools.servers.component import wait_for

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "metrics.md").read_text()
#: Meaning, Prometheus, Airflow, alert.
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.partition("|---|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
]
RULES: list[dict[str, Any]] = yaml.safe_load((DOCS / "monitoring" / "alert-rules.yaml").read_text())["groups"][0][
    "rules"
]
DASHBOARD: dict[str, Any] = json.loads((DOCS / "monitoring" / "grafana-dashboard.json").read_text())
EXPRESSIONS = {target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]} | {
    rule["expr"] for rule in RULES
}
#: A metric and what it must match, without labels that Prometheus adds.
SELECTOR = re.compile(r"\b(delay_\w+)(?:\{([^}]*)\})?")
ADDED = {"job", "instance"}


def labels_by_name(cells: list[str]) -> dict[str, set[str]]:
    """The names of one column and their labels, written as ``name{label,label}``."""
    found = [re.fullmatch(r"`([\w.]+)(?:\{([\w,]+)\})?`", cell) for cell in cells if cell]
    assert None not in found, cells
    return {match[1]: set(match[2].split(",")) if match[2] else set() for match in found if match}


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What ``/metrics`` shows after a dispatch and a failure."""

    def refuse(conn_id: str) -> EmbeddedBroker:
        raise BrokerError(f"{conn_id} cannot be reached")

    ledger = Ledger(f"sqlite:///{tmp_path_factory.mktemp('ledger') / 'ledger.db'}")
    now = SystemClock().now()
    # Stored without a broker, which would dispatch a due message itself.
    for channel, destination in (("here", None), ("there", "mq")):
        due = Message(channel=channel, payload=b"", deliver_at=now)
        ledger.transact(
            scheduling.insert, [due], destination=destination, on_conflict=OnConflict.FAIL, now_ms=floor_ms(now)
        )
    dispatcher = Dispatcher(ledger, open_broker=refuse, config=DispatcherConfig(health_port=0))
    dispatcher.start()

    def read() -> str:
        with urllib.request.urlopen(f"{dispatcher.health_url}/metrics") as response:
            text: str = response.read().decode()
        return text

    try:
        yield wait_for(
            lambda: (
                'delay_dispatched_total{channel="here"} 1.0' in (text := read())
                and 'delay_loop_healthy{loop="dispatch_to_brokers:mq"} 0.0' in text
                and "delay_dispatchers 1.0" in text
                and text
            ),
            what="a dispatch, a failure and a heartbeat in /metrics",
            seconds=60,
            interval=0.05,
        )
    finally:
        assert dispatcher.stop()


@pytest.fixture(scope="module")
def samples(exposed: str) -> dict[str, list[dict[str, str]]]:
    """The labels of each sample, by its name."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(exposed):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_the_table_has_the_metrics_of_a_running_dispatcher_with_their_labels(exposed: str) -> None:
    """B38, B39, B40, B41"""
    shown = {name.removesuffix("_total"): labels for name, labels in labels_by_name([row[1] for row in ROWS]).items()}
    families = [each for each in text_string_to_metric_families(exposed) if not each.name.endswith("_created")]
    assert shown == {
        family.name: {label for sample in family.samples for label in sample.labels} - {"le"} for family in families
    }
    assert all(family.documentation for family in families)


def test_a_counter_is_named_with_its_unit_and_total(exposed: str) -> None:
    names = labels_by_name([row[1] for row in ROWS])
    counters = {f"{each.name}_total" for each in text_string_to_metric_families(exposed) if each.type == "counter"}
    assert counters == {name for name in names if name.endswith("_total")} != set()


def test_the_table_has_the_metrics_that_airflow_gets_with_their_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """B38, B39, B40, B41"""
    sent: dict[str, set[str]] = {}
    monkeypatch.setattr(metrics, "_emit", lambda _how, name, _value, **tags: sent.update({name: set(tags)}))
    metrics.AirflowMetrics().scheduled(1, channel="c")
    metrics.AirflowMetrics().dispatched({"c": 1}, [3.0])
    metrics.AirflowMetrics().failed("LedgerError")
    assert labels_by_name([row[2] for row in ROWS]) == sent
    source = ast.parse(Path(metrics.__file__).read_text())
    texts = [node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert {text for text in texts if re.fullmatch(r"delay\.\w+", text)} == set(sent)


def test_the_table_names_every_alert_beside_a_metric_of_its_expression() -> None:
    beside = {
        alert: row[1].strip("`").partition("{")[0] for row in ROWS for alert in re.findall(r"`(Delay\w+)`", row[3])
    }
    assert beside.keys() == {rule["alert"] for rule in RULES}
    assert [rule["alert"] for rule in RULES if beside[rule["alert"]] not in rule["expr"]] == []


@pytest.mark.parametrize("expression", sorted(EXPRESSIONS))
def test_an_expression_selects_samples_that_exist(expression: str, samples: dict[str, list[dict[str, str]]]) -> None:
    selectors = SELECTOR.findall(expression)
    assert selectors
    for name, matchers in selectors:
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
        assert any(wanted.items() <= labels.items() for labels in samples[name]), (name, wanted)
    grouped = {label for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for label in labels.split(", ")}
    known = {label for name, _ in selectors for labels in samples[name] for label in labels}
    assert grouped <= known | ADDED


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_names_commands_that_help(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"].endswith(".")
    commands = re.findall(r"`airflow (delay [^`]*)`", rule["annotations"]["remedy"])
    assert commands
    for command in commands:
        parser().parse_args(shlex.split(command))


def test_the_dashboard_asks_for_its_data_source_and_shows_what_operators_need() -> None:
    variables = {each["name"]: each["type"] for each in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "job": "query"}
    uids = re.findall(r'"uid": "([^"]*)"', json.dumps(DASHBOARD["panels"]))
    assert set(uids) == {"${datasource}"}
    titles = {panel["title"] for panel in DASHBOARD["panels"]}
    assert titles >= {
        "Scheduled",
        "Dispatched per second",
        "Lateness",
        "Overdue",
        "Dead letters",
        "Errors per minute",
        "Dispatchers up",
        "Held channels",
    }
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all('job=~"$job"' in target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])
