"""One connection to RabbitMQ and the thread that serves it."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, TypeVar

import pika
from pika.channel import Channel
from pika.exceptions import AMQPConnectionError

from airflow_delay_provider.brokers.rabbitmq.config import RabbitMQConfig
from airflow_delay_provider.brokers.rabbitmq.errors import translate
from airflow_delay_provider.exceptions import BrokerError

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

CLOSE_SECONDS = 5.0
RETURNS_UNCOUNTED_SINCE = (4, 3)


class Session:
    """Heartbeats go on whatever the caller does, so a slow handler loses no connection.

    All calls of the client library run in the session's thread; callers wait for futures. A session that was lost stays
    lost: the broker opens another one.
    """

    def __init__(self, config: RabbitMQConfig, parameters: pika.ConnectionParameters) -> None:
        self.config = config
        self.lost: BaseException | None = None
        self._opened: Future[None] = Future()
        self._ended = threading.Event()
        self._waiting: set[Future[Any]] = {self._opened}
        self._connection = pika.SelectConnection(
            parameters,
            on_open_callback=lambda _connection: answer(self._opened, None),
            on_open_error_callback=lambda _connection, error: self._end(error),
            on_close_callback=lambda _connection, error: self._end(error),
        )
        self._thread = threading.Thread(target=self._serve, name="delay-rabbitmq", daemon=True)

    @classmethod
    def open(cls, config: RabbitMQConfig) -> Session:
        """Connect to the first host that answers."""
        library = logging.getLogger("pika")
        if library.level == logging.NOTSET:
            # It logs each failure with its traceback; the errors raised here say it in one sentence.
            library.setLevel(logging.CRITICAL)
        refusal: BaseException = BrokerError("no hosts")
        for parameters in config.parameters():
            session = cls(config, parameters)
            session._thread.start()
            try:
                # The library's own limits end it sooner; this one is for a server that says nothing at all.
                session._opened.result(2 * config.connect_seconds + 5)
            except Exception as error:  # noqa: BLE001 - whatever the library raises, the next host may answer
                refusal = error
                session.close()
            else:
                return session
        raise translate(refusal, config) from refusal

    @property
    def is_open(self) -> bool:
        """Whether it can be used, as far as known."""
        return self.lost is None

    @property
    def server(self) -> str:
        """What the server calls itself."""
        properties = self._connection.server_properties or {}
        return f"{properties.get('product', 'AMQP server')} {properties.get('version', '')}".strip()

    @property
    def counts_returns(self) -> bool:
        """Whether a quorum queue counts a message that is given back with ``basic_nack`` as one more delivery.

        Up to the delivery limit: then it is dropped or dead-lettered. Measured: 3.10.8 counts it, 4.3.6 does not.
        Versions between are taken to count it; ``basic_reject`` and a closed channel are counted by all.
        """
        version = str((self._connection.server_properties or {}).get("version", ""))
        return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < RETURNS_UNCOUNTED_SINCE

    def run(self, work: Callable[[], None]) -> None:
        """Let the session's thread do something."""
        if self.lost is None:
            self._connection.ioloop.add_callback_threadsafe(work)

    def start(self, begin: Callable[[Future[ResultT]], None]) -> Future[ResultT]:
        """Let the session's thread begin something and return the future of its answer; it fails with the session."""
        future: Future[ResultT] = Future()
        # Before the thread is told: a session that ends in between fails it too.
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

    def ask(self, begin: Callable[[Future[ResultT]], None], *, seconds: float | None = None) -> ResultT:
        """Let the session's thread begin something and wait until its future is answered.

        A lost connection is told in this package's words; what the broker says of a channel is left to the caller.
        """
        try:
            return self.start(begin).result(self.config.confirm_seconds if seconds is None else seconds)
        except FutureTimeoutError:
            raise self.silent() from None
        except AMQPConnectionError as error:
            raise translate(error, self.config) from error

    def silent(self) -> BrokerError:
        """Return the error for a broker that does not answer."""
        return BrokerError(f"{self.config.name}: does not answer; check that it is well")

    def open_channel(self) -> AmqpChannel:
        """Return a new channel."""
        raw: Channel = self.ask(lambda future: _begin_channel(self._connection, future))
        return AmqpChannel(self, raw)

    def close(self) -> None:
        """Close the connection; whatever was not settled is handed out again."""

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
        except Exception as error:  # a defect of the library or of a callback: nobody may wait for ever
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
    """A channel whose answers can be waited for. The broker closes it on every error; then it stays closed."""

    def __init__(self, session: Session, raw: Channel) -> None:
        self.session = session
        self.raw = raw
        self.closed: BaseException | None = None
        #: Told when the channel is closed, in the session's thread.
        self.on_closed: list[Callable[[BaseException], None]] = []
        self._waiting: set[Future[Any]] = set()
        raw.add_on_close_callback(lambda _channel, reason: self._close(reason))

    def ask(self, method: str, **arguments: Any) -> Any:
        """Make one call of the library and return the broker's answer to it."""
        return self.wait_for(
            lambda future: getattr(self.raw, method)(**arguments, callback=lambda found: answer(future, found))
        )

    def tell(self, method: str, **arguments: Any) -> None:
        """Make one call of the library without an answer; the broker refuses it by closing the channel."""

        def work() -> None:
            if self.raw.is_open:
                getattr(self.raw, method)(**arguments)

        self.session.run(work)

    def wait_for(self, begin: Callable[[Future[ResultT]], None]) -> ResultT:
        """Begin something on this channel and return its answer; the broker refuses it by closing the channel."""

        def begin_here(future: Future[ResultT]) -> None:
            if self.closed is not None:
                raise self.closed
            self._waiting.add(future)
            future.add_done_callback(self._waiting.discard)
            # One that the broker is just closing tells everybody who waits why.
            if self.raw.is_open:
                begin(future)

        return self.session.ask(begin_here)

    def close(self) -> None:
        """Close it; what it was handed and has not settled goes back."""

        def begin(future: Future[None]) -> None:
            if self.closed is not None:
                answer(future, None)
                return
            self.on_closed.append(lambda _reason: answer(future, None))
            self.raw.close()

        if self.session.is_open:
            with suppress(Exception):
                self.session.ask(begin, seconds=CLOSE_SECONDS)

    def _close(self, reason: BaseException) -> None:
        self.closed = reason
        for future in list(self._waiting):
            _fail(future, reason)
        for listener in self.on_closed:
            listener(reason)


def _begin_channel(connection: pika.SelectConnection, future: Future[Channel]) -> None:
    connection.channel(on_open_callback=lambda channel: answer(future, channel))


def answer(future: Future[ResultT], value: ResultT) -> None:
    """Answer one who may have an answer already."""
    with suppress(InvalidStateError):
        future.set_result(value)


def _fail(future: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):
        future.set_exception(error)
