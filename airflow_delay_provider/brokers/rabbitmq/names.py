"""The names of a ladder's exchanges and queues. Their order matters.

Up to RabbitMQ 3.13 a starting broker restores its bindings in the order of their sources' names, several at a time,
while its queues already forward messages. A message that finds no route stays and is tried again. A message that finds
only some of its routes is lost, or parked although its channel exists. Two rules prevent that (ADR 17):

- Names count from the end of the path (``1.exit`` ... ``5.level``), so everything behind an exchange is restored before
  a message can reach it. ``alternate``, where the exit parks, sorts before all ladders, so that a record is never the
  only route; ``unrouted``, where levels and the arrival park, sorts after all of them.
- Every route that leads on is bound twice, and so are records: one late binding changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from airflow_delay_provider.domain.exceptions import ConfigurationError

_VERSION = "v1"
_PARKED = "1.parked"
DEFAULT_NAMESPACE = "delay"
#: Without dots, so that a permission on all names of one namespace matches no name of another.
_NAMESPACE_FORM = re.compile(r"[A-Za-z0-9_-]{1,40}")
#: The names in the default namespace.
JOURNAL = f"{DEFAULT_NAMESPACE}.{_VERSION}.journal"
UNROUTABLE = f"{DEFAULT_NAMESPACE}.{_VERSION}.unroutable"


@dataclass(frozen=True, kw_only=True)
class Names:
    """All names of one ladder; ladders with other ticks, or without a journal, have other names."""

    tick_ms: int = 1000
    #: The beginning of all names, one for each tenant.
    namespace: str = DEFAULT_NAMESPACE
    #: Record every schedule and dispatch in a stream.
    journal: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.tick_ms <= 3_600_000:
            raise ConfigurationError(f"tick: {self.tick_ms} ms is not a tick; use 0.001 to 3600 seconds")
        if not _NAMESPACE_FORM.fullmatch(self.namespace) or self.namespace == "amq":
            raise ConfigurationError(
                f"prefix: {self.namespace!r} is not a prefix of names; use up to 40 letters, digits, - and _, but not"
                " amq, which RabbitMQ reserves"
            )

    # -- names that the ladders of a namespace share -------------------------------------------------------------

    @cached_property
    def root(self) -> str:
        """The beginning of all names of this namespace."""
        return f"{self.namespace}.{_VERSION}"

    @cached_property
    def journal_name(self) -> str:
        """The journal stream, and the exchange through which a reader can add a marker to it."""
        return f"{self.root}.journal"

    @cached_property
    def unroutable(self) -> str:
        """The queue of parked messages, which have no route because a channel or a rung was deleted."""
        return f"{self.root}.unroutable"

    @cached_property
    def alternate(self) -> str:
        """The alternate exchange of the exit; its name sorts before all ladders."""
        return f"{self.root}.alternate"

    @cached_property
    def unrouted(self) -> str:
        """The alternate exchange of all other exchanges; its name sorts after all ladders."""
        return f"{self.root}.unrouted"

    @cached_property
    def parking(self) -> str:
        """The queue behind both alternate exchanges, which forwards to ``parked_exchange``."""
        return f"{self.root}.parking"

    @cached_property
    def parked_exchange(self) -> str:
        """The exchange that leads parked messages to ``unroutable`` and to the journal."""
        return f"{self.root}.{_PARKED}"

    @cached_property
    def parked_log(self) -> str:
        """The exchange through which parked messages are recorded in the journal."""
        return f"{self.parked_exchange}.log"

    @cached_property
    def shared(self) -> frozenset[str]:
        """The names that stay when one ladder is deleted."""
        parking = (self.alternate, self.unrouted, self.parking, self.parked_exchange, self.parked_log)
        return frozenset((self.journal_name, self.unroutable, *parking))

    # -- names of this ladder ------------------------------------------------------------------------------------

    @cached_property
    def prefix(self) -> str:
        """The beginning of all names of this ladder."""
        return f"{self.root}.ladder.{self.tick_ms}ms{'' if self.journal else '.unjournaled'}"

    def ingress(self, hold_ms: int | None) -> str:
        """Return the exchange to publish to when the first rung holds ``hold_ms``; None is no delay at all."""
        return f"{self.prefix}.ingress.{'now' if hold_ms is None else f'{hold_ms}ms'}"

    def guard(self, hold_ms: int) -> str:
        """Return the exchange between an ingress exchange and its rung, which parks messages when the rung is gone.

        Without a journal the ingress exchange does that itself.
        """
        return f"{self.prefix}.guard.{hold_ms}ms" if self.journal else self.ingress(hold_ms)

    def rung(self, hold_ms: int) -> str:
        """Return the queue that holds messages for ``hold_ms``."""
        return f"{self.prefix}.rung.{hold_ms}ms"

    def level(self, level: int) -> str:
        """Return the exchange that routes by the digit of ``level``."""
        return f"{self.prefix}.5.level.{level}"

    @cached_property
    def arrival(self) -> str:
        """The exchange behind the last level, at which channels are bound."""
        return f"{self.prefix}.4.arrival"

    @cached_property
    def dispatch_log_exchange(self) -> str:
        """The exchange that leads to the dispatch log."""
        return f"{self.prefix}.3.dispatch-log"

    @cached_property
    def dispatch_log(self) -> str:
        """The queue that forwards records of dispatches to the journal."""
        return f"{self.prefix}.dispatch-log"

    @cached_property
    def dispatch(self) -> str:
        """The exchange that sends a message to the exit and its record to the dispatch log."""
        return f"{self.prefix}.2.dispatch"

    @cached_property
    def exit(self) -> str:
        """The exchange at which the queues of channels are bound, and the relays of exchanges."""
        return f"{self.prefix}.1.exit"

    @cached_property
    def ready(self) -> str:
        """The exchange that is declared last: when it exists, the whole ladder exists."""
        return f"{self.prefix}.ready"

    def relay(self, channel: str) -> str:
        """Return the queue that forwards to a channel, and keeps messages that the channel refuses."""
        return f"{self.prefix}.relay.{channel}"


def is_parked_exchange(exchange: str) -> bool:
    """Whether parked messages pass this exchange, in any namespace."""
    return exchange.endswith(f".{_VERSION}.{_PARKED}")
