"""Turn errors into one sentence on stderr and an exit code that scripts can rely on."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from enum import IntEnum
from functools import wraps

from airflow_delay_provider.domain.exceptions import (
    BrokerError,
    ConfigurationError,
    DelayError,
    InvalidMessageError,
    LifecycleError,
    MessagesWaitError,
)

Handler = Callable[[Namespace], None]


class NotConfirmedError(DelayError):
    """The command needs ``--yes``; nothing was changed."""

    def __init__(self, consequence: str) -> None:
        super().__init__(f"{consequence} Pass --yes to confirm.")


class ExitCode(IntEnum):
    """Exit codes of all commands."""

    OK = 0
    #: The id is unknown or exists already, or the state of the message does not allow the change.
    REFUSED = 1
    #: An argument is invalid; nothing was written.
    BAD_INPUT = 2
    #: The broker, the ledger or their configuration is not available.
    UNREACHABLE = 3
    INTERRUPTED = 130


#: Options whose name differs from the field that errors mention.
_OPTIONS = {
    "deliver_at": "--at",
    "deliver_after": "--after",
    "message_id": "--id",
    "headers": "--header",
    "delay_conn_id": "--conn-id",
}


def command(handler: Handler) -> Handler:
    """End a command with a sentence and an exit code instead of a traceback."""

    @wraps(handler)
    def run(args: Namespace) -> None:
        # Creating a SQLite ledger is not worth a log line.
        logging.getLogger("alembic").setLevel(logging.WARNING)
        try:
            handler(args)
            sys.stdout.flush()
        except DelayError as error:
            sys.stderr.write(f"{sentence_of(error)}\n")
            raise SystemExit(int(exit_code_of(error))) from None
        except BrokenPipeError:
            # The reader is gone (`| head`). Python would print an error when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(int(ExitCode.OK)) from None
        except KeyboardInterrupt:
            raise SystemExit(int(ExitCode.INTERRUPTED)) from None

    return run


def exit_code_of(error: BaseException | None) -> ExitCode:
    """Return the exit code for an error; an error that only wraps another one has the code of its cause."""
    match error:
        case InvalidMessageError() | NotConfirmedError():
            return ExitCode.BAD_INPUT
        case LifecycleError() | MessagesWaitError():
            return ExitCode.REFUSED
        case KeyboardInterrupt():
            return ExitCode.INTERRUPTED
        case BrokerError() | ConfigurationError() | None:
            return ExitCode.UNREACHABLE
        case _:
            return exit_code_of(error.__cause__)


def sentence_of(error: DelayError) -> str:
    """Return the error on one line, with the name of the option if it differs from that of the field."""
    text = " ".join(str(error).split())
    field = text.partition(":")[0]
    return f"{_OPTIONS[field]} ({field}){text[len(field) :]}" if field in _OPTIONS else text
