"""How a command ends: one sentence on stderr and a code that scripts can rely on."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from enum import IntEnum
from functools import wraps

from airflow_delay_provider.exceptions import (
    BrokerError,
    ConfigurationError,
    DelayError,
    InvalidMessageError,
    LifecycleError,
    MessagesWaitError,
)

Handler = Callable[[Namespace], None]


class ExitCode(IntEnum):
    """What the code of a command says."""

    OK = 0
    #: The message is unknown, taken, or not in a state that allows it.
    REFUSED = 1
    #: Something given is wrong; nothing was written.
    BAD_INPUT = 2
    #: The broker, the ledger or their configuration is not there.
    UNREACHABLE = 3
    INTERRUPTED = 130


#: Where the word of the message and the word of the command line differ.
_OPTIONS = {
    "deliver_at": "--at",
    "deliver_after": "--after",
    "message_id": "--id",
    "headers": "--header",
    "delay_conn_id": "--conn-id",
}


def command(handler: Handler) -> Handler:
    """Let a handler end with a sentence and an exit code instead of a traceback."""

    @wraps(handler)
    def run(args: Namespace) -> None:
        # A new SQLite ledger is no news.
        logging.getLogger("alembic").setLevel(logging.WARNING)
        try:
            handler(args)
            sys.stdout.flush()
        except DelayError as error:
            sys.stderr.write(f"{sentence_of(error)}\n")
            raise SystemExit(int(exit_code_of(error))) from None
        except BrokenPipeError:
            # The reader has seen enough (`| head`); Python would complain when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(int(ExitCode.OK)) from None
        except KeyboardInterrupt:
            raise SystemExit(int(ExitCode.INTERRUPTED)) from None

    return run


def exit_code_of(error: BaseException | None) -> ExitCode:
    """Return the code for an error of this package; one that only adds words to another has the other's code."""
    match error:
        case InvalidMessageError():
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
    """Return the error on one line, with the option beside the field where their names differ."""
    text = " ".join(str(error).split())
    field = text.partition(":")[0]
    return f"{_OPTIONS[field]} ({field}){text[len(field) :]}" if field in _OPTIONS else text
