"""The private RabbitMQ nodes that other tests rely on, of each version."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pika
import psutil
import pytest

from tests.rabbits import VERSIONS, private_node, require_rabbitmq
from tools.servers import component, rabbitmq_distribution
from tools.servers.rabbitmq import RabbitMQ4
from tools.servers.server import UnavailableError

#: The one that runs in a root folder of its own.
on_the_newer = pytest.mark.parametrize("rabbitmq_version", ["rabbitmq4"], indirect=True)

wait_for = partial(component.wait_for, seconds=120, interval=0.1)


def mounted_for(run_dir: Path) -> list[str]:
    """What is mounted for the nodes of a run, in the mount namespace of any process."""
    found = []
    for pid in psutil.pids():
        with suppress(OSError):
            found += [line for line in Path(f"/proc/{pid}/mounts").read_text().splitlines() if str(run_dir) in line]
    return found


def running_for(run_dir: Path) -> list[int]:
    """The processes of the nodes of a run."""
    nodes = psutil.process_iter(["environ"])
    return [each.pid for each in nodes if str(run_dir) in (each.info["environ"] or {}).get("RABBITMQ_LOG_BASE", "")]


def test_the_given_server_is_of_the_version_that_its_tests_are_for(rabbitmq_version: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(require_rabbitmq())) as connection:
        version = connection._impl.server_properties["version"]
    major = int(version.partition(".")[0])
    assert major >= 4 if rabbitmq_version == "rabbitmq4" else major == 3


@on_the_newer
def test_a_node_killed_with_minus_nine_comes_back_with_its_data_and_ends_without_a_trace(
    rabbitmq_version: str, tmp_path: Path
) -> None:
    with private_node(tmp_path) as node:
        with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
            amqp = connection.channel()
            amqp.confirm_delivery()
            amqp.queue_declare("kept", durable=True)
            amqp.basic_publish("", "kept", b"kept", pika.BasicProperties(delivery_mode=2), mandatory=True)
        assert "kept" in node.control("list_queues", "name")
        node.kill()
        node.start_again()
        with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
            assert connection.channel().basic_get("kept")[2] == b"kept"
        assert set(node.pids) <= set(running_for(tmp_path))
    assert running_for(tmp_path) == []
    assert mounted_for(tmp_path) == []
    name = VERSIONS[rabbitmq_version].name
    left = {path.name for path in tmp_path.rglob("*")}
    assert {"logs", f"{name}.log", f"{name}-epmd.log"} <= left
    assert all(each == "logs" or each.endswith(".log") for each in left)


@on_the_newer
def test_a_run_that_is_killed_with_minus_nine_leaves_no_process_and_nothing_mounted(
    rabbitmq_version: str, tmp_path: Path
) -> None:
    require_rabbitmq()
    server = VERSIONS[rabbitmq_version]
    command = [sys.executable, "-m", "tools.servers", "--run-dir", str(tmp_path), server.name, "--", "sleep", "600"]
    environment = {name: value for name, value in os.environ.items() if name != server.variable}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert next((line for line in run.stdout if " is up: " in line), "") != ""
        assert running_for(tmp_path) != []
        assert mounted_for(tmp_path) != []
        run.kill()
    wait_for(lambda: not running_for(tmp_path), what="all that the run had started has ended")
    assert mounted_for(tmp_path) == []


def test_a_machine_that_cannot_have_the_newer_version_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rabbitmq_distribution, "find_mirrors", list)
    with pytest.raises(
        UnavailableError, match="let apt-get use a mirror that has one, or set DELAY_TEST_RABBITMQ4_URL"
    ):
        RabbitMQ4().start(tmp_path)
    monkeypatch.setattr(rabbitmq_distribution, "PRIVATE_MOUNTS", ("false",))
    with pytest.raises(UnavailableError, match="be root, or set DELAY_TEST_RABBITMQ4_URL"):
        RabbitMQ4().start(tmp_path)
