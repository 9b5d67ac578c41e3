"""A dispatcher that kills itself with SIGKILL at a chosen step.

The loops, the ledger and the brokers are the real ones; only the step of the crash is patched in. Ids handed to another
broker are appended to a file, so that the tests see every send, also of a process that died.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import event

from airflow_delay_provider.brokers.ledger import delivery
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.port import Receipt
from airflow_delay_provider.dispatcher.options import DispatcherConfig
from airflow_delay_provider.dispatcher.service import Dispatcher
from airflow_delay_provider.domain.message import Message

#: Messages that are moved together: small, so that a crash finds some that are moved and some that are not.
BATCH = 60
#: Steps inside the one transaction that moves messages into channels of the same database.
STEPS_HERE = ("after_take", "after_mark", "after_publish", "before_commit", "after_commit")
#: Steps of claim, send, mark for another broker.
STEPS_AWAY = ("before_claim_commit", "after_claim", "after_publish", "before_mark_commit", "after_mark")


class Crash:
    """Ends the process, without any clean-up, at the n-th passage."""

    def __init__(self, passages: int) -> None:
        self._left = passages

    def __call__(self, *_: object) -> None:
        self._left -= 1
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Announced(Dispatcher):
    """Creates a file when it works."""

    ready: Path | None = None

    def start(self) -> None:
        super().start()
        if self.ready is not None:
            self.ready.touch()


class LoggedBroker(EmbeddedBroker):
    """The destination, on the embedded broker of another database."""

    sent_log: Path
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None

    def send(self, messages: Sequence[Message]) -> list[Receipt]:
        if self.before:
            self.before()
        with self.sent_log.open("a") as log:
            log.writelines(f"{os.getpid()} {message.id}\n" for message in messages)
        receipts = super().send(messages)
        if self.after:
            self.after()
        return receipts


def crash_after(function_name: str, crash: Crash, *, when: Callable[[Any], bool] = bool) -> None:
    """Let the crash happen after each call of a delivery step that did something."""
    original = getattr(delivery, function_name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if when(result):
            crash()
        return result

    setattr(delivery, function_name, wrapped)


def arm_embedded(step: str, crash: Crash, ledger: Ledger) -> None:
    """Patch the crash into the transaction that delivers here."""
    if step == "after_take":
        crash_after("lock_free_rows", crash)
    elif step == "after_mark":
        crash_after("_mark", crash)
    elif step == "after_publish":
        crash_after("put_into_channel", crash, when=lambda _: True)
    else:
        arm_commit(crash, ledger, marks="deliver_now", before=step == "before_commit")


def arm_external(step: str, crash: Crash, ledger: Ledger, broker: LoggedBroker) -> None:
    """Patch the crash into claim, send or mark."""
    match step:
        case "after_claim":
            broker.before = crash
        case "before_claim_commit":
            crash_after("claim_due", crash)
        case "after_publish":
            broker.after = crash
        case _:
            arm_commit(crash, ledger, marks="mark_dispatched", before=step == "before_mark_commit")


def arm_commit(crash: Crash, ledger: Ledger, *, marks: str, before: bool) -> None:
    """Crash right before, or in the next transaction after, the commit of a transaction that moved messages."""
    moved = {"now": False}
    original = getattr(delivery, marks)

    def noticing(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        moved["now"] = moved["now"] or bool(result)
        return result

    setattr(delivery, marks, noticing)
    event.listen(ledger.engine, "commit" if before else "begin", lambda _: crash() if moved["now"] else None)


def main(arguments: Sequence[str]) -> None:
    """Serve until killed, by oneself or by SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ledger", required=True)
    parser.add_argument("--destination", help="ledger URL of the other broker")
    parser.add_argument("--sent-log", type=Path)
    parser.add_argument("--step", choices=sorted({*STEPS_HERE, *STEPS_AWAY}))
    parser.add_argument("--passages", type=int, default=1)
    parser.add_argument("--claim-seconds", type=float, default=2)
    parser.add_argument("--ready", type=Path)
    options = parser.parse_args(arguments)

    ledger = Ledger(options.ledger)
    broker = None
    if options.destination:
        broker = LoggedBroker(Ledger(options.destination))
        broker.sent_log = options.sent_log
    if options.step:
        crash = Crash(options.passages)
        if broker is None:
            arm_embedded(options.step, crash, ledger)
        else:
            arm_external(options.step, crash, ledger, broker)
    config = DispatcherConfig(
        batch=BATCH,
        claim=timedelta(seconds=options.claim_seconds),
        rescue_interval=timedelta(milliseconds=200),
        health_port=None,
    )
    dispatcher = Announced(ledger, open_broker=lambda _: broker, config=config)
    dispatcher.ready = options.ready
    dispatcher.run_until_signalled()
