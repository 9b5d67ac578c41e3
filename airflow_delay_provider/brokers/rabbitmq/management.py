"""The broker's management API, for what AMQP cannot say: policies, bindings, and queues that need a nudge."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow_delay_provider.brokers.rabbitmq.topology import VERSION
from airflow_delay_provider.exceptions import BrokerError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig

log = logging.getLogger(__name__)

_NUDGE = f"{VERSION}.nudge"
#: Queues that dead-letter at least once.
_PASSING_ON = r"^delay\.v1\..+\.(rung|relay|feed)(\..*)?$"


def list_all(config: RabbitMQConfig, kind: str) -> list[dict[str, Any]]:
    """Return all objects of a kind in the connection's vhost."""
    found: list[dict[str, Any]] = _ask(config, "GET", kind)
    return found


def wake_queues(config: RabbitMQConfig) -> bool:
    """Let quorum queues pass on at once what they could not pass on before; say whether that was possible.

    A queue whose messages found no way on, as happens while a broker starts, tries again after 180 s by default, and
    what expires behind them waits as long. Any change of its policy makes it begin anew, so a policy that changes
    nothing that matters here comes and goes.
    """
    if config.management_url is None:
        return False
    nudge = {
        "pattern": _PASSING_ON,
        "definition": {"delivery-limit": 1_000_000},
        "priority": 1000,
        "apply-to": "queues",
    }
    try:
        _ask(config, "PUT", "policies", _NUDGE, nudge)
        _ask(config, "DELETE", "policies", _NUDGE)
    except BrokerError as error:
        log.warning("The queues of the ladder were not woken, so some messages may come later: %s", error)
        return False
    return True


def _ask(config: RabbitMQConfig, method: str, kind: str, name: str | None = None, content: Any = None) -> Any:
    import httpx

    path = "/".join(quote(part, safe="") for part in (kind, config.vhost, name) if part is not None)
    url = f"{config.management_url}".rstrip("/") + f"/api/{path}"
    try:
        answer = httpx.request(method, url, json=content, timeout=config.connect_seconds)
        answer.raise_for_status()
        return answer.json() if answer.content else None
    except (httpx.HTTPError, ValueError) as error:
        reason = f"{error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else type(error).__name__
        raise BrokerError(f"management_url: {config.name} does not answer there ({reason}); correct it") from None
