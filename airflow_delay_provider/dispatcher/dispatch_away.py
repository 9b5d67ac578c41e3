"""Due messages go to another broker: claim, send with its confirmation, mark."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from airflow_delay_provider.brokers.base import Broker
from airflow_delay_provider.dispatcher.context import Context
from airflow_delay_provider.domain.clock import ceil_ms, floor_ms
from airflow_delay_provider.exceptions import BrokerError, DelayError
from airflow_delay_provider.ledger import delivery
from airflow_delay_provider.ledger.delivery import Claim

log = logging.getLogger(__name__)


class DispatchAway:
    """Serves one destination, so that one broker that is down holds up no other.

    A crash after the claim leaves messages that ``rescue_stale`` frees when the claim ends; a crash after the broker
    confirmed and before the mark sends them once more with the same ids. None is lost, none is early.
    """

    def __init__(self, context: Context, destination: str, broker: Broker) -> None:
        self.name = f"dispatch_away:{destination}"
        self._context = context
        self._destination = destination
        self._broker = broker

    def run_once(self) -> float:
        """Send one batch of what is due."""
        context = self._context
        limit, pause = context.look(destination=self._destination)
        if limit < 1:
            return pause
        claims = self._claim(limit)
        if not claims:
            return context.poll_seconds
        try:
            self._broker.send([claim.message for claim in claims])
        except BrokerError as error:
            sent, unsent = delivery.divide(claims, unconfirmed=error.unconfirmed)
            self._settle(sent=sent, unsent=unsent)
            raise
        except DelayError:
            self._send_singly(claims)
        else:
            self._settle(sent=claims)
        return 0.0

    def _send_singly(self, claims: Sequence[Claim]) -> None:
        """Send messages of which the broker refuses one for good, so that it holds up no other."""
        for position, claim in enumerate(claims):
            try:
                self._broker.send([claim.message])
            except BrokerError:
                self._settle(unsent=claims[position:])
                raise
            except DelayError as refusal:
                self._give_up(claim, str(refusal))
            else:
                self._settle(sent=[claim])

    def _give_up(self, claim: Claim, reason: str) -> None:
        log.error("Message %s is dead, %s refuses it: %s", claim.message.id, self._destination, reason)
        now_ms = self._context.now_ms()
        self._context.ledger.transact(
            lambda connection: delivery.mark_dead(connection, [claim], now_ms=now_ms, reason=reason)
        )

    def _claim(self, limit: int) -> list[Claim]:
        now = self._context.clock.now()
        config = self._context.config
        return self._context.ledger.transact(
            lambda connection: delivery.claim_due(
                connection,
                destination=self._destination,
                owner=config.owner,
                now_ms=floor_ms(now),
                until_ms=ceil_ms(now + config.claim),
                limit=limit,
            )
        )

    def _settle(self, *, sent: Sequence[Claim] = (), unsent: Sequence[Claim] = ()) -> None:
        context = self._context
        now_ms, owner = context.now_ms(), context.config.owner
        context.ledger.transact(
            lambda connection: delivery.settle(connection, sent=sent, unsent=unsent, owner=owner, now_ms=now_ms)
        )
        context.note_dispatched(
            Counter(claim.message.channel for claim in sent),
            [now_ms - ceil_ms(claim.message.deliver_at) for claim in sent],
        )
