"""One AMQP connection, its channels, and the thread that serves them."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pika
from pika.channel import Channel
from pika.exceptions import AMQPConnectionError, AMQPError

from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.brokers.rabbitmq.errors import translate
from airflow_delay_provider.domain.exceptions import BrokerError

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

CLOSE_SECONDS = 5.0
RETURNS_UNCOUNTED_SINCE = (4, 3)


class AmqpConnection:
    """A connection whose heartbeats continue whatever the caller does, so a slow handler does not lose it.

    All calls of the client library run in the connection's thread; callers wait for futures. A lost connection stays
    lost: the client opens another one.
    """

    def __init__(self, config: RabbitMQConfig, parameters: pika.ConnectionParameters) -> None:
        self.config = config
        self.lost: BaseException | None = None
        self._opened: Future[None] = Future()
        self._ended = threading.Event()
        self._waiting: set[Future[Any]] = {self._opened}
        self._connection = pika.SelectConnection(
            parameters,
            on_open_callback=lambda _connection: resolve(self._opened, None),
            on_open_error_callback=lambda _connection, error: self._end(error),
            on_close_callback=lambda _connection, error: self._end(error),
        )
        self._thread = threading.Thread(target=self._serve, name="delay-rabbitmq", daemon=True)

    @classmethod
    def open(cls, config: RabbitMQConfig) -> AmqpConnection:
        """Connect to the first host that answers."""
        library = logging.getLogger("pika")
        if library.level == logging.NOTSET:
            # It logs each failure with a traceback; the errors raised here need one sentence.
            library.setLevel(logging.CRITICAL)
        refusal: BaseException = ConnectionError("no hosts")
        for parameters in config.parameters():
            connection = cls(config, parameters)
            connection._thread.start()
            try:
                # The library's own limits end it sooner; this one is for a server that never answers.
                connection._opened.result(2 * config.connect_seconds + 5)
            except Exception as error:  # noqa: BLE001 - whatever the library raises, the next host may answer
                refusal = error
                connection.close()
            else:
                return connection
        raise translate(refusal, config) from refusal

    @property
    def is_open(self) -> bool:
        """Whether it is usable, as far as known."""
        return self.lost is None

    @property
    def server(self) -> str:
        """The product and version of the server."""
        properties = self._connection.server_properties or {}
        return f"{properties.get('product', 'AMQP server')} {properties.get('version', '')}".strip()

    @property
    def counts_returns(self) -> bool:
        """Whether a quorum queue counts ``basic_nack`` as a delivery; at the delivery limit it drops the message.

        Measured: 3.10.8 counts it, 4.3.6 does not. Versions in between are assumed to count it. All versions count
        ``basic_reject`` and a closed channel.
        """
        version = str((self._connection.server_properties or {}).get("version", ""))
        return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < RETURNS_UNCOUNTED_SINCE

    def run(self, work: Callable[[], None]) -> None:
        """Run something in the connection's thread."""
        if self.lost is None:
            self._connection.ioloop.add_callback_threadsafe(work)

    def start(self, begin: Callable[[Future[ResultT]], None]) -> Future[ResultT]:
        """Begin something in the connection's thread and return its future, which fails when the connection is lost."""
        future: Future[ResultT] = Future()
        # Before the thread begins: a connection that is lost in between fails it too.
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)

        def work() -> None:
            if self.lost is not None:
                _fail(future, self.lost)
                return
            try:
                begin(future)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                _fail(future, error)

        self.run(work)
        if self.lost is not None:
            _fail(future, self.lost)
        return future

    def call(self, begin: Callable[[Future[ResultT]], None], *, seconds: float | None = None) -> ResultT:
        """Begin something in the connection's thread and wait for its result.

        Errors of the connection are translated; errors of a channel are left to the caller.
        """
        try:
            return self.start(begin).result(self.config.confirm_seconds if seconds is None else seconds)
        except FutureTimeoutError:
            raise self.no_answer() from None
        except AMQPConnectionError as error:
            raise translate(error, self.config) from error

    def no_answer(self) -> BrokerError:
        """Return the error for a broker that does not answer."""
        return BrokerError(f"{self.config.name}: does not answer; check that it is healthy")

    def open_channel(self) -> AmqpChannel:
        """Return a new channel."""
        raw: Channel = self.call(
            lambda future: self._connection.channel(on_open_callback=lambda channel: resolve(future, channel))
        )
        return AmqpChannel(self, raw)

    @contextmanager
    def channel(self) -> Iterator[AmqpChannel]:
        """Open a channel for a few calls and translate their errors."""
        channel = self.open_channel()
        try:
            yield channel
        except AMQPError as error:
            raise translate(error, self.config) from error
        finally:
            channel.close()

    def close(self) -> None:
        """Close the connection; the broker redelivers unsettled messages."""

        def work() -> None:
            if self._connection.is_open:
                self._connection.close()
            elif not self._connection.is_closing:
                self._end(BrokerError("closed"))

        with suppress(Exception):
            self.run(work)
        self._ended.wait(CLOSE_SECONDS)

    def _serve(self) -> None:
        try:
            self._connection.ioloop.start()
        except Exception as error:  # a defect of the library or of a callback must not leave callers waiting
            log.exception("The connection to %s ended", self.config.name)
            self._end(error)
        finally:
            with suppress(Exception):
                self._connection.ioloop.close()
            self._ended.set()

    def _end(self, error: BaseException) -> None:
        self.lost = error
        for future in list(self._waiting):
            _fail(future, error)
        self._connection.ioloop.stop()


