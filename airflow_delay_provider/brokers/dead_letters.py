"""Replay on brokers that hold messages themselves: out of the dead-letter channel, back to their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial

from airflow_delay_provider.brokers.base import Broker
from airflow_delay_provider.domain.dead_letters import DeadLetters, Replayed
from airflow_delay_provider.domain.message import Delivery
from airflow_delay_provider.exceptions import InvalidMessageError, UnknownChannelError

#: Messages handed out at once.
PREFETCH = 100
#: Most messages, and most bytes of payload, that are held back while others behind them are looked at.
MOST_HELD = 20_000
MOST_HELD_BYTES = 64 * 1024 * 1024
#: Fewer than so many in hand keep no broker from handing out more.
FEW_HELD = 500
#: How long messages may take that somebody else has just given back, which the broker does not hand out at once.
LAST_WAIT = timedelta(seconds=1)
REASON = "replayed"


def replay_from(broker: Broker, selection: DeadLetters, dead_letter_channels: Iterable[str]) -> Replayed:
    """Post each message that is meant to its own channel, due now, and remove it once that is confirmed.

    At least once, with the same id: a crash between the two leaves it in the dead-letter channel too. A record that
    does not say where it belongs stays.
    """
    count, seen, is_complete = 0, set[str](), True

    def repost(delivery: Delivery) -> None:
        broker.requeue(delivery, timedelta(0), reason=REASON)
        if selection.message_ids:
            seen.add(delivery.message.id)

    for channel in dead_letter_channels:
        taken, is_whole = take_from(broker, channel, partial(is_meant, selection, channel=channel), repost)
        count, is_complete = count + taken, is_complete and is_whole
    missing = tuple(each for each in selection.message_ids if each not in seen)
    return Replayed(count=count, missing=missing, is_complete=is_complete)


def is_meant(selection: DeadLetters, delivery: Delivery, channel: str) -> bool:
    """Whether what lies in a dead-letter channel is a message that can be replayed, and is selected."""
    message, end = delivery.message, delivery.given_up
    return end is not None and message.channel != channel and selection.includes(message, reason=end.reason, at=end.at)


def take_from(
    broker: Broker, channel: str, is_wanted: Callable[[Delivery], bool], settle: Callable[[Delivery], None]
) -> tuple[int, bool]:
    """Settle what is wanted of a channel, leave the rest, and return how many it were and whether all was looked at.

    What is not wanted is held back until the end, in bounded memory, since the broker would hand it out again at once.
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


def require_channel_of(selection: DeadLetters, broker: str) -> str:
    """Return the dead-letter channel of a selection on a broker that has nothing else to look at."""
    if selection.dead_letter_channel is not None:
        return selection.dead_letter_channel
    if selection.channel is None:
        raise InvalidMessageError(
            "channel", f"{broker} keeps dead letters by channel and none is named", "name the channel they belong to"
        )
    return f"{selection.channel}.dead"


def _receive(broker: Broker, channel: str) -> list[Delivery]:
    try:
        return broker.receive(channel, limit=PREFETCH, wait=LAST_WAIT)
    except UnknownChannelError:
        # Nobody has given up anything there.
        return []
