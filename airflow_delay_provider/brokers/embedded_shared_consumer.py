"""The shared consumer on the ledger: one query finds what is there for all channels, and holds nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from airflow_delay_provider.brokers.shared_consumer import BATCH, Bound, SharedConsumer, View
from airflow_delay_provider.domain.clock import Clock, floor_ms
from airflow_delay_provider.ledger import channels

if TYPE_CHECKING:
    from airflow_delay_provider.domain.message import Message
    from airflow_delay_provider.ledger.channels import Visible
    from airflow_delay_provider.ledger.database import Ledger


class EmbeddedSharedConsumer(SharedConsumer):
    """Reads each message once, however often it is looked at."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._known: dict[Visible, Message] = {}

    def look(self, bounds: Mapping[str, Bound]) -> Mapping[str, View]:
        limits = {channel: bound.messages for channel, bound in bounds.items()}
        with self._ledger.read() as connection:
            visible = channels.visible(connection, limits, now_ms=floor_ms(self._clock.now()))
            known: dict[Visible, Message] = {}
            views = dict[str, View]()
            for channel, bound in bounds.items():
                view: list[Message] = []
                for start in range(0, len(visible[channel]), BATCH):
                    if sum(len(message.payload) for message in view) >= bound.bytes:
                        break
                    batch = visible[channel][start : start + BATCH]
                    fresh = [each for each in batch if each not in self._known]
                    found = self._known | channels.messages(connection, fresh)
                    # One that was taken between the two queries is in the first only.
                    known |= {each: found[each] for each in batch if each in found}
                    view += [found[each] for each in batch if each in found]
                views[channel] = view
        self._known = known
        return views

    def close(self) -> None:
        self._known = {}
