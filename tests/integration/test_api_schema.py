"""Requests that the OpenAPI allows, and some that it forbids, to a real api-server: the answers are as it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.message import Message, Origin
from tests.databases import fresh_database
from tests.integration.api_server import ApiServer
from tests.selective_auth import OPEN_DAG

#: Requests to each operation, of each kind.
EXAMPLES = 12
CONN_ID = "fuzzed"
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
KNOWN_IDS = [f"known {n}" for n in range(20)]


@pytest.fixture(params=["sqlite", "postgresql"])
def fuzzed(request: pytest.FixtureRequest, api_server: ApiServer) -> Iterator[ApiServer]:
    """A server with a connection whose ledger contains messages."""
    if request.param == "sqlite":
        _fill(api_server, f"sqlite:///{api_server.folder / 'fuzzed.db'}")
        yield api_server
    else:
        with fresh_database() as url:
            _fill(api_server, url)
            yield api_server


def _fill(server: ApiServer, url: str) -> None:
    # The server reads a connection again only after a while, so that each database has its own.
    server.define(_conn_id(url), conn_type="delay", extra={"ledger_url": url})
    origin = Origin(dag_id=OPEN_DAG, run_id="manual__1", task_id="t")
    ledger = Ledger(url)
    ledger.migrate()
    with EmbeddedBroker(ledger) as broker:
        due = broker.clock.now() + timedelta(hours=1)
        broker.schedule(
            [
                Message(id=each, channel="invoices", payload=b"{}", deliver_at=due, origin=origin if n % 2 else None)
                for n, each in enumerate(KNOWN_IDS)
            ]
        )


def _conn_id(url: str) -> str:
    return f"{CONN_ID}_{url.partition(':')[0].partition('+')[0]}"


@pytest.mark.timeout(180)
def test_no_request_gets_an_answer_that_the_openapi_does_not_describe(
    fuzzed: ApiServer, request: pytest.FixtureRequest
) -> None:
    """B47, B48"""
    conn_id = f"{CONN_ID}_{request.node.callspec.params['fuzzed']}"
    with fuzzed.client("admin") as client:
        schema = schemathesis.openapi.from_dict(client.get("openapi.json").json())
        schema.config.update(base_url=f"{fuzzed.base_url}/delay")
        headers = {name: client.headers[name] for name in ("authorization", "x-requested-with")}
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:
            sent = _send(
                operation, mode, conn_id, {name: headers[name] for name in ("authorization", "x-requested-with")}
            )
            # Some operations have nothing to violate.
            assert sent > 0 or mode is GenerationMode.NEGATIVE, operation.label


def _send(operation: APIOperation, mode: GenerationMode, conn_id: str, headers: dict[str, str]) -> int:
    sent = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), is_known=st.booleans())
    def send(case: Case, is_known: bool) -> None:
        _aim(case, conn_id, is_known=is_known)
        nonlocal sent
        sent += 1
        response = case.call(headers=headers)
        case.validate_response(response, checks=CHECKS)

    send()
    return sent


def _aim(case: Case, conn_id: str, *, is_known: bool) -> None:
    """Let most requests reach the ledger, and half of those about one message find one."""
    if not isinstance(case.body, dict) and isinstance(case.query, dict):
        case.query["conn_id"] = conn_id
    if isinstance(case.body, dict):
        case.body["conn_id"] = conn_id
        if is_known and "/actions/" in case.operation.path:
            case.body.pop("filter", None)
            case.body["ids"] = KNOWN_IDS[:3]
    for name, value in (case.path_parameters or {}).items():
        # Airflow's own router answers paths with line breaks; they do not reach this application.
        is_id = is_known and name == "message_id"
        case.path_parameters[name] = KNOWN_IDS[0] if is_id else re.sub("\n|%0A", "", str(value), flags=re.IGNORECASE)
