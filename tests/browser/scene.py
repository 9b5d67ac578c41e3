"""Messages that the pages show."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.ledger.records import MessageRecord
from airflow_delay_provider.domain.arguments import compose_message
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.domain.message import Origin
from tools.servers.component import wait_for

HOUR = timedelta(hours=1)
VISIBILITY = timedelta(minutes=1)
ORIGIN = Origin(dag_id="controlled", run_id="manual__1", task_id="wanted")


class Scene:
    """Messages in a channel of their own; the ids begin with its name."""

    def __init__(self, ledger: EmbeddedBroker) -> None:
        self.ledger = ledger
        self.channel = f"test-{uuid4().hex[:8]}"

    def schedule(
        self,
        count: int,
        *,
        payload: Any = "x",
        deliver_after: timedelta = HOUR,
        first: int = 0,
        origin: Origin | None = ORIGIN,
        **fields: Any,
    ) -> list[str]:
        """Schedule messages that are due one second after the other, and return their ids."""
        messages = [
            compose_message(
                self.channel,
                payload,
                message_id=f"{self.channel}-{number:04}",
                deliver_after=deliver_after + timedelta(seconds=number),
                origin=origin,
                now=self.ledger.clock.now(),
                **fields,
            )
            for number in range(first, first + count)
        ]
        self.ledger.schedule(messages)
        return [message.id for message in messages]

    def kill(self, count: int, *, reason: str) -> list[str]:
        """Let a consumer of the channel dead-letter new messages."""
        ids = self.schedule(count, deliver_after=timedelta(0))
        self.ledger.expedite([each for each in ids if self.state_of(each) is State.SCHEDULED])
        for _ in ids:
            [delivery] = wait_for(
                lambda: self.ledger.receive(self.channel, limit=1, visibility=VISIBILITY),
                what=f"a message of {self.channel} is dispatched",
                seconds=30,
            )
            self.ledger.dead_letter(delivery, channel=f"{self.channel}.dead", reason=reason)
        return ids

    def record_of(self, message_id: str) -> MessageRecord:
        with self.ledger.ledger.read() as connection:
            [record] = listing.get_many(connection, [message_id]).values()
        return record

    def state_of(self, message_id: str) -> State:
        return self.record_of(message_id).state
