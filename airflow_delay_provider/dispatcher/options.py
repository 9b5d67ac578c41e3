"""The settings of a dispatcher: defaults, and options for its command lines and for ``[delay]`` in airflow.cfg."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from airflow_delay_provider.domain.arguments import parse_count, parse_number
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.exceptions import ConfigurationError, InvalidMessageError
from airflow_delay_provider.domain.lifecycle import CLAIM

#: Of /health and /metrics.
DEFAULT_PORT = 8795


def _process_name() -> str:
    # Every `airflow` command imports this module, and only the dispatcher needs more.
    from airflow_delay_provider.brokers.ledger.heartbeats import process_name

    return process_name()


@dataclass(frozen=True, kw_only=True)
class DispatcherConfig:
    """The settings of one dispatcher; the defaults suit most deployments."""

    #: Claims messages under this name; unique among all dispatchers.
    owner: str = field(default_factory=_process_name)
    #: Most messages in one transaction or one publish.
    batch: int = 1000
    #: How soon it notices a new message that is due before all others.
    poll_interval: timedelta = timedelta(milliseconds=20)
    #: Most messages of the ledger a second, None is no limit; Kafka ladders are not limited.
    rate_limit: float | None = None
    #: Another dispatcher may send messages of a dispatcher that died after this time; a living one renews its claims.
    claim: timedelta = CLAIM
    rescue_interval: timedelta = timedelta(seconds=10)
    #: Finished messages are kept this long; after that their ids can be used again.
    retention: timedelta = timedelta(days=30)
    prune_interval: timedelta = timedelta(minutes=10)
    #: Connections of brokers whose journals are copied into the ledger, so that their messages can be listed.
    index: tuple[str, ...] = ()
    #: How soon a journal entry is in the ledger.
    index_interval: timedelta = timedelta(seconds=1)
    #: Connections of Kafka whose delayed messages this dispatcher delivers.
    kafka: tuple[str, ...] = ()
    #: A unique name that survives restarts: a restarted dispatcher continues at once instead of after a time-out. None
    #: is a new name.
    instance: str | None = None
    #: Between attempts while the ledger or a broker is not reachable.
    backoff: Backoff = field(default_factory=lambda: Backoff(cap=timedelta(seconds=30)))
    #: Between attempts for one channel that accepts no messages, for example a missing queue; the others continue.
    channel_backoff: Backoff = field(default_factory=lambda: Backoff(cap=timedelta(seconds=5)))
    #: How soon a changed connection is used while the broker that it named before still works.
    reread_interval: timedelta = timedelta(seconds=30)
    #: A broker to which no message is scheduled is closed after this time.
    idle_close: timedelta = timedelta(minutes=10)
    health_host: str = "127.0.0.1"
    #: 0 is any free port, None is no HTTP at all.
    health_port: int | None = DEFAULT_PORT

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigurationError(f"dispatcher batch: {self.batch} is not a batch size; use 1 or more")
        if self.rate_limit is not None and self.rate_limit <= 0:
            raise ConfigurationError(
                f"dispatcher rate limit: {self.rate_limit} would stop all messages; use more than 0, or none"
            )
        if self.poll_interval <= timedelta(0):
            raise ConfigurationError("dispatcher poll interval: must be more than 0 seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of the command line."""

    name: str
    metavar: str
    help: str
    #: The key in section [delay] of airflow.cfg that applies without the option.
    setting: str
    #: From the name of the option or setting, for error messages, and its text to the value.
    parse: Callable[[str, Any], Any]
    #: The field of the configuration, where it has another name.
    field: str | None = None
    is_repeatable: bool = False

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--{self.name.replace('_', '-')}"


def read_config(
    given: Mapping[str, Any], read_setting: Callable[[str], str | None] = lambda _: None
) -> DispatcherConfig:
    """Return the settings: those given on the command line, else those of ``[delay]``, else the defaults."""
    fields: dict[str, Any] = {}
    for option in OPTIONS:
        source, value = option.flag.removeprefix("--"), given.get(option.name)
        if value is None:
            source, value = f"[delay] {option.setting}", read_setting(option.setting)
        if value is not None:
            fields[option.field or option.name] = option.parse(source, value)
    return DispatcherConfig(**fields)


def _parse_seconds(name: str, text: str) -> timedelta:
    return timedelta(seconds=parse_number(name, text))


def _parse_days(name: str, text: str) -> timedelta:
    return timedelta(days=parse_number(name, text))


def _parse_limit(name: str, text: str) -> float | None:
    return parse_number(name, text, from_zero=True) or None


def _parse_names(_name: str, given: Sequence[str] | str) -> tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else given
    return tuple(name for name in (each.strip() for each in names) if name)


def _parse_text(_name: str, text: str) -> str | None:
    return text or None


def _parse_port(name: str, text: str) -> int | None:
    try:
        port = int(text)
    except ValueError:
        port = -2
    if not -1 <= port <= 65_535:
        raise InvalidMessageError(name, f"{text!r} is not a port", "use 1 to 65535, 0 for any free port or -1 for none")
    return None if port < 0 else port


OPTIONS = (
    Option(
        name="batch",
        metavar="NUMBER",
        help="Most messages in one transaction.",
        setting="dispatcher_batch",
        parse=parse_count,
    ),
    Option(
        name="poll_interval",
        metavar="SECONDS",
        help="How soon a new message is noticed.",
        setting="dispatcher_poll_interval",
        parse=_parse_seconds,
    ),
    Option(
        name="rate_limit",
        metavar="NUMBER",
        help="Most messages of the ledger per second; 0 means no limit. Does not apply to --kafka.",
        setting="dispatcher_rate_limit",
        parse=_parse_limit,
    ),
    Option(
        name="retention_days",
        metavar="DAYS",
        help="How long finished messages are kept.",
        setting="retention_days",
        parse=_parse_days,
        field="retention",
    ),
    Option(
        name="kafka",
        metavar="CONN",
        help="Deliver delayed messages stored in this Kafka connection. Can be repeated.",
        setting="kafka_connections",
        parse=_parse_names,
        is_repeatable=True,
    ),
    Option(
        name="index",
        metavar="CONN",
        help="Copy the journal of this connection into the ledger, so that its messages can be listed."
        " Can be repeated.",
        setting="index_connections",
        parse=_parse_names,
        is_repeatable=True,
    ),
    Option(
        name="instance",
        metavar="NAME",
        help="A unique name of this dispatcher that survives restarts: after a restart, --kafka continues at once.",
        setting="dispatcher_instance",
        parse=_parse_text,
    ),
    Option(
        name="health_host",
        metavar="HOST",
        help="Address of /health and /metrics.",
        setting="dispatcher_health_host",
        parse=_parse_text,
    ),
    Option(
        name="health_port",
        metavar="PORT",
        help="Port of /health and /metrics; 0 means any free port, -1 no HTTP. If the default is taken, one of the next"
        " nine is used.",
        setting="dispatcher_health_port",
        parse=_parse_port,
    ),
)
