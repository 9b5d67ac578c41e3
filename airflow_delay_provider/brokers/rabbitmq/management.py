"""The broker's management API, for what AMQP cannot say: policies, bindings, and queues that need a nudge."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow_delay_provider.exceptions import BrokerError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig

log = logging.getLogger(__name__)

#: Queues that dead-letter at least once, behind the names of a namespace.
_PASSING_ON = r"\.(.+\.)?(rung|relay|feed|parking)(\..*)?$"


def list_all(config: RabbitMQConfig, kind: str) -> list[dict[str, Any]]:
    """Return all objects of a kind in the connection's vhost."""
    found: list[dict[str, Any]] = _ask(config, "GET", kind)
    return found


def list_queues(config: RabbitMQConfig) -> list[dict[str, Any]]:
    """Return all queues with the totals of their messages, also of those that they are passing on, seconds old."""
    found: list[dict[str, Any]] = _ask(
        config, "GET", "queues", query={"disable_stats": "true", "enable_queue_totals": "true"}
    )
    return found


def list_bindings(config: RabbitMQConfig, exchange: str) -> list[dict[str, Any]]:
    """Return where an exchange leads to."""
    found: list[dict[str, Any]] = _ask(config, "GET", "exchanges", exchange, "bindings", "source")
    return found


def applied(policies: list[dict[str, Any]], queue: str, queue_type: str) -> dict[str, Any]:
    """Return what the one policy sets that RabbitMQ applies to a queue: of those that match, the first in priority.

    The server could be asked for it, but leaves it out where its statistics are switched off.
    """
    targets = ("all", "queues", f"{queue_type}_queues")
    matching = [each for each in policies if each["apply-to"] in targets and re.search(each["pattern"], queue)]
    definition: dict[str, Any] = max(matching, key=lambda each: each["priority"])["definition"] if matching else {}
    return definition


def held_messages(config: RabbitMQConfig) -> dict[str, int]:
    """Return how many messages each queue holds that have expired and that the next queue does not have yet.

    The broker brings its counts up to date every few seconds.
    """
    return {
        each["name"]: held
        for each in list_queues(config)
        if (held := each.get("messages", 0) - each.get("messages_ready", 0) - each.get("messages_unacknowledged", 0))
        > 0
    }


def wake_queues(config: RabbitMQConfig) -> bool:
    """Let quorum queues pass on at once what had no route before; say whether that was possible.

    A queue whose messages found no route, as happens while a broker starts, tries again after 180 s by default, and
    what expires behind them waits as long. Any change of its policy makes it try those at once, so a policy that
    changes nothing that matters here comes and goes. What the next queue refused or did not confirm waits nevertheless.
    """
    if config.management_url is None:
        return False
    root = config.topology.root
    name = f"{root}.nudge"
    nudge = {
        "pattern": f"^{re.escape(root)}{_PASSING_ON}",
        "definition": {"delivery-limit": 1_000_000},
        "priority": 1000,
        "apply-to": "queues",
    }
    try:
        _ask(config, "PUT", "policies", name, content=nudge)
        _ask(config, "DELETE", "policies", name)
    except BrokerError as error:
        log.warning("The queues of the ladder were not woken, so some messages may come later: %s", error)
        return False
    return True


def _ask(
    config: RabbitMQConfig,
    method: str,
    kind: str,
    *names: str,
    content: Any = None,
    query: dict[str, str] | None = None,
) -> Any:
    import httpx

    path = "/".join(quote(part, safe="") for part in (kind, config.vhost, *names))
    url = f"{config.management_url}".rstrip("/") + f"/api/{path}"
    try:
        answer = httpx.request(method, url, json=content, params=query, timeout=config.connect_seconds)
        answer.raise_for_status()
        return answer.json() if answer.content else None
    except (httpx.HTTPError, ValueError) as error:
        reason = f"{error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else type(error).__name__
        raise BrokerError(f"management_url: {config.name} does not answer there ({reason}); correct it") from None
