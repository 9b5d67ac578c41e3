"""`airflow delay consume`: print the messages of a channel, or run a command for each."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING

from airflow_delay_provider.brokers import consumer
from airflow_delay_provider.brokers.consumer import Consumer, ConsumerConfig, Handler
from airflow_delay_provider.cli.exit_codes import command
from airflow_delay_provider.cli.options import open_hook, parse_seconds
from airflow_delay_provider.cli.output import iso, message_fields, payload_fields, preview, print_document, printable
from airflow_delay_provider.domain.arguments import parse_count
from airflow_delay_provider.domain.exceptions import BrokerError, DeferMessage, DelayError, InvalidMessageError
from airflow_delay_provider.domain.message import require_channel

if TYPE_CHECKING:
    from airflow_delay_provider.domain.message import Message

#: ``EX_TEMPFAIL`` of sysexits.h: the exit code by which a command defers its message.
TEMPORARY_FAILURE = 75
#: A command may run for long, and prefetched messages would become visible again in the meantime.
_PREFETCH_EXEC = 1
_PREFETCH_PRINT = 100


class CommandFailed(DelayError):  # noqa: N818 - dead-letters a message, and is not a failure of this program
    """The command ended with an exit code that dead-letters the message."""


class _Abandon(BaseException):
    """Stops consuming without settling the current message, so that it is redelivered."""


@command
def consume(args: Namespace) -> None:
    """Handle messages until the limit, the timeout or a signal."""
    if args.exec is not None and args.print:
        raise InvalidMessageError("exec", "cannot be combined with --print", "give only one of them")
    handler = _printer(args) if args.exec is None else _runner(args)
    channel = require_channel(args.channel)
    config = ConsumerConfig(
        max_handled=parse_count("max-handled", args.max_handled),
        dead_letter_channel=None if args.dead_letter_channel is None else require_channel(args.dead_letter_channel),
        prefetch=_PREFETCH_PRINT if args.exec is None else _PREFETCH_EXEC,
        visibility=parse_seconds("visibility", args.visibility),
    )
    limit = None if args.limit is None else parse_count("limit", args.limit)
    timeout = None if args.timeout is None else parse_seconds("timeout", args.timeout)
    with open_hook(args.conn_id) as hook, _stop_on_signals() as stop, _one_line_for_failed_commands():
        try:
            done = Consumer(hook.get_conn(), channel, handler, config=config).run(
                limit=limit, timeout=timeout, stop=stop
            )
        except _Abandon as abandoned:
            if abandoned.__cause__ is not None:
                raise abandoned.__cause__ from None
            raise
    sys.stderr.write(f"handled {done.handled}, deferred {done.deferred}, dead-lettered {done.dead_lettered}\n")


def _printer(args: Namespace) -> Handler:
    def print_message(message: Message) -> None:
        try:
            if args.output == "json":
                print_document(message_fields(message) | payload_fields(message.payload))
            else:
                sys.stdout.write(f"{iso(message.deliver_at)}  {message.id}  {preview(message.payload)}\n")
            # The message is acknowledged only after it has left this process.
            sys.stdout.flush()
        except OSError as error:
            # A closed pipe must not dead-letter the message.
            raise _Abandon from error

    return print_message


def _runner(args: Namespace) -> Handler:
    argv = _parse_command(args.exec)
    defer_seconds = parse_seconds("defer-seconds", args.defer_seconds).total_seconds()

    def run_command(message: Message) -> None:
        code = _run(argv, message)
        if code == TEMPORARY_FAILURE:
            raise DeferMessage(defer_seconds, f"the command deferred it for {defer_seconds:g} s")
        if code != 0:
            how = f"exited with {code}" if code > 0 else f"was killed by signal {-code}"
            raise CommandFailed(f"{printable(argv[0])} {how}")

    return run_command


def _parse_command(text: str) -> list[str]:
    try:
        argv = shlex.split(text)
    except ValueError as error:
        raise InvalidMessageError("exec", f"{text!r} is not a command ({error})", "close the quotes") from None
    if not argv or shutil.which(argv[0]) is None:
        raise InvalidMessageError("exec", f"{text!r} is not a command", "name an executable program")
    return argv


def _run(argv: Sequence[str], message: Message) -> int:
    try:
        # In its own process group, so that Ctrl-C lets the command finish and the message is settled.
        process = subprocess.Popen(  # noqa: S603 - running the user's command is the purpose
            argv, stdin=subprocess.PIPE, env=os.environ | _environment_of(message), process_group=0
        )
    except OSError as error:
        # A command that does not start says nothing about the message.
        raise _Abandon from BrokerError(f"exec: {argv[0]} could not be started ({error.strerror}); try again")
    with process:
        try:
            process.communicate(message.payload)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    return process.returncode


def _environment_of(message: Message) -> dict[str, str]:
    return {
        "DELAY_MESSAGE_ID": message.id,
        "DELAY_CHANNEL": message.channel,
        "DELAY_KEY": message.key or "",
        "DELAY_HEADERS": json.dumps(dict(message.headers)),
        "DELAY_CONTENT_TYPE": message.content_type,
        "DELAY_PRIORITY": str(message.priority),
        "DELAY_DELIVER_AT": iso(message.deliver_at) or "",
        "DELAY_HANDLED_COUNT": str(message.handled_count),
    }


@contextmanager
def _stop_on_signals() -> Iterator[Event]:
    """Stop after the current message on the first SIGINT or SIGTERM, at once on the second."""
    stop = Event()

    def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _one_line_for_failed_commands() -> Iterator[None]:
    """Keep the consumer from logging a traceback for the exit code of a command."""

    def without_traceback(record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], CommandFailed):
            record.exc_info = None
        return True

    consumer.log.addFilter(without_traceback)
    try:
        yield
    finally:
        consumer.log.removeFilter(without_traceback)
