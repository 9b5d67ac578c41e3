from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tools.servers import process
from tools.servers.component import Component, ComponentDiedError, wait_for
from tools.servers.kafka_distribution import find_jars, find_java
from tools.servers.sessions import Guardian

START_SECONDS = 180
JVM_OPTIONS = ("-Xms256m", "-Xmx768m", "-XX:+UseSerialGC", "-XX:-UsePerfData")
#: For brokers that live for seconds: the second compiler would take half of their processor time.
QUICK_JVM_OPTIONS = (*JVM_OPTIONS, "-XX:TieredStopAtLevel=1")
CONTROLLER = "CONTROLLER"
PLAIN_LISTENER = {"PLAINTEXT": "PLAINTEXT"}
#: By default a killed broker counts as alive for nine more seconds, and is not let in again before they are over.
SOON_MISSED = {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"}
SETTINGS = {
    "process.roles": "broker,controller",
    "controller.listener.names": CONTROLLER,
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "4",
    "log.retention.check.interval.ms": "5000",
    # By default, retention is first checked after 30 s.
    "log.initial.task.delay.ms": "5000",
}
LOGGING = """\
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c{1}: %m%n
rootLogger.level = INFO
rootLogger.appenderRef.console.ref = console
"""


class Node:
    """One process that is broker and controller, with ports and data of its own."""

    def __init__(self, number: int, name: str, home: Path, ports: Mapping[str, int]) -> None:
        self.number = number
        self.name = name
        self.properties = home / f"{name}.properties"
        self.data = home / f"{name}-data"
        self._ports = ports
        self.component: Component | None = None

    def address(self, listener: str) -> str:
        # The certificates of tests are for names, and this is the name of every machine.
        host = "localhost" if "SSL" in listener else "127.0.0.1"
        return f"{host}:{self._ports[listener]}"

    def write_properties(self, settings: Mapping[str, str]) -> None:
        mine = {
            "node.id": str(self.number),
            "log.dirs": str(self.data),
            "listeners": ",".join(f"{listener}://127.0.0.1:{port}" for listener, port in self._ports.items()),
            "advertised.listeners": ",".join(f"{listener}://{self.address(listener)}" for listener in self._ports),
        }
        self.properties.write_text("".join(f"{name}={value}\n" for name, value in {**mine, **settings}.items()))

    def is_up(self, address: str, cluster_id: str) -> bool:
        """Wait until this node, and no other program at its port, reports that it has joined the cluster."""
        assert self.component is not None
        # The port is closed at first, and a client waits longer and longer between its attempts.
        settings = {"bootstrap.servers": address, "reconnect.backoff.max.ms": 100, "log_level": 0}
        with AdminClient(settings) as client:

            def serves() -> bool:
                try:
                    found = client.list_topics(timeout=1)
                    return found.cluster_id == cluster_id and self.number in found.brokers
                except KafkaException:
                    return False

            try:
                wait_for(serves, what="Kafka serves", seconds=START_SECONDS, components=[self.component], interval=0.1)
            except (TimeoutError, ComponentDiedError):
                return False
        return True


class KafkaCluster:
    """Private nodes, numbered from 1."""

    name = "kafka"
    variable = "DELAY_TEST_KAFKA_BOOTSTRAP"

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        nodes: int = 3,
        listeners: Mapping[str, str] = PLAIN_LISTENER,
        folder: str = "kafka",
        jvm_options: Sequence[str] = JVM_OPTIONS,
    ) -> None:
        self._jvm_options = jvm_options
        self._settings = dict(settings or {})
        self._size = nodes
        #: Listener to security protocol; the nodes speak to each other through the first one, which is plain.
        self._listeners = dict(listeners)
        self._folder = folder
        self._home: Path | None = None
        self._guardian: Guardian | None = None
        self._nodes: list[Node] = []
        self._id = ""

    @property
    def bootstrap(self) -> str:
        return self.bootstrap_of(self._first_listener)

    def bootstrap_of(self, listener: str) -> str:
        """The addresses of all nodes at one listener."""
        return ",".join(node.address(listener) for node in self._nodes)

    @property
    def pids(self) -> list[int]:
        """The processes of the nodes, whose CPU time is the broker's."""
        return [pid for component in self._components() for pid in component.pids()]

    def start(self, run_dir: Path) -> None:
        java = find_java()
        jars = find_jars(java)
        self._home = (run_dir / self._folder).resolve()
        self._home.mkdir(parents=True)
        log_dir = run_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        self._guardian = Guardian()
        program = [str(java), *self._jvm_options, *prepare_jvm(self._home), "-cp", f"{jars}/*"]
        for _ in range(3):  # another run may take a free port between our look and our start
            self._nodes = list(self._plan_nodes(self._home))
            self._format(program, log_dir)
            for node in self._nodes:
                command = [*program, "kafka.Kafka", str(node.properties)]
                node.component = Component(node.name, command, log_dir=log_dir, env=os.environ, guardian=self._guardian)
                node.component.start()
            if all(node.is_up(node.address(self._first_listener), self._id) for node in self._nodes):
                return
            self._kill_all()
        raise RuntimeError(f"Kafka did not start; see {log_dir}/{self._folder}*.log")

    def env(self) -> dict[str, str]:
        return {self.variable: self.bootstrap}

    def stop(self) -> None:
        self._kill_all()  # the data goes too, so an orderly end would save nothing
        if self._guardian is not None:
            self._guardian.stop()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)

    def kill(self, number: int = 1) -> None:
        """Kill -9 a node."""
        component = self._nodes[number - 1].component
        assert component is not None
        component.kill()

    def start_again(self, number: int = 1) -> None:
        """Start a killed node on its own data; return once it serves clients."""
        node = self._nodes[number - 1]
        assert node.component is not None
        node.component.start()
        if not node.is_up(node.address(self._first_listener), self._id):
            raise RuntimeError(f"Kafka did not start again; see {node.component.log}")

    @property
    def _first_listener(self) -> str:
        return next(iter(self._listeners))

    def _components(self) -> list[Component]:
        return [node.component for node in self._nodes if node.component is not None]

    def _kill_all(self) -> None:
        for component in self._components():
            component.kill()

    def _plan_nodes(self, home: Path) -> Iterator[Node]:
        names = [*self._listeners, CONTROLLER]
        ports = free_ports(self._size * len(names))
        for number in range(1, self._size + 1):
            name = self._folder if self._size == 1 else f"{self._folder}-{number}"
            yield Node(number, name, home, {listener: ports.pop() for listener in names})

    def _format(self, program: Sequence[str], log_dir: Path) -> None:
        """Make an empty data folder for each node, all of one new cluster."""
        self._id = secrets.token_urlsafe(16)
        running = []
        for node in self._nodes:
            shutil.rmtree(node.data, ignore_errors=True)
            node.write_properties(self._shared_settings())
            command = [
                *program,
                "kafka.tools.StorageTool",
                "format",
                f"--cluster-id={self._id}",
                "--config",
                str(node.properties),
            ]
            running.append(process.spawn(command, log=log_dir / f"{node.name}.log"))
        codes = [each.wait() for each in running]
        if any(codes):
            raise RuntimeError(f"Kafka did not format its data folders; see {log_dir}/{self._folder}*.log")

    def _shared_settings(self) -> dict[str, str]:
        protocols = {**self._listeners, CONTROLLER: "PLAINTEXT"}
        copies, needed = str(self._size), str(self._size // 2 + 1)
        return {
            **SETTINGS,
            "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
            "inter.broker.listener.name": self._first_listener,
            "controller.quorum.voters": ",".join(f"{node.number}@{node.address(CONTROLLER)}" for node in self._nodes),
            "default.replication.factor": copies,
            "min.insync.replicas": needed,
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": needed,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": needed,
            **self._settings,
        }


class Kafka(KafkaCluster):
    """A private broker: a cluster of one node."""

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        listeners: Mapping[str, str] = PLAIN_LISTENER,
        folder: str = "kafka",
        jvm_options: Sequence[str] = JVM_OPTIONS,
    ) -> None:
        super().__init__(settings, nodes=1, listeners=listeners, folder=folder, jvm_options=jvm_options)


def prepare_jvm(home: Path) -> list[str]:
    logging, scratch = home / "log4j2.properties", home / "tmp"
    logging.write_text(LOGGING)
    # Compression unpacks libraries there, which a killed JVM would leave behind elsewhere.
    scratch.mkdir()
    return [f"-Dlog4j2.configurationFile={logging.as_uri()}", f"-Djava.io.tmpdir={scratch}"]


def free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(process.free_port())
    return list(ports)
