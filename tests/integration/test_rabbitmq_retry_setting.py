"""`topology verify` measures how soon a broker tries again what it could not pass on while it started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch
from urllib.parse import urlsplit

import httpx
import pytest

from airflow_delay_provider.brokers.port import TopologyIssue
from airflow_delay_provider.brokers.rabbitmq import verify
from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.verify import find_late_retry
from tests.integration.test_rabbitmq_security import user
from tests.rabbits import config_of, fresh_vhost, private_node, problems, require_management
from tools.servers.component import wait_for

REPOSITORY = Path(__file__).parents[2]
SETTING = "dead_letter_worker_publisher_confirm_timeout, 5000"


@pytest.fixture
def url() -> Iterator[str]:
    """A vhost of a broker with default settings."""
    with fresh_vhost() as url:
        yield url


def measure(url: str) -> list[TopologyIssue]:
    with RabbitMQBroker(config_of(url)) as broker:
        return list(find_late_retry(broker._client.connection()))


def probes_of(url: str) -> list[str]:
    vhost = urlsplit(url).path[1:]
    answers = [httpx.get(f"{require_management()}/api/{kind}/{vhost}", timeout=60) for kind in ("queues", "exchanges")]
    return [each["name"] for answer in answers for each in answer.json() if "probe" in each["name"]]


def require_no_probes(url: str) -> None:
    wait_for(lambda: not probes_of(url), what="nothing of the probe is left", seconds=20)


def test_a_broker_with_default_settings_is_a_problem_because_it_tries_again_after_minutes(url: str) -> None:
    """C12, C14"""
    with patch.object(verify, "LONGEST_RETRY_SECONDS", 5):
        [issue] = measure(url)
    assert issue.is_problem
    assert SETTING in issue.text
    require_no_probes(url)


def test_a_broker_that_tries_again_within_seconds_is_no_problem(tmp_path: Path) -> None:
    """C12, C14: verified as a whole, on a node with the settings of docker-compose.yaml."""
    settings = (REPOSITORY / "docker/rabbitmq/advanced.config").read_text()
    with private_node(tmp_path, advanced=settings) as node, RabbitMQBroker(config_of(node.url)) as broker:
        broker.create_topology()
        assert problems(broker) == []
        assert "probe" not in node.control("list_queues", "name")


def test_an_administrator_of_the_ladder_may_measure_and_others_see_that_it_was_not_measured(url: str) -> None:
    ladder = r"^delay\.v1\..*"
    with (
        patch.object(verify, "LONGEST_RETRY_SECONDS", 0),
        user(url, configure=ladder, write=ladder, read=ladder) as administrator,
    ):
        assert [issue.is_problem for issue in measure(administrator)] == [True]
    with user(url) as stranger:
        [issue] = measure(stranger)
    assert not issue.is_problem
    assert "was not measured" in issue.text
    require_no_probes(url)


def test_a_probe_that_fails_half_way_leaves_nothing_behind(url: str) -> None:
    with patch.object(verify, "_has_arrived", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        measure(url)
    require_no_probes(url)
