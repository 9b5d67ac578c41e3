"""Every error this package raises: one root, few branches, each naming the field and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Reach(StrEnum):
    """How far an error reaches while a message is handed to its channel: what may still be sent, and what waits."""

    #: The verdict on this one message, which nobody can send as it is. Only this ends a message.
    MESSAGE = "message"
    #: Nothing can be sent to this channel until somebody mends it; its messages wait.
    CHANNEL = "channel"
    #: Nothing can be sent to this broker until it is back or somebody mends the connection; all its messages wait.
    BROKER = "broker"


class DelayError(Exception):
    """Root of all errors of this package."""

    #: Unless an error says otherwise, it is no verdict on a message: the message waits.
    reach: Reach = Reach.BROKER
    #: Ids of the messages that are not known to be stored; publish exactly these again. None named: all of the call.
    unconfirmed: tuple[str, ...] = ()


class InvalidMessageError(DelayError, ValueError):
    """What the caller asked for cannot be scheduled; nothing was written."""

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
    """The broker has no such queue, exchange or topic; somebody can create it."""

    reach = Reach.CHANNEL


class ConfigurationError(DelayError):
    """A connection or a setting is missing or contradictory."""


class ChannelError(ConfigurationError):
    """A queue, exchange or topic is there, but cannot be used as it is set up."""

    reach = Reach.CHANNEL


class MessagesWaitError(ConfigurationError):
    """It is not taken away while messages wait in it."""


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
        #: Whether the same call may succeed in a moment, with nobody changing anything.
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
        super().__init__(message_id, "is not known; list what is with `airflow delay list`")


class NoRecallError(LifecycleError):
    """The broker holds the message itself and gives nothing back before it is due."""


class ConflictError(LifecycleError):
    """The id is taken by another message."""


class WaitTimeoutError(DelayError):
    """A task has waited for its messages as long as it may; they are still scheduled."""


class StarvedError(DelayError):
    """The watchdog ended a Spark job that nobody worked on."""


class DeferMessage(DelayError):  # noqa: N818 - raised by a handler as a request, not as a failure
    """Raised by a consumer's handler: put the message back and hand it out again after ``delay`` seconds."""

    def __init__(self, delay: float, reason: str = "") -> None:
        super().__init__(reason or f"deferred for {delay} s")
        self.delay = delay
