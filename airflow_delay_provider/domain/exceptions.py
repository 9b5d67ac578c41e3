"""Every error of this package. Messages say what is wrong, which field it concerns and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Reach(StrEnum):
    """What an error concerns while messages are sent: which of them wait, and which can still be sent."""

    #: This message, which cannot be sent as it is. Only this makes a message dead.
    MESSAGE = "message"
    #: The channel, until it is repaired; its messages wait.
    CHANNEL = "channel"
    #: The broker, until it is back or its connection is corrected; all its messages wait.
    BROKER = "broker"


class DelayError(Exception):
    """Root of all errors of this package."""

    #: By default an error does not concern a single message: all messages wait.
    reach: Reach = Reach.BROKER
    #: Ids of the messages that may not be stored: publish exactly these again. Empty means all of the call.
    unconfirmed: tuple[str, ...] = ()


class InvalidMessageError(DelayError, ValueError):
    """The message cannot be scheduled as it is; nothing was written."""

    reach = Reach.MESSAGE

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field


class PastDeliveryError(InvalidMessageError):
    """``deliver_at`` has passed and ``on_past="fail"``."""


class TooSoonError(InvalidMessageError):
    """The delay is below the connection's ``min_delay``."""


class TooFarError(InvalidMessageError):
    """The delay is above the connection's ``max_delay``."""


class PayloadError(InvalidMessageError):
    """The payload is too large or cannot be turned into bytes."""


class UnknownChannelError(InvalidMessageError):
    """The broker has no such queue, exchange or topic; create it."""

    reach = Reach.CHANNEL


class ConfigurationError(DelayError):
    """A connection or a setting is missing or contradictory."""


class ChannelError(ConfigurationError):
    """A queue, exchange or topic exists, but its settings do not allow to use it."""

    reach = Reach.CHANNEL


class MessagesWaitError(ConfigurationError):
    """The topology is not deleted because it contains delayed messages."""


class BrokerError(DelayError):
    """The broker refused, did not confirm, or cannot be reached."""

    def __init__(
        self,
        problem: str,
        *,
        unconfirmed: Iterable[str] = (),
        may_pass: bool = True,
        reach: Reach = Reach.BROKER,
    ) -> None:
        super().__init__(problem)
        self.reach = reach
        self.unconfirmed = tuple(unconfirmed)
        #: Whether the same call may succeed soon without any change.
        self.may_pass = may_pass


class LedgerError(BrokerError):
    """The ledger database refused, did not confirm, or cannot be reached."""


class LifecycleError(DelayError):
    """The message is not in a state that allows the request."""

    reach = Reach.MESSAGE

    def __init__(self, message_id: str, problem: str) -> None:
        super().__init__(f"message {message_id!r} {problem}")
        self.message_id = message_id


class UnknownMessageError(LifecycleError):
    """No message with this id is known."""

    def __init__(self, message_id: str) -> None:
        super().__init__(message_id, "is not known; `airflow delay list` shows the known messages")


class NoRecallError(LifecycleError):
    """The broker holds the message itself and cannot return it before it is due."""


class ConflictError(LifecycleError):
    """The id is taken by another message."""


class WaitTimeoutError(DelayError):
    """A task has waited as long as it may; its messages are still scheduled."""


class StarvedError(DelayError):
    """The watchdog ended a Spark job that got no executors."""


class DeferMessage(DelayError):  # noqa: N818 - raised by a handler as a request, not as a failure
    """Raise it in a consumer's handler: the message is delivered again after ``delay`` seconds."""

    def __init__(self, delay: float, reason: str = "") -> None:
        super().__init__(reason or f"deferred for {delay} s")
        self.delay = delay
