"""Every error this package raises: one root, few branches, each naming the field and the remedy."""

from __future__ import annotations

from collections.abc import Iterable


class DelayError(Exception):
    """Root of all errors of this package."""


class InvalidMessageError(DelayError, ValueError):
    """What the caller asked for cannot be scheduled; nothing was written."""

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
    """The broker has no such queue, exchange or topic."""


class ConfigurationError(DelayError):
    """A connection or a setting is missing or contradictory."""


class MessagesWaitError(ConfigurationError):
    """It is not taken away while messages wait in it."""


class BrokerError(DelayError):
    """The broker refused, did not confirm, or cannot be reached."""

    def __init__(self, problem: str, *, unconfirmed: Iterable[str] = (), may_pass: bool = True) -> None:
        super().__init__(problem)
        #: Ids of the messages that are not known to be stored; publish exactly these again.
        self.unconfirmed = tuple(unconfirmed)
        #: Whether the same call may succeed in a moment, with nobody changing anything.
        self.may_pass = may_pass


class LedgerError(BrokerError):
    """The ledger database refused, did not confirm, or cannot be reached."""


class LifecycleError(DelayError):
    """The message is not in a state that allows the request."""

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


class StarvedError(DelayError):
    """The watchdog ended a Spark job that nobody worked on."""


class DeferMessage(DelayError):  # noqa: N818 - raised by a handler as a request, not as a failure
    """Raised by a consumer's handler: put the message back and hand it out again after ``delay`` seconds."""

    def __init__(self, delay: float, reason: str = "") -> None:
        super().__init__(reason or f"deferred for {delay} s")
        self.delay = delay
