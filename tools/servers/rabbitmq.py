from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pika
import pika.exceptions

from tools.servers import process
from tools.servers.component import Component, ComponentDiedError, stop_all, wait_for
from tools.servers.rabbitmq_distribution import SCRIPTS, Programs, installed_programs, newer_programs
from tools.servers.sessions import Guardian

START_SECONDS = 180
#: How long a quorum queue waits before it dead-letters again what had no route, while the broker was starting for
#: example. By default 180 s, which no test should wait.
SOON_DEAD_LETTERED_AGAIN = "[{rabbit, [{dead_letter_worker_publisher_confirm_timeout, 3000}]}]."


class RabbitMQ:
    """A private node: own name, ports, data, cookie and epmd, so that any number can run side by side."""

    name = "rabbitmq"
    variable = "DELAY_TEST_RABBITMQ_URL"
    management_variable = "DELAY_TEST_RABBITMQ_MANAGEMENT_URL"

    def __init__(
        self, settings: Mapping[str, str] | None = None, *, advanced: str = "", folder: str | None = None
    ) -> None:
        self.port = 0
        self.management_port = 0
        self._settings = dict(settings or {})
        #: Erlang terms, for options that ``settings`` cannot express.
        self._advanced = advanced or "[]."
        self._folder = folder or self.name
        self._programs = Programs()
        self._home: Path | None = None
        self._guardian: Guardian | None = None
        self._node: Component | None = None
        self._epmd: Component | None = None
        self._env: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2F"

    @property
    def management_url(self) -> str:
        return f"http://guest:guest@127.0.0.1:{self.management_port}"

    def start(self, run_dir: Path) -> None:
        self._programs = self._find_programs(run_dir / self._folder)
        self._home = run_dir / self._folder
        self._home.mkdir(parents=True)
        log_dir = run_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        self._guardian = Guardian()
        for _ in range(3):  # another run may take a free port between our look and our start
            self._write_configuration(log_dir)
            epmd = self._programs.command("epmd", "-address", "127.0.0.1", "-port", self._env["ERL_EPMD_PORT"])
            self._epmd = self._component(f"{self._folder}-epmd", epmd, log_dir)
            self._node = self._component(self._folder, self._programs.script("rabbitmq-server"), log_dir)
            self._epmd.start()
            self._node.start()
            if self._is_up():
                return
            stop_all([self._node, self._epmd])
        raise RuntimeError(f"RabbitMQ did not start; see {log_dir / self._folder}.log")

    def env(self) -> dict[str, str]:
        return {self.variable: self.url, self.management_variable: self.management_url}

    def stop(self) -> None:
        stop_all(component for component in (self._node, self._epmd) if component is not None)
        if self._guardian is not None:
            self._guardian.stop()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)

    def kill(self) -> None:
        """Kill -9 the node."""
        assert self._node is not None
        self._node.kill()

    def start_again(self) -> None:
        """Start the killed node on its own data; return once it accepts connections."""
        assert self._node is not None
        self._node.start()
        if not self._is_up():
            raise RuntimeError(f"RabbitMQ did not start again; see {self._node.log}")

    def control(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` on this node and return what it printed."""
        command = self._programs.script("rabbitmqctl", "--quiet", *arguments)
        done = subprocess.run(
            command, env=self._env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    @property
    def pids(self) -> list[int]:
        """The processes of the node, whose CPU time is the broker's."""
        assert self._node is not None
        return self._node.pids()

    def _find_programs(self, home: Path) -> Programs:  # noqa: ARG002 - other versions see parts of this machine only
        return installed_programs(variable=self.variable)

    def _component(self, name: str, command: list[str], log_dir: Path) -> Component:
        assert self._guardian is not None
        return Component(name, command, log_dir=log_dir, env=self._env, guardian=self._guardian)

    def _is_up(self) -> bool:
        assert self._node is not None
        try:
            wait_for(self._accepts, what="RabbitMQ accepts", seconds=START_SECONDS, components=[self._node])
        except (TimeoutError, ComponentDiedError):
            return False
        return True

    def _accepts(self) -> bool:
        try:
            pika.BlockingConnection(pika.URLParameters(f"{self.url}?socket_timeout=5")).close()
        except (pika.exceptions.AMQPError, OSError):
            return False
        return True

    def _write_configuration(self, log_dir: Path) -> None:
        assert self._home is not None
        home = self._home
        self.port, self.management_port = process.free_port(), process.free_port()
        settings = {
            "listeners.tcp.1": f"127.0.0.1:{self.port}",
            "management.tcp.ip": "127.0.0.1",
            "management.tcp.port": str(self.management_port),
            # Statistics cost as much CPU as messages do; policies and bindings are shown without them.
            "management_agent.disable_metrics_collector": "true",
            "log.file.level": "warning",
            **self._settings,
        }
        (home / "rabbitmq.conf").write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        (home / "advanced.config").write_text(f"{self._advanced}\n")
        (home / "enabled_plugins").write_text("[rabbitmq_management].\n")
        cookie = home / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text(secrets.token_hex(16))
            cookie.chmod(0o400)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ", "ERL"))}
        self._env = inherited | {
            "HOME": str(home),
            "RABBITMQ_NODENAME": f"delay-{secrets.token_hex(4)}@localhost",
            "RABBITMQ_DIST_PORT": str(process.free_port()),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(log_dir),
            "RABBITMQ_PID_FILE": str(home / "node.pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(home / "advanced.config"),
            "RABBITMQ_CONF_ENV_FILE": str(home / "no-environment"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(home / "generated"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_PORT": str(process.free_port()),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_CRASH_DUMP": str(home / "erl_crash.dump"),
            "PATH": os.pathsep.join((str(SCRIPTS), os.environ["PATH"], os.defpath)),
        }


class RabbitMQ4(RabbitMQ):
    """A node of the current major version, from a newer Debian in a folder of its own."""

    name = "rabbitmq4"
    variable = "DELAY_TEST_RABBITMQ4_URL"
    management_variable = "DELAY_TEST_RABBITMQ4_MANAGEMENT_URL"

    def _find_programs(self, home: Path) -> Programs:
        return newer_programs(home, variable=self.variable)
