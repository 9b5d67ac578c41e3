"""How a dispatcher works; every default is meant to be right."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.ledger.delivery import CLAIM, own_name


@dataclass(frozen=True, kw_only=True)
class DispatcherConfig:
    """The settings of one dispatcher."""

    #: Who claims; unique among all dispatchers.
    owner: str = field(default_factory=own_name)
    #: Most messages in one transaction or one publish.
    batch: int = 1000
    #: How soon a message is noticed that was scheduled just now and is due before all known ones.
    poll_interval: timedelta = timedelta(milliseconds=20)
    #: Most messages of the ledger a second, None is no limit; what is moved on ladders is not limited.
    rate_limit: float | None = None
    #: A message that another broker has not confirmed in this time may be sent by another dispatcher.
    claim: timedelta = CLAIM
    rescue_interval: timedelta = timedelta(seconds=10)
    #: Messages that ended are kept this long; an id can be used again after that.
    retention: timedelta = timedelta(days=30)
    prune_interval: timedelta = timedelta(minutes=10)
    #: Connections of brokers whose journals are followed, so that what they hold can be listed.
    project: tuple[str, ...] = ()
    #: How soon the news of a journal is in the ledger.
    project_interval: timedelta = timedelta(seconds=1)
    #: Connections of brokers whose waiting messages are moved on.
    climb: tuple[str, ...] = ()
    #: A name that only this dispatcher has, also after a restart: it then takes up its work at once instead of after a
    #: time-out. None is a new name.
    instance: str | None = None
    #: Between attempts while the ledger or a broker is out of reach.
    backoff: Backoff = field(default_factory=lambda: Backoff(cap=timedelta(seconds=30)))
    #: Between attempts for one channel that takes nothing, as a queue that does not exist; the others go on meanwhile.
    channel_backoff: Backoff = field(default_factory=lambda: Backoff(cap=timedelta(seconds=5)))
    #: How soon a connection that was changed is used, while the broker that it named before still works.
    reread_interval: timedelta = timedelta(seconds=30)
    #: The broker of a connection that no message waits for is closed after this time.
    idle_close: timedelta = timedelta(minutes=10)
    health_host: str = "127.0.0.1"
    #: 0 is any free port, None is no HTTP at all.
    health_port: int | None = 8795

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigurationError(f"dispatcher batch: {self.batch} is not a batch size; use 1 or more")
        if self.rate_limit is not None and self.rate_limit <= 0:
            raise ConfigurationError(
                f"dispatcher rate limit: {self.rate_limit} lets nothing through; use more than 0, or none"
            )
        if self.poll_interval <= timedelta(0):
            raise ConfigurationError("dispatcher poll interval: must be more than 0 seconds")
