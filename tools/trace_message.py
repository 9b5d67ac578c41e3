"""``python -m tools.trace_message [embedded|rabbitmq|kafka|spark ...]``: which files does one message run through?

Counts the package's files in which a function runs, and the calls that go from one file to another, on all threads.
One message goes before the traced one, so that imports, topology and the first connections are not counted.
RabbitMQ and Kafka are the servers in the environment variables of the tests.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from datetime import timedelta
from io import StringIO
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch
from uuid import uuid4

PACKAGE = str(Path(__file__).parents[1] / "airflow_delay_provider") + os.sep
PATIENCE = timedelta(seconds=60)
#: Long enough that the message waits and is not sent at once.
DELAY_SECONDS = 1.0


class Trace:
    """Files of the package and the calls between them, while it is on."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.jumps: Counter[tuple[str, str]] = Counter()
        self._file_of: dict[CodeType, str | None] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # None is right, typeshed says otherwise

    def _see(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or (called := self._file(frame.f_code)) is None:
            return
        self.calls[called] += 1
        caller = self._nearest_file(frame.f_back)
        if caller is not None and caller != called:
            self.jumps[caller, called] += 1

    def _nearest_file(self, frame: FrameType | None) -> str | None:
        while frame is not None:
            if (found := self._file(frame.f_code)) is not None:
                return found
            frame = frame.f_back
        return None

    def _file(self, code: CodeType) -> str | None:
        if code not in self._file_of:
            file = code.co_filename.removeprefix(PACKAGE)
            # The test kit only stands in for Airflow; a module's own code runs when it is imported.
            counts = file != code.co_filename and not file.startswith("testing/") and code.co_name != "<module>"
            self._file_of[code] = file if counts else None
        return self._file_of[code]


class Dispatched:
    """Counts what a loop of the dispatcher has dispatched."""

    messages = 0

    def dispatched(self, _by_channel: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        self.messages += len(lateness_ms)


@contextmanager
def connection(conn_id: str, **fields: Any) -> Iterator[str]:
    """Define an Airflow connection for this process."""
    with patch.dict(os.environ, {f"AIRFLOW_CONN_{conn_id.upper()}": json.dumps(fields)}):
        yield conn_id


def schedule(conn_id: str, channel: str, message_id: str) -> None:
    from airflow_delay_provider.operators.schedule import ScheduleMessageOperator
    from airflow_delay_provider.testing.task_run import TaskRun

    operator = ScheduleMessageOperator(
        task_id="remind",
        delay_conn_id=conn_id,
        channel=channel,
        message_id=message_id,
        payload={"order": 1},
        deliver_after=DELAY_SECONDS,
    )
    TaskRun(operator, run_id=message_id)


def receive(hook: Any, channel: str, dispatch: Callable[[], object]) -> None:
    """Consume one message as a task does, once it is dispatched."""
    time.sleep(DELAY_SECONDS + 0.1)
    dispatch()
    handled = hook.consume(channel, lambda _message: None, limit=1, timeout=PATIENCE).handled
    if handled != 1:
        raise TimeoutError(f"no message came from {channel}")


def trace_embedded() -> Trace:
    from airflow_delay_provider.brokers.ledger.database import Ledger
    from airflow_delay_provider.hooks.delay import DelayHook

    with ExitStack() as stack:
        url = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/ledger.db"
        conn_id = stack.enter_context(connection("traced", conn_type="delay", extra={"ledger_url": url}))
        hook = stack.enter_context(closing(DelayHook(conn_id)))
        ledger = stack.enter_context(closing(Ledger(url)))
        return trace_second(conn_id, "orders", hook, embedded_loop(ledger).run_once)


def trace_rabbitmq() -> Trace:
    from airflow_delay_provider.hooks.rabbitmq import RabbitMQHook
    from tests.rabbits import connection_of, declare_queue, fresh_vhost

    with ExitStack() as stack:
        url = stack.enter_context(fresh_vhost())
        declare_queue(url, "orders")
        conn_id = stack.enter_context(connection("traced", **connection_of(url, tick=0.1)))
        hook = stack.enter_context(closing(RabbitMQHook(conn_id)))
        # RabbitMQ dispatches by itself.
        return trace_second(conn_id, "orders", hook, lambda: None)


def trace_kafka() -> Trace:
    from airflow_delay_provider.brokers.ledger.database import Ledger
    from airflow_delay_provider.dispatcher.dispatch_kafka import DispatchKafka
    from airflow_delay_provider.dispatcher.loop import Context
    from airflow_delay_provider.dispatcher.options import DispatcherConfig
    from airflow_delay_provider.domain.clock import SystemClock
    from airflow_delay_provider.hooks.delay import open_destination
    from airflow_delay_provider.hooks.kafka import KafkaHook
    from tests.kafkas import connection_of, delete_ladder, fresh_topic, require_kafka

    bootstrap = require_kafka()
    with ExitStack() as stack:
        settings = {"ladder": f"trace-{uuid4().hex[:8]}", "partitions": 1}
        conn_id = stack.enter_context(connection("traced", **connection_of(bootstrap, **settings)))
        hook = stack.enter_context(closing(KafkaHook(conn_id)))
        broker: Any = hook.get_conn()
        broker.create_topology()
        stack.callback(delete_ladder, broker)
        ledger = stack.enter_context(closing(Ledger("sqlite://")))
        seen = Dispatched()
        context = Context(ledger=ledger, clock=SystemClock(), config=DispatcherConfig(), observers=[seen])
        loop = stack.enter_context(closing(DispatchKafka(context, conn_id, open_destination)))
        channel = fresh_topic(bootstrap)

        def dispatch() -> None:
            before, deadline = seen.messages, time.monotonic() + PATIENCE.total_seconds()
            while seen.messages == before and time.monotonic() < deadline:
                loop.run_once()

        return trace_second(conn_id, channel, hook, dispatch)


def trace_second(conn_id: str, channel: str, hook: Any, dispatch: Callable[[], object]) -> Trace:
    """Trace a message that follows another one on the same clients."""
    schedule(conn_id, channel, "first")
    receive(hook, channel, dispatch)
    trace = Trace()
    with trace.on():
        schedule(conn_id, channel, "second")
        receive(hook, channel, dispatch)
    return trace


def trace_spark() -> Trace:
    """A task whose first two submissions fail; a program takes the place of spark-submit."""
    from airflow_delay_provider.brokers.ledger.database import Ledger

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = f"sqlite:///{folder}/ledger.db"
        stack.enter_context(connection("delay_default", conn_type="delay", extra={"ledger_url": url}))
        stack.enter_context(connection("spark_default", conn_type="spark", host="local[1]"))
        ledger = stack.enter_context(closing(Ledger(url)))
        trace = Trace()
        fail_twice(folder / "first", ledger, Trace())
        fail_twice(folder / "second", ledger, trace)
        return trace


def fail_twice(folder: Path, ledger: Any, trace: Trace) -> None:
    """Run the task until it succeeds, with its trigger and the dispatcher in between."""
    from airflow_delay_provider.domain.backoff import Backoff
    from airflow_delay_provider.operators.spark import SparkSubmitRetryOperator
    from airflow_delay_provider.spark.retries import SparkRetries
    from airflow_delay_provider.testing.task_run import TaskRun
    from tests.unit.airflow.submitting import REFUSED, SparkSubmit, TaskStateStore

    pause = timedelta(seconds=DELAY_SECONDS)
    operator = SparkSubmitRetryOperator(
        task_id="load",
        application="job.py",
        spark_binary=SparkSubmit(folder, REFUSED, REFUSED).path,
        spark_retries=SparkRetries(backoff=Backoff(initial=pause, floor=pause, cap=pause)),
        retries=1,
    )
    loop = embedded_loop(ledger)
    with trace.on():
        run = TaskRun(operator, run_id=folder.name, task_state_store=TaskStateStore())
        while run.waiting:
            time.sleep(DELAY_SECONDS + 0.1)
            loop.run_once()
            run.resume()


def embedded_loop(ledger: Any) -> Any:
    """The loop of a dispatcher that dispatches messages of the ledger."""
    from airflow_delay_provider.dispatcher.dispatch_embedded import DispatchEmbedded
    from airflow_delay_provider.dispatcher.loop import Context
    from airflow_delay_provider.dispatcher.options import DispatcherConfig
    from airflow_delay_provider.domain.clock import SystemClock

    return DispatchEmbedded(Context(ledger=ledger, clock=SystemClock(), config=DispatcherConfig()))


SCENARIOS: dict[str, Callable[[], Trace]] = {
    "embedded": trace_embedded,
    "rabbitmq": trace_rabbitmq,
    "kafka": trace_kafka,
    "spark": trace_spark,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.trace_message", description="Trace one message.")
    parser.add_argument("scenario", nargs="*", help=f"of {', '.join(SCENARIOS)}; default: all")
    parser.add_argument("--verbose", action="store_true", help="name the files and the calls in each")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    results = {}
    for name in options.scenario or SCENARIOS:
        with redirect_stdout(StringIO()):
            results[name] = SCENARIOS[name]()
    print(f"{'message':<10} {'files':>5} {'jumps':>6}")
    for name, trace in results.items():
        print(f"{name:<10} {len(trace.calls):>5} {trace.jumps.total():>6}")
    if options.verbose:
        for name, trace in results.items():
            print(f"\n{name}: calls, file")
            for file, calls in sorted(trace.calls.items()):
                print(f"{calls:>6} {file}")


if __name__ == "__main__":
    main()
