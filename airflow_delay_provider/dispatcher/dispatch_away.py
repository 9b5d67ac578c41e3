"""Due messages go to another broker: claim, send with its confirmation, mark."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime

from airflow_delay_provider.dispatcher.broker_connection import BrokerConnection, OpenBroker
from airflow_delay_provider.dispatcher.context import Context
from airflow_delay_provider.dispatcher.held_channels import HeldChannels
from airflow_delay_provider.domain.clock import ceil_ms, floor_ms
from airflow_delay_provider.exceptions import DelayError, Reach
from airflow_delay_provider.ledger import delivery
from airflow_delay_provider.ledger.delivery import Claim

log = logging.getLogger(__name__)


class DispatchAway:
    """Serves one destination, so that one broker that is down holds up no other.

    A crash after the claim leaves messages that ``rescue_stale`` frees when the claim ends; a crash after the broker
    confirmed and before the mark sends them once more with the same ids. None is lost, none is early.

    Only the broker's verdict on a message ends it. Trouble with a channel lets the messages of that channel wait, and
    trouble with the broker or its connection lets all of them wait.
    """

    def __init__(self, context: Context, destination: str, open_broker: OpenBroker) -> None:
        self.name = f"dispatch_away:{destination}"
        #: Nobody waits for this destination any more.
        self.is_over = False
        self._context = context
        self._destination = destination
        self._connection = BrokerConnection(destination, open_broker, reread=context.config.reread_interval)
        self._held = HeldChannels(self.name, clock=context.clock, backoff=context.config.channel_backoff)
        self._idle_since: datetime | None = None

    def run_once(self) -> float:
        """Send one batch of what is due."""
        if self._held:
            return self._run_beside_held_channels()
        context = self._context
        with context.ledger.read() as connection:
            due_ms = delivery.next_due_ms(connection, destination=self._destination)
        if due_ms is None:
            return self._rest()
        self._idle_since = None
        # Before anything is due, so that what is wrong with the connection is known early.
        self._connection.get()
        limit, pause = context.allowance(due_ms)
        if limit < 1:
            return pause
        return 0.0 if self._send_due(limit) else context.poll_seconds

    def troubles(self) -> dict[str, str]:
        """Return the channels whose messages wait for somebody to mend something, and why."""
        return self._held.describe()

    def close(self) -> None:
        """Let go of the broker."""
        self._connection.close()

    def _rest(self) -> float:
        """Nothing waits; the loop is over when that lasts."""
        now = self._context.clock.now()
        self._idle_since = self._idle_since or now
        self.is_over = now - self._idle_since >= self._context.config.idle_close
        return self._context.poll_seconds

    def _run_beside_held_channels(self) -> float:
        """Send what is due to the other channels, then try one message of each held channel whose rest is over."""
        context, now_ms = self._context, self._context.now_ms()
        with context.ledger.read() as connection:
            waiting = delivery.next_due_by_channel(connection, destination=self._destination)
        self._held.forget_all_but(waiting)
        due = {channel: due_ms for channel, due_ms in waiting.items() if due_ms is not None and due_ms <= now_ms}
        self._connection.get()
        limit, pause, sent = 0, context.poll_seconds, False
        if free := sorted((channel for channel in due if channel not in self._held), key=due.__getitem__):
            limit, pause = context.allowance(due[free[0]])
            sent = limit > 0 and self._send_due(limit, free)
        for channel in self._held.rested():
            if channel in due:
                sent |= self._send_due(1, [channel])
        return 0.0 if sent else min(pause or context.poll_seconds, context.poll_seconds)

    def _send_due(self, limit: int, channels: Sequence[str] | None = None) -> bool:
        claims = self._claim(limit, channels)
        if claims:
            self._send(claims)
        return bool(claims)

    def _send(self, claims: Sequence[Claim]) -> None:
        try:
            self._connection.get().send([claim.message for claim in claims])
        except Exception as error:  # noqa: BLE001 - also what is unforeseen must hold up as little as possible
            self._react(claims, error)
        else:
            self._settle(sent=claims)

    def _react(self, claims: Sequence[Claim], error: Exception) -> None:
        """End, hold or try again in smaller parts what was not confirmed, so that the error holds up nothing else."""
        told = error if isinstance(error, DelayError) else None
        reach = told.reach if told else Reach.CHANNEL
        sent, unsent = delivery.divide(claims, unconfirmed=told.unconfirmed if told else ())
        by_channel: dict[str, list[Claim]] = {}
        for claim in unsent:
            by_channel.setdefault(claim.message.channel, []).append(claim)
        if reach is Reach.BROKER and sent and not any(claim.message.channel in by_channel for claim in sent):
            # A broker that has served all other channels is there: it is these that it does not serve.
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
        log.error("Message %s is dead, %s refuses it: %s", claim.message.id, self._destination, reason)
        now_ms = self._context.now_ms()
        self._context.ledger.transact(
            lambda connection: delivery.mark_dead(connection, [claim], now_ms=now_ms, reason=reason)
        )

    def _claim(self, limit: int, channels: Sequence[str] | None) -> list[Claim]:
        now = self._context.clock.now()
        config = self._context.config
        return self._context.ledger.transact(
            lambda connection: delivery.claim_due(
                connection,
                destination=self._destination,
                channels=channels,
                owner=config.owner,
                now_ms=floor_ms(now),
                until_ms=ceil_ms(now + config.claim),
                limit=limit,
            )
        )

    def _settle(self, *, sent: Sequence[Claim] = (), unsent: Sequence[Claim] = ()) -> None:
        if not sent and not unsent:
            return
        context = self._context
        now_ms, owner = context.now_ms(), context.config.owner
        context.ledger.transact(
            lambda connection: delivery.settle(connection, sent=sent, unsent=unsent, owner=owner, now_ms=now_ms)
        )
        by_channel = Counter(claim.message.channel for claim in sent)
        context.note_dispatched(by_channel, [now_ms - ceil_ms(claim.message.deliver_at) for claim in sent])
        self._held.release(by_channel)
