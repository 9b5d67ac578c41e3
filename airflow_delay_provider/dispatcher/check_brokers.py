"""Write to the ledger whether the brokers of this dispatcher answer, and what is wrong with their topologies."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from traceback import extract_tb

from airflow_delay_provider.brokers.ledger import broker_status
from airflow_delay_provider.brokers.port import HasTopology
from airflow_delay_provider.dispatcher.broker_connection import BrokerConnection, OpenBroker
from airflow_delay_provider.dispatcher.loop import Context
from airflow_delay_provider.domain.exceptions import DelayError

log = logging.getLogger(__name__)

INTERVAL = timedelta(seconds=5)
#: A broker that any dispatcher has checked since then is not checked again.
CHECKED_SINCE = timedelta(seconds=4)
#: A check that takes longer is reported as failed while it goes on.
SLOW_SECONDS = 8.0
VERIFY_INTERVAL = timedelta(minutes=5)
SKEW_SECONDS = 10.0
#: For the answers of brokers that respond quickly.
WAIT_SECONDS = 1.0
CLOSE_SECONDS = 2.0


class CheckBrokers:
    """Checks each connection in a thread of its own: a broker that hangs delays the check of no other one.

    The brokers are those whose journals this dispatcher copies, whose messages it moves, and to which the ledger has
    messages.
    """

    name = "check_brokers"

    def __init__(self, context: Context, open_broker: OpenBroker) -> None:
        self._context = context
        self._open_broker = open_broker
        self._checkers: dict[str, _Checker] = {}
        #: Those of connections that are not needed any more; they may still be closing.
        self._ending: list[_Checker] = []
        self._is_first = True

    def run_once(self) -> float:
        """Ask for a check of each broker that needs one, and report brokers that do not answer."""
        began = time.monotonic()
        config, ledger = self._context.config, self._context.ledger
        with ledger.read() as connection:
            names = {*config.index, *config.kafka, *broker_status.destinations(connection)}
            needed = {each for each in names if broker_status.needs_check(connection, each, since=CHECKED_SINCE)}
        if self._is_first:
            ledger.transact(broker_status.forget_old)
            self._is_first = False
        for gone in self._checkers.keys() - names:
            self._ending = [each for each in self._ending if each.is_alive]
            self._ending.append(self._checkers.pop(gone))
            self._ending[-1].stop()
        for conn_id in sorted(needed):
            if conn_id not in self._checkers:
                self._checkers[conn_id] = _Checker(self._context, conn_id, self._open_broker)
            self._checkers[conn_id].ask()
        # Most answers come at once; the next run sees the others.
        for checker in self._checkers.values():
            checker.answered.wait(max(0.0, began + WAIT_SECONDS - time.monotonic()))
        for conn_id, checker in self._checkers.items():
            if checker.seconds >= SLOW_SECONDS and conn_id in needed:
                problem = f"the broker has not answered for {checker.seconds:.0f} s"
                ledger.transact(broker_status.write_failed, conn_id, error=problem)
        return max(0.0, INTERVAL.total_seconds() - (time.monotonic() - began))

    def close(self) -> None:
        """End the threads; one whose broker hangs ends with the process."""
        checkers = [*self._checkers.values(), *self._ending]
        for checker in checkers:
            checker.stop()
        deadline = time.monotonic() + CLOSE_SECONDS
        for checker in checkers:
            checker.join(max(0.0, deadline - time.monotonic()))
        self._checkers.clear()


class _Checker:
    """Checks one broker whenever it is asked to, in the thread to which the broker's client belongs."""

    def __init__(self, context: Context, conn_id: str, open_broker: OpenBroker) -> None:
        #: Set unless a check was asked for and has not ended.
        self.answered = threading.Event()
        self.answered.set()
        self._ledger = context.ledger
        self._conn_id = conn_id
        self._connection = BrokerConnection(conn_id, open_broker, reread=context.config.reread_interval)
        self._wake = threading.Event()
        self._stopped = False
        self._began_at: float | None = None
        self._error: str | None = None
        self._open_broker = open_broker
        self._verification: threading.Thread | None = None
        self._skew = _Every(SKEW_SECONDS)
        self._thread = threading.Thread(target=self._run, name=f"delay-check-{conn_id}", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """For how long a check has been under way."""
        began_at = self._began_at
        return 0.0 if began_at is None else time.monotonic() - began_at

    @property
    def is_alive(self) -> bool:
        """Whether it has not closed its broker yet."""
        return self._thread.is_alive()

    def ask(self) -> None:
        """Ask for a check, unless one is under way."""
        if self._began_at is None:
            self.answered.clear()
            self._wake.set()

    def stop(self) -> None:
        """Close the broker after the current check."""
        self._stopped = True
        self._wake.set()

    def join(self, seconds: float) -> None:
        """Wait until the broker is closed, and a verification has ended."""
        deadline = time.monotonic() + seconds
        self._thread.join(seconds)
        if self._verification is not None:
            self._verification.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            if not self._stopped:
                self._began_at = time.monotonic()
                self._guard(self._check)
                self._began_at = None
                self.answered.set()
                self._guard(self._measure_skew)
        self._connection.close()

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:
            # The ledger cannot be written to, which other loops report; the next check may succeed.
            log.warning("The status of connection %s was not written", self._conn_id, exc_info=True)

    def _check(self) -> None:
        try:
            broker = self._connection.get()
            description = broker.check()
        except Exception as error:  # noqa: BLE001 - whatever a client or a secrets backend raises
            self._report(error)
            return
        if self._error is not None:
            log.info("Connection %s works again", self._conn_id)
            self._error = None
        self._ledger.transact(broker_status.write_reached, self._conn_id, description=_one_line(description))
        if isinstance(broker, HasTopology):
            self._verify_now_and_then()

    def _report(self, error: Exception) -> None:
        self._connection.close()
        found = describe(error)
        if found != self._error:
            log.warning("Connection %s does not work: %s", self._conn_id, _locate(error))
            self._error = found
        self._ledger.transact(broker_status.write_failed, self._conn_id, error=found)

    def _measure_skew(self) -> None:
        """Ask for the broker's time after a check, since another server than the broker may tell it, slowly."""
        if self._error is None and self._skew.is_due():
            skew = self._connection.get().clock_skew()
            if skew is not None:
                self._ledger.transact(broker_status.write_skew, self._conn_id, skew)

    def _verify_now_and_then(self) -> None:
        """Verify the topology beside the checks: that may take half a minute."""
        if self._verification is not None and self._verification.is_alive():
            return
        with self._ledger.read() as connection:
            if not broker_status.needs_verification(connection, self._conn_id, since=VERIFY_INTERVAL):
                return
        self._verification = threading.Thread(
            target=self._guard, args=(self._verify,), name=f"delay-verify-{self._conn_id}", daemon=True
        )
        self._verification.start()

    def _verify(self) -> None:
        try:
            with self._open_broker(self._conn_id) as broker:
                issues = broker.verify_topology() if isinstance(broker, HasTopology) else []
        except Exception as error:  # noqa: BLE001 - the next check reports a broker that is down
            log.warning("The topology of connection %s was not verified: %s", self._conn_id, _locate(error))
            return
        # The ledger is closed after the loops.
        if not self._stopped:
            self._ledger.transact(broker_status.write_topology, self._conn_id, issues)


class _Every:
    """Tells whether it is time for what happens from time to time; the first time is now."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0

    def is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


def describe(error: Exception) -> str:
    """Return why a check failed; of errors of other packages only the type, as their texts may contain secrets."""
    if isinstance(error, DelayError):
        return _one_line(str(error))
    return f"{type(error).__name__}; see the log of the dispatcher"


def _locate(error: Exception) -> str:
    """Return what to log of an error: where it comes from, if its text may contain secrets."""
    if isinstance(error, DelayError):
        return str(error)
    frame = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.name} ({Path(frame.filename).name}, line {frame.lineno})"


def _one_line(text: str) -> str:
    return " ".join(text.split())
