"""Dispatch due ledger-held messages to their broker: claim, send and wait for the confirmation, mark."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime

from airflow_delay_provider.brokers.ledger import delivery
from airflow_delay_provider.brokers.ledger.claims import renewed
from airflow_delay_provider.brokers.ledger.delivery import Claim
from airflow_delay_provider.dispatcher.broker_connection import BrokerConnection, OpenBroker
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.domain.backoff import Backoff
from airflow_delay_provider.domain.clock import Clock, ceil_ms, floor_ms, from_ms
from airflow_delay_provider.domain.exceptions import DelayError, Reach

log = logging.getLogger(__name__)


class DispatchToBrokers:
    """Serves one destination, so that a broker that is down delays no other.

    A crash after the claim leaves claimed messages, which ``rescue_stale`` frees when the claim ends. A crash after the
    broker has confirmed and before the mark sends them again with the same ids. No message is lost or early.

    A message becomes dead only if the broker refuses the message itself. While a channel cannot be used, its messages
    wait; while the broker or its connection cannot be used, all of them wait.
    """

    def __init__(self, context: Context, destination: str, open_broker: OpenBroker) -> None:
        self.name = f"dispatch_to_brokers:{destination}"
        #: No message is scheduled for this destination any more.
        self.is_over = False
        self._context = context
        self._destination = destination
        self._connection = BrokerConnection(destination, open_broker, reread=context.config.reread_interval)
        self._held = HeldChannels(self.name, clock=context.clock, backoff=context.config.channel_backoff)
        self._idle_since: datetime | None = None
        self.notice_interval = context.poll_seconds

    def run_once(self) -> float:
        """Send one batch."""
        if self._held:
            return self._run_beside_held_channels()
        context = self._context
        with context.ledger.read() as connection:
            due_ms = delivery.next_due_ms(connection, destination=self._destination)
        if due_ms is None:
            return self._idle()
        self._idle_since = None
        # Before a message is due, so that a problem of the connection shows early.
        self._connection.get()
        limit, pause = context.allowance(due_ms)
        if limit < 1:
            return pause
        return 0.0 if self._send_due(limit) else context.poll_seconds

    def troubles(self) -> dict[str, str]:
        """Return the channels that cannot be used, and why."""
        return self._held.describe()

    def close(self) -> None:
        """Close the broker."""
        self._connection.close()

    def _idle(self) -> float:
        """No message is scheduled; the loop ends when that lasts."""
        now = self._context.clock.now()
        self._idle_since = self._idle_since or now
        self.is_over = now - self._idle_since >= self._context.config.idle_close
        return self._context.idle_seconds

    def _run_beside_held_channels(self) -> float:
        """Send to the usable channels, then try one message of each held channel whose pause is over."""
        context, now_ms = self._context, self._context.now_ms()
        with context.ledger.read() as connection:
            waiting = delivery.next_due_by_channel(connection, destination=self._destination)
        self._held.forget_all_but(waiting)
        due = {channel: due_ms for channel, due_ms in waiting.items() if due_ms is not None and due_ms <= now_ms}
        self._connection.get()
        sent = False
        if free := sorted((channel for channel in due if channel not in self._held), key=due.__getitem__):
            limit, pause = context.allowance(due[free[0]])
            sent = limit > 0 and self._send_due(limit, free)
        else:
            pause = context.idle_seconds
        for channel in self._held.to_try():
            if channel in due:
                sent |= self._send_due(1, [channel])
        return 0.0 if sent else min([pause or context.poll_seconds, *self._seconds_until_due(waiting)])

    def _seconds_until_due(self, waiting: Mapping[str, int | None]) -> Iterator[float]:
        """Return for each channel how long there is nothing to send, or to try if it is held."""
        now = self._context.clock.now()
        for channel, due_ms in waiting.items():
            if due_ms is not None:
                seconds = (max(from_ms(due_ms), self._held.until(channel) or now) - now).total_seconds()
                # If it is due and was not sent, another transaction has locked it.
                yield seconds if seconds > 0 else self._context.poll_seconds

    def _send_due(self, limit: int, channels: Sequence[str] | None = None) -> bool:
        claims = self._claim(limit, channels)
        if claims:
            self._send(claims)
        return bool(claims)

    def _send(self, claims: Sequence[Claim]) -> None:
        try:
            with self._renewed(claims):
                self._connection.get().send([claim.message for claim in claims])
        except Exception as error:  # noqa: BLE001 - an unexpected error must delay as little as possible, too
            self._react(claims, error)
        else:
            self._settle(sent=claims)

    def _renewed(self, claims: Sequence[Claim]) -> AbstractContextManager[None]:
        context, config = self._context, self._context.config
        return renewed(context.ledger, claims, owner=config.owner, clock=context.clock, claim=config.claim)

    def _react(self, claims: Sequence[Claim], error: Exception) -> None:
        """Mark as dead, hold, or send in smaller parts what was not confirmed; the error delays no other message."""
        known = error if isinstance(error, DelayError) else None
        reach = known.reach if known else Reach.CHANNEL
        sent, unsent = delivery.divide(claims, unconfirmed=known.unconfirmed if known else ())
        by_channel: dict[str, list[Claim]] = {}
        for claim in unsent:
            by_channel.setdefault(claim.message.channel, []).append(claim)
        if reach is Reach.BROKER and sent and not any(claim.message.channel in by_channel for claim in sent):
            # The broker works, since it has confirmed all other channels: only these channels fail.
            self._settle(sent=sent, unsent=unsent)
            self._hold(by_channel, error)
            return
        if reach is Reach.BROKER:
            self._settle(sent=sent, unsent=unsent)
            self._connection.close()
            raise error
        if reach is Reach.CHANNEL and len(by_channel) == 1:
            self._settle(sent=sent, unsent=unsent)
            self._hold(by_channel, error)
            return
        self._settle(sent=sent)
        if len(by_channel) > 1:
            self._send_parts(list(by_channel.values()))
        elif len(unsent) > 1:
            middle = len(unsent) // 2
            self._send_parts([unsent[:middle], unsent[middle:]])
        elif unsent:
            self._give_up(unsent[0], str(error))

    def _send_parts(self, parts: Sequence[Sequence[Claim]]) -> None:
        for position, part in enumerate(parts):
            try:
                self._send(part)
            except Exception:
                self._settle(unsent=[claim for rest in parts[position + 1 :] for claim in rest])
                raise

    def _hold(self, channels: Iterable[str], error: Exception) -> None:
        for channel in channels:
            self._held.hold(channel, error)
            for observer in self._context.observers:
                observer.failed(self.name)

    def _give_up(self, claim: Claim, reason: str) -> None:
        log.error("Message %s is dead: %s refused it: %s", claim.message.id, self._destination, reason)
        now_ms = self._context.now_ms()
        self._context.ledger.transact(delivery.mark_dead, [claim], now_ms=now_ms, reason=reason)

    def _claim(self, limit: int, channels: Sequence[str] | None) -> list[Claim]:
        now = self._context.clock.now()
        config = self._context.config
        return self._context.ledger.transact(
            delivery.claim_due,
            destination=self._destination,
            channels=channels,
            owner=config.owner,
            now_ms=floor_ms(now),
            until_ms=ceil_ms(now + config.claim),
            limit=limit,
        )

    def _settle(self, *, sent: Sequence[Claim] = (), unsent: Sequence[Claim] = ()) -> None:
        if not sent and not unsent:
            return
        context = self._context
        now_ms, owner = context.now_ms(), context.config.owner
        context.ledger.transact(delivery.settle, sent=sent, unsent=unsent, owner=owner, now_ms=now_ms)
        by_channel = Counter(claim.message.channel for claim in sent)
        context.count_dispatched(by_channel, [now_ms - ceil_ms(claim.message.deliver_at) for claim in sent])
        self._held.release(by_channel)


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hold:
    error: str
    failures: int
    since: datetime
    #: When the channel is tried again.
    until: datetime


class HeldChannels:
    """Channels to which nothing can be sent now, each with its own backoff: a missing queue delays no other channel."""

    def __init__(
        self, loop: str, *, clock: Clock, backoff: Backoff, random: Callable[[], float] = random.random
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._backoff = backoff
        self._random = random
        self._holds: dict[str, _Hold] = {}

    def __bool__(self) -> bool:
        return bool(self._holds)

    def __contains__(self, channel: str) -> bool:
        return channel in self._holds

    def hold(self, channel: str, error: Exception) -> None:
        """Pause a channel, and log why."""
        before, now = self._holds.get(channel), self._clock.now()
        failures = before.failures + 1 if before else 1
        pause = self._backoff.delay(failures, self._random)
        self._holds[channel] = _Hold(
            error=f"{type(error).__name__}: {error}",
            failures=failures,
            since=before.since if before else now,
            until=now + pause,
        )
        log.error(
            "%s: cannot send to channel %s, next attempt in %.1f s: %s",
            self._loop,
            channel,
            pause.total_seconds(),
            error,
            exc_info=None if isinstance(error, DelayError) else error,
        )

    def release(self, channels: Collection[str]) -> None:
        """Use channels again that have accepted a message."""
        for channel in channels:
            if self._holds.pop(channel, None) is not None:
                log.info("%s: channel %s accepts messages again", self._loop, channel)

    def forget_all_but(self, channels: Collection[str]) -> None:
        """Forget channels without scheduled messages."""
        for channel in set(self._holds) - set(channels):
            del self._holds[channel]

    def to_try(self) -> list[str]:
        """Return the channels that may be tried again now."""
        now = self._clock.now()
        return [channel for channel, hold in self._holds.items() if hold.until <= now]

    def until(self, channel: str) -> datetime | None:
        """Return when a channel is tried again; None if it is not held."""
        return hold.until if (hold := self._holds.get(channel)) else None

    def describe(self) -> dict[str, str]:
        """Return what is wrong with each channel, for ``/health``."""
        return {
            channel: f"no message accepted since {hold.since.isoformat(timespec='seconds')}, failures: {hold.failures};"
            f" {hold.error}"
            for channel, hold in list(self._holds.items())
        }