class AmqpChannel:
    """A channel with blocking calls. The broker closes it on every error, and it stays closed."""

    def __init__(self, connection: AmqpConnection, raw: Channel) -> None:
        self.connection = connection
        self.raw = raw
        self.closed: BaseException | None = None
        #: Called in the connection's thread when the channel is closed.
        self.on_closed: list[Callable[[BaseException], None]] = []
        self._waiting: set[Future[Any]] = set()
        raw.add_on_close_callback(lambda _channel, reason: self._close(reason))

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the library and return the broker's answer."""
        return self.wait_for(
            lambda future: getattr(self.raw, method)(**arguments, callback=lambda found: resolve(future, found))
        )

    def send(self, method: str, **arguments: Any) -> None:
        """Call a method of the library without waiting; the broker refuses it by closing the channel."""

        def work() -> None:
            if self.raw.is_open:
                getattr(self.raw, method)(**arguments)

        self.connection.run(work)

    def wait_for(self, begin: Callable[[Future[ResultT]], None]) -> ResultT:
        """Begin something on this channel and return its result; the broker refuses it by closing the channel."""

        def begin_here(future: Future[ResultT]) -> None:
            if self.closed is not None:
                raise self.closed
            self._waiting.add(future)
            future.add_done_callback(self._waiting.discard)
            # When the broker is closing the channel, `_close` fails this future with the reason.
            if self.raw.is_open:
                begin(future)

        return self.connection.call(begin_here)

    def close(self) -> None:
        """Close it; unsettled messages go back to their queue."""

        def begin(future: Future[None]) -> None:
            if self.closed is not None:
                resolve(future, None)
                return
            self.on_closed.append(lambda _reason: resolve(future, None))
            self.raw.close()

        if self.connection.is_open:
            with suppress(Exception):
                self.connection.call(begin, seconds=CLOSE_SECONDS)

    def _close(self, reason: BaseException) -> None:
        self.closed = reason
        for future in list(self._waiting):
            _fail(future, reason)
        for listener in self.on_closed:
            listener(reason)


def resolve(future: Future[ResultT], value: ResultT) -> None:
    """Set the result of a future unless it is done."""
    with suppress(InvalidStateError):
        future.set_result(value)


def _fail(future: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)
