"""What brokers share that hold delayed messages themselves: repost, dead letters, replay, recent outcomes."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from datetime import timedelta
from typing import ClassVar, Generic, Protocol, Self, TypeVar

from airflow_delay_provider.brokers.port import Broker, Receipt
from airflow_delay_provider.domain.arguments import OnConflict
from airflow_delay_provider.domain.clock import floor_ms, from_ms
from airflow_delay_provider.domain.dead_letters import DeadLetters, Replayed
from airflow_delay_provider.domain.exceptions import InvalidMessageError, UnknownChannelError
from airflow_delay_provider.domain.lifecycle import FINAL_CHANGES, Change, JournalEntry
from airflow_delay_provider.domain.message import Delivery, Message

#: Messages received at once.
PREFETCH = 100
#: A replay holds back at most so many messages, and so many bytes of payload, while it reads those behind them.
MOST_HELD = 20_000
MOST_HELD_BYTES = 64 * 1024 * 1024
#: Holding fewer than this keeps no broker from sending more.
FEW_HELD = 500
#: A broker needs this long to send messages again that another consumer has just released.
LAST_WAIT = timedelta(seconds=1)
REASON = "replayed"
#: Final entries that a journal reader keeps.
MOST_OUTCOMES = 20_000
#: Outcomes after which a message can be requeued.
REVERSIBLE = frozenset({Change.DEAD_LETTERED, Change.PARKED})


class HeldDeliveries(Protocol):
    """The deliveries that this process has received and not settled."""

    def require_held(self, delivery: Delivery) -> object:
        """Refuse a delivery that is not held."""

    def is_dead_letter(self, delivery: Delivery) -> bool:
        """Whether the message came from a dead-letter channel."""

    def ack(self, delivery: Delivery) -> None:
        """Settle a delivery."""


class BrokerHeld(Broker):
    """A broker that keeps delayed messages itself and does not know ids.

    Moving a message means to publish it again and to acknowledge the delivery once that is confirmed: a crash in
    between repeats the message and loses nothing.
    """

    knows_ids = False
    #: The name of the product, for error messages.
    product: ClassVar[str]

    def _schedule(self, messages: Sequence[Message], on_conflict: OnConflict) -> list[Receipt]:
        if on_conflict is not OnConflict.KEEP:
            raise InvalidMessageError(
                "on_conflict",
                f"{self.product} cannot check whether an id is taken, so it does not support {on_conflict.value!r}",
                'use on_conflict="keep", or hold="ledger" for this message or connection',
            )
        return self._publish_scheduled(messages)

    def requeue(self, delivery: Delivery, delay: timedelta, *, reason: str | None = None) -> None:
        now = self.clock.now()
        deliver_at = now + delay if delay > timedelta(0) else from_ms(floor_ms(now))
        is_dead = self._held_deliveries().is_dead_letter(delivery)
        message = delivery.message.replayed(deliver_at) if is_dead else delivery.message.requeued(deliver_at)
        self._repost(delivery, message, delay, Change.REQUEUED, reason)

    def dead_letter(self, delivery: Delivery, *, channel: str, reason: str) -> None:
        try:
            self.check_channels([channel])
        except UnknownChannelError as missing:
            # Without a dead-letter channel a poison message would be delivered again and again.
            self._create_channel(channel, missing)
        self._repost(delivery, delivery.message, timedelta(0), Change.DEAD_LETTERED, reason, channel=channel)

    def replay(self, selection: DeadLetters) -> Replayed:
        """Repost each selected message to its own channel, due now, and remove it once that is confirmed.

        At least once, with the same id: a crash in between leaves a copy in the dead-letter channel. A record that does
        not name its own channel stays.
        """
        count, seen, is_complete = 0, set[str](), True

        def repost(delivery: Delivery) -> None:
            self.requeue(delivery, timedelta(0), reason=REASON)
            if selection.message_ids:
                seen.add(delivery.message.id)

        for channel in self._dead_letter_channels(selection):
            taken, is_whole = take_from(self, channel, self._selector(selection, channel), repost)
            count, is_complete = count + taken, is_complete and is_whole
        missing = tuple(each for each in selection.message_ids if each not in seen)
        return Replayed(count=count, missing=missing, is_complete=is_complete)

    def _repost(
        self,
        delivery: Delivery,
        message: Message,
        delay: timedelta,
        change: Change,
        reason: str | None,
        *,
        channel: str | None = None,
    ) -> None:
        held = self._held_deliveries()
        held.require_held(delivery)
        self._publish_again(message, delay, change, reason, channel=channel)
        held.ack(delivery)

    @staticmethod
    def _selector(selection: DeadLetters, channel: str) -> Callable[[Delivery], bool]:
        """Return the test whether a delivery from this dead-letter channel is selected and can be replayed."""

        def is_selected(delivery: Delivery) -> bool:
            message, end = delivery.message, delivery.given_up
            return (
                end is not None
                and message.channel != channel
                and selection.includes(message, reason=end.reason, at=end.at)
            )

        return is_selected

    @abstractmethod
    def _publish_scheduled(self, messages: Sequence[Message]) -> list[Receipt]:
        """Publish messages so that each reaches its channel when it is due."""

    @abstractmethod
    def _publish_again(
        self, message: Message, delay: timedelta, change: Change, reason: str | None, *, channel: str | None
    ) -> None:
        """Publish a received message again, to ``channel`` or its own, and return once that is confirmed."""

    @abstractmethod
    def _held_deliveries(self) -> HeldDeliveries: ...

    @abstractmethod
    def _create_channel(self, channel: str, missing: UnknownChannelError) -> None:
        """Create a dead-letter channel, or raise ``missing`` where that is not possible."""

    @abstractmethod
    def _dead_letter_channels(self, selection: DeadLetters) -> list[str]:
        """Return the channels that may contain the selected dead letters."""


def take_from(
    broker: Broker, channel: str, is_wanted: Callable[[Delivery], bool], settle: Callable[[Delivery], None]
) -> tuple[int, bool]:
    """Settle the wanted messages of a channel; return how many, and whether every message was checked.

    The others are held, in bounded memory, and released at the end: released sooner, the broker would send them again
    at once.
    """
    held, held_bytes, count = list[Delivery](), 0, 0
    in_hand: list[Delivery] = []
    try:
        while len(held) < MOST_HELD and held_bytes < MOST_HELD_BYTES:
            in_hand = _receive(broker, channel)
            if not in_hand:
                return count, len(held) < FEW_HELD or not broker.peek(channel)
            while in_hand:
                delivery = in_hand[0]
                if is_wanted(delivery):
                    settle(delivery)
                    count += 1
                else:
                    held.append(delivery)
                    held_bytes += len(delivery.message.payload)
                in_hand.pop(0)
        return count, False
    finally:
        broker.release([*held, *in_hand])


def require_dead_letter_channel(selection: DeadLetters, product: str) -> str:
    """Return the dead-letter channel of a selection on a broker that has one for each channel."""
    if selection.dead_letter_channel is not None:
        return selection.dead_letter_channel
    if selection.channel is None:
        raise InvalidMessageError(
            "channel", f"{product} keeps dead letters by channel, and none is given", "give the channel of the messages"
        )
    return f"{selection.channel}.dead"


def _receive(broker: Broker, channel: str) -> list[Delivery]:
    try:
        return broker.receive(channel, limit=PREFETCH, wait=LAST_WAIT)
    except UnknownChannelError:
        # The channel is created with the first dead letter.
        return []


def keep_outcome(ends: MutableMapping[str, JournalEntry], entry: JournalEntry) -> None:
    """Keep the first outcome of a message; a dead or parked message that is requeued has none."""
    known = ends.get(entry.message_id)
    if entry.change in FINAL_CHANGES:
        if known is None or known.change is Change.PARKED:
            # Outcomes are kept for a while.
            ends[entry.message_id] = entry.without_message()
    elif entry.change is Change.REQUEUED and known is not None and known.change in REVERSIBLE:
        del ends[entry.message_id]


class _Ordered(Protocol):
    def __ge__(self, other: Self, /) -> bool: ...


PositionT = TypeVar("PositionT", bound=_Ordered)


class RecentOutcomes(Generic[PositionT]):
    """The first outcome of each message that was read recently."""

    def __init__(self, parse_position: Callable[[str], PositionT], start: PositionT | None = None) -> None:
        self._parse_position = parse_position
        #: Every outcome after this position is known; None if no position is.
        self._known_from = start
        self._entries: OrderedDict[str, JournalEntry] = OrderedDict()

    def covers(self, start: PositionT) -> bool:
        """Whether every outcome between ``start`` and the last entry added is known."""
        return self._known_from is not None and start >= self._known_from

    def add(self, entries: Sequence[JournalEntry]) -> None:
        """Keep the outcomes among entries that follow those added before."""
        for entry in entries:
            keep_outcome(self._entries, entry)
        while len(self._entries) > MOST_OUTCOMES:
            _, forgotten = self._entries.popitem(last=False)
            self._known_from = self._parse_position(forgotten.position)

    def get(self, message_ids: Sequence[str]) -> dict[str, JournalEntry]:
        """Return the outcomes that are known."""
        return {each: self._entries[each] for each in message_ids if each in self._entries}
