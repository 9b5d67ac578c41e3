"""The port of waiting: one consumer sees the messages of many channels, for any number of waiters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.exceptions import DelayError


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How much of one channel a shared consumer has at most."""

    messages: int = 100
    #: Payloads together; the last batch that was asked for may go beyond it.
    bytes: int = 16 * 2**20


#: Messages are asked for in batches of this size, so that large ones are noticed before many have come.
BATCH = 10

#: The messages at the head of a channel, in order, or why it cannot be consumed.
View: TypeAlias = Sequence[Message] | DelayError


class SharedConsumer(ABC):
    """Sees messages as they come and takes none away. One thread uses it; it knows nothing of who waits for what.

    Where a broker shows messages only to those who take them, they are held until nobody asks for their channel any
    more, and given back without counting a delivery where the broker can do that.
    """

    @abstractmethod
    def look(self, bounds: Mapping[str, Bound]) -> Mapping[str, View]:
        """Return what is there for each of these channels, without waiting; all other channels are let go.

        A channel that fails has its own error as its view. An error that concerns all channels is raised; the consumer
        may be used again after it.
        """

    def promise(self, channel: str, message_id: str) -> None:  # noqa: B027 - nothing is held, so nothing is to be done
        """Keep a message for a task that will come and receive it from the channel."""

    @property
    def has_promises(self) -> bool:
        """Whether a promised message is still held, so that the consumer should go on although nobody waits."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""
