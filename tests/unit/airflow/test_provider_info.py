"""The description of this package that Airflow reads."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pkgutil import resolve_name
from typing import Any

import jsonschema
import pytest

from airflow_delay_provider.get_provider_info import get_provider_info


@pytest.fixture
def info() -> dict[str, Any]:
    return get_provider_info()


def test_it_has_the_form_that_airflow_demands(info: dict[str, Any]) -> None:
    schema = json.loads(files("airflow").joinpath("provider_info.schema.json").read_text())
    jsonschema.validate(info, schema)
    assert set(info) <= set(schema["properties"])
    json.dumps(info)


def test_everything_it_names_can_be_imported(info: dict[str, Any]) -> None:
    for kind in ("hooks", "operators", "sensors", "triggers"):
        for entry in info[kind]:
            for module in entry["python-modules"]:
                import_module(module)
    names = [
        *info["extra-links"],
        *info["cli"],
        *(entry["class-name"] for entry in info["task-decorators"]),
        *(entry["hook-class-name"] for entry in info["connection-types"]),
    ]
    assert all(callable(resolve_name(name)) for name in names)


# Airflow's own providers still import what it has deprecated.
@pytest.mark.filterwarnings("ignore::airflow.utils.deprecation_tools.DeprecatedImportWarning")
def test_airflow_discovers_it() -> None:
    from airflow.providers_manager import ProvidersManager
    from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

    known, running = ProvidersManager(), ProvidersManagerTaskRuntime()
    assert known.providers["airflow-delay-provider"].version == version("airflow-delay-provider")
    assert "airflow_delay_provider.links.DelayedMessageLink" in known.extra_links_class_names
    assert "schedule_message" in dict(running.taskflow_decorators)
    for conn_type in ("delay", "rabbitmq", "delay_kafka"):
        hook = running.hooks[conn_type]
        assert hook is not None
        assert hook.connection_testable
        made = resolve_name(hook.hook_class_name)
        assert (made.conn_type, made.hook_name) == (conn_type, hook.hook_name)
        assert made().delay_conn_id == made.default_conn_name == f"{conn_type}_default"


# The names with dots are those of Kafka's client library.
@pytest.mark.filterwarnings("ignore::airflow.utils.deprecation_tools.DeprecatedImportWarning")
def test_airflow_offers_every_field_of_a_connection_by_its_name_in_the_extra(info: dict[str, Any]) -> None:
    """A21"""
    from airflow.api_fastapi.core_api.services.ui.connections import HookMetaService

    offered = {each.connection_type: each for each in HookMetaService.hook_meta_data()}
    for entry in info["connection-types"]:
        form = offered[entry["connection-type"]]
        assert form.hook_name == entry["hook-name"]
        assert form.extra_fields is not None
        assert form.extra_fields.keys() == entry["conn-fields"].keys()
    kafka = offered["delay_kafka"]
    assert kafka.standard_fields is not None
    assert kafka.standard_fields.host is not None
    assert kafka.standard_fields.host.placeholder == "kafka1:9092,kafka2:9092"
    assert {"security.protocol", "sasl.mechanism", "ssl.ca.location"} <= (kafka.extra_fields or {}).keys()


def test_the_settings_have_working_defaults() -> None:
    from airflow.sdk.configuration import conf

    assert conf.getfloat("delay", "journal_poll_interval") == 0.2
    assert conf.getint("delay", "sensor_max_bytes") == 16 * 2**20
    assert conf.getint("delay", "dispatcher_batch") == 1000
    assert conf.getfloat("delay", "dispatcher_poll_interval") == 0.02
    assert conf.getfloat("delay", "dispatcher_rate_limit") == 0
    assert conf.getint("delay", "dispatcher_health_port") == 8795
    assert conf.getfloat("delay", "retention_days") == 30
    assert conf.getfloat("delay", "spark_submissions_per_second") == 1
    assert conf.getint("delay", "spark_submission_burst") == 5
    assert conf.get("delay", "ledger_url") == ""
    for name in ("index_connections", "kafka_connections", "dispatcher_instance"):
        assert conf.get("delay", name) == ""


def test_reading_it_imports_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; from airflow_delay_provider.get_provider_info import get_provider_info; get_provider_info();"
        "print({name.partition('.')[0] for name in sys.modules} & {'airflow', 'sqlalchemy', 'alembic', 'pydantic'})"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed == "set()\n"
