"""Claims are renewed while their messages are sent, since a broker may take longer to confirm than a claim lasts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from sqlalchemy import Connection, update

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.delivery import Claim
from airflow_delay_provider.brokers.ledger.dialect import is_one_of
from airflow_delay_provider.brokers.ledger.tables import scheduled_message
from airflow_delay_provider.domain.clock import Clock, ceil_ms
from airflow_delay_provider.domain.exceptions import DelayError
from airflow_delay_provider.domain.lifecycle import CLAIM

log = logging.getLogger(__name__)

#: Renewals in the time of one claim: two may fail.
RENEWALS_A_CLAIM = 3
#: A sender that has not ended after so many claims hangs; then another one may send its messages.
MOST_CLAIMS = 10


@contextmanager
def renewed(
    ledger: Ledger, claims: Sequence[Claim], *, owner: str, clock: Clock, claim: timedelta = CLAIM
) -> Iterator[None]:
    """Inside, nobody else sends these messages, however slow the broker is; a process that dies renews nothing."""
    ended = threading.Event()
    pause = claim.total_seconds() / RENEWALS_A_CLAIM
    seqs = [each.seq for each in claims]

    def renew_until_ended() -> None:
        for _ in range(RENEWALS_A_CLAIM * MOST_CLAIMS):
            try:
                ledger.transact(renew, seqs, owner=owner, until_ms=ceil_ms(clock.now() + claim))
            except DelayError as error:
                log.warning("The claims of %d messages could not be renewed: %s", len(seqs), error)
            if ended.wait(pause):
                return
        log.error("Sending %d messages has not ended after %s; others may send them", len(seqs), MOST_CLAIMS * claim)

    timer = threading.Timer(pause, renew_until_ended)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        ended.set()
        timer.cancel()
        # Not beside what its caller does next with the ledger.
        timer.join()


def renew(connection: Connection, seqs: Sequence[int], *, owner: str, until_ms: int) -> None:
    """Let the claims of this owner last until then; those that ended or were taken over stay as they are."""
    message = scheduled_message.c
    connection.execute(
        update(scheduled_message)
        .where(is_one_of(connection, message.seq, seqs), message.claimed_by == owner)
        .values(claimed_until_ms=until_ms)
    )
