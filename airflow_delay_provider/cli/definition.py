"""Command and option definitions. Airflow reads them at every call, so the code behind them is loaded on use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from airflow.cli.cli_config import ActionCommand, Arg, GroupCommand, lazy_load_command

from airflow_delay_provider.dispatcher.options import OPTIONS
from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL


def _arg(*flags: str, **how: Any) -> Arg:
    return Arg(flags, **how)  # type: ignore[no-untyped-call] # Airflow's class carries no types


_EXIT_CODES = (
    "Exit codes: 0 success, 1 refused by the state of the message, 2 invalid input, 3 broker or ledger not available."
)

_CONN_ID = _arg(
    "--conn-id", default=DEFAULT_CONN_ID, help=f"Airflow connection of the broker. Default: {DEFAULT_CONN_ID}."
)
_OUTPUT = _arg("-o", "--output", choices=("table", "json"), default="table", help="Output format. Default: table.")
_COMMON = (_CONN_ID, _OUTPUT)
_YES = _arg("-y", "--yes", action="store_true", help="Confirm.")
_HOLD = _arg(
    "--hold",
    choices=("broker", "ledger"),
    help="Who holds the message until it is due. Default: as set in the connection.",
)

_CHANNEL = _arg("channel", metavar="CHANNEL", help="Channel of the messages.")
_OPTIONAL_CHANNEL = _arg(
    "channel", metavar="CHANNEL", nargs="?", help="Channel to deliver to. Lines of --file can name their own."
)
_ONE_CHANNEL = _arg("--channel", help="Only messages of this channel.")
_IDS = _arg("ids", metavar="ID", nargs="+", help="Message ids. Either all of these messages are changed or none.")

_AT = _arg("--at", metavar="TIME", help="Delivery time, ISO-8601 with a time zone: 2030-01-31T17:00:00Z.")
_AFTER = _arg("--after", metavar="SECONDS", help="Delay from now.")
_PAGE = _arg("--page", metavar="TOKEN", help="Page to show, as printed below a list.")
_ON_PAST = _arg(
    "--on-past",
    choices=("deliver", "fail"),
    default="deliver",
    help="What to do if the time has passed. Default: deliver.",
)

_MESSAGE = (
    _arg("--payload", metavar="TEXT", help="Payload, as text."),
    _arg("--payload-file", metavar="FILE", help="Read the payload from this file, or from stdin if it is -."),
    _arg("--id", help="Message id. Default: a new one."),
    _arg("--key", help="Message key, for example of a Kafka record."),
    _arg("--header", metavar="NAME=VALUE", action="append", help="Header. Can be repeated."),
    _arg(
        "--content-type",
        metavar="TYPE",
        help="Content type. Default: text/plain for --payload, application/octet-stream for --payload-file.",
    ),
    _arg("--priority", metavar="NUMBER", default="0", help="Priority, 0 to 255. Default: 0."),
)


def get_delay_cli_commands() -> list[GroupCommand | ActionCommand]:
    """Return the group ``airflow delay``."""
    return [
        GroupCommand(
            name="delay",
            help="Schedule, inspect and control delayed messages.",
            subcommands=(
                *_schedule(),
                *_messages(),
                *_control(),
                _retries(),
                _consume(),
                _dispatcher(),
                _topology(),
                _db(),
            ),
        )
    ]


def _schedule() -> tuple[ActionCommand, ...]:
    return (
        _command(
            "schedule",
            "Schedule a message, or one message for each line of a file.",
            "schedule.schedule",
            _OPTIONAL_CHANNEL,
            *_MESSAGE,
            _arg("--file", metavar="FILE", help="Schedule each line of this JSON Lines (.jsonl) or CSV (.csv) file."),
            _AT,
            _AFTER,
            _ON_PAST,
            _arg(
                "--on-conflict",
                choices=("keep", "fail", "replace"),
                default="keep",
                help="What to do if the id exists already. Default: keep the existing message.",
            ),
            _HOLD,
        ),
        _command("send", "Send a message now, without a delay.", "schedule.send", _CHANNEL, *_MESSAGE, _HOLD),
    )


def _messages() -> tuple[ActionCommand, ...]:
    return (
        _command(
            "list",
            "List messages by delivery time.",
            "messages.list_messages",
            _ONE_CHANNEL,
            _arg("--state", action="append", help="Only messages in this state (name or code). Can be repeated."),
            _arg("--limit", metavar="NUMBER", default="100", help="Messages per page. Default: 100."),
            _PAGE,
        ),
        _command(
            "show",
            "Show a message and its history.",
            "messages.show",
            _arg("id", metavar="ID", help="Message id."),
            _arg("--payload", action="store_true", help="Print only the payload. With -o json, include it."),
        ),
        _command(
            "status", "Count messages by channel and state, and list the dispatchers.", "messages.status", _ONE_CHANNEL
        ),
    )


def _control() -> tuple[ActionCommand, ...]:
    return (
        _command("cancel", "Cancel scheduled messages.", "control.cancel", _IDS, _HOLD),
        _command(
            "reschedule",
            "Change the delivery time of scheduled messages.",
            "control.reschedule",
            _IDS,
            _AT,
            _AFTER,
            _ON_PAST,
            _HOLD,
        ),
        _command("expedite", "Deliver scheduled messages now.", "control.expedite", _IDS, _HOLD),
        _command(
            "replay",
            "Send dead messages to their channels again.",
            "control.replay",
            _arg("ids", metavar="ID", nargs="*", help="Message ids. Default: all messages that match the filters."),
            _ONE_CHANNEL,
            _arg(
                "--dead-letter-channel",
                metavar="CHANNEL",
                help="Where consumers put dead messages. Default: CHANNEL.dead.",
            ),
            _arg("--dag-id", help="Only messages of this DAG."),
            _arg("--run-id", help="Only messages of this DAG run."),
            _arg("--task-id", help="Only messages of this task."),
            _arg("--reason", metavar="TEXT", help="Only messages whose reason contains this text."),
            _arg("--since", metavar="TIME", help="Only messages that died at this time or later."),
            _arg("--until", metavar="TIME", help="Only messages that died before this time."),
            _arg("--dry-run", action="store_true", help="Count the messages without changing anything."),
            _YES,
            _HOLD,
        ),
    )


def _retries() -> ActionCommand:
    return _command(
        "retries",
        "List, expedite or give up Spark tasks that wait for a retry.",
        "retries.retries",
        _arg("ids", metavar="ID", nargs="*", help="Ids of the tickets to expedite or give up."),
        _arg("--dag-id", help="Only tickets of this DAG."),
        _arg("--run-id", help="Only tickets of this DAG run."),
        _arg("--task-id", help="Only tickets of this task."),
        _arg("--map-index", metavar="NUMBER", help="Only this index of a mapped task. -1 means not mapped."),
        _arg("--all", action="store_true", help="Select all tickets of the channel."),
        _arg("--expedite", action="store_true", help="Submit the selected tasks now."),
        _arg("--give-up", action="store_true", help="Fail the selected tasks now. Needs --yes."),
        _YES,
        _arg("--limit", metavar="NUMBER", help="Tickets per page. Default: 100."),
        _PAGE,
        _arg("--channel", default=DEFAULT_CHANNEL, help=f"Channel of the tickets. Default: {DEFAULT_CHANNEL}."),
        _HOLD,
    )


def _consume() -> ActionCommand:
    return ActionCommand(
        name="consume",
        help="Print the messages of a channel, or run a command for each.",
        func=_lazily("consume.consume"),
        epilog=_EXIT_CODES,
        args=(
            _CHANNEL,
            _arg("--print", action="store_true", help="Print each message as one line of JSON. This is the default."),
            _arg(
                "--exec",
                metavar="COMMAND",
                help="Run this command for each message, with the payload on stdin. Exit code 0 acknowledges it,"
                " 75 defers it, any other dead-letters it.",
            ),
            _arg("--limit", metavar="NUMBER", help="Stop after this many messages."),
            _arg("--timeout", metavar="SECONDS", help="Stop after this time. Default: run until stopped."),
            _arg(
                "--defer-seconds",
                metavar="SECONDS",
                default="60",
                help="How long exit code 75 defers a message. Default: 60.",
            ),
            _arg(
                "--max-handled",
                metavar="NUMBER",
                default="10",
                help="Dead-letter a message that was handled this often. Default: 10.",
            ),
            _arg("--dead-letter-channel", metavar="CHANNEL", help="Where dead letters go. Default: CHANNEL.dead."),
            _arg(
                "--visibility",
                metavar="SECONDS",
                default="300",
                help="Redeliver a message that is not handled within this time. Default: 300.",
            ),
            _CONN_ID,
            _arg("-o", "--output", choices=("json", "table"), default="json", help="Output format. Default: json."),
        ),
    )


def _dispatcher() -> ActionCommand:
    return ActionCommand(
        name="dispatcher",
        help="Run the dispatcher, which delivers messages that are due.",
        description="Run the dispatcher until SIGTERM or SIGINT. Defaults come from section delay of airflow.cfg.",
        func=_lazily("dispatcher.dispatcher"),
        epilog=_EXIT_CODES,
        args=(
            _CONN_ID,
            *(
                _arg(
                    option.flag,
                    metavar=option.metavar,
                    help=option.help,
                    action="append" if option.is_repeatable else "store",
                )
                for option in OPTIONS
            ),
        ),
    )


def _topology() -> GroupCommand:
    return GroupCommand(
        name="topology",
        help="Create, verify or delete the queues or topics that hold delayed messages.",
        subcommands=(
            _command(
                "create",
                "Create missing queues, exchanges or topics.",
                "topology.create",
                _arg(
                    "--channel",
                    action="append",
                    help="Also prepare this channel, for publishers without the permission to do so. Can be repeated.",
                ),
                _arg(
                    "--create-channels",
                    action="store_true",
                    help="Create the queue or topic of each --channel if it is missing: a durable quorum queue, or a"
                    " topic with as many partitions as those of the ladder.",
                ),
            ),
            _command("verify", "Report problems and advice without changing anything.", "topology.verify"),
            _command(
                "delete",
                "Delete the queues, exchanges or topics.",
                "topology.delete",
                _arg(
                    "--force",
                    action="store_true",
                    help="Delete them even if messages are waiting. These messages are lost.",
                ),
                _YES,
            ),
            _command(
                "replay-parked",
                "Send parked messages to their channels. Without --yes, only count them.",
                "topology.replay_parked",
                _arg("--channel", action="append", help="Only messages for this channel. Can be repeated."),
                _YES,
            ),
        ),
    )


def _db() -> GroupCommand:
    return GroupCommand(
        name="db",
        help="Create, check or downgrade the tables of the ledger.",
        subcommands=(
            _command("migrate", "Create or upgrade the tables.", "database.migrate"),
            _command("check", "Check that the tables fit this version.", "database.check"),
            _command(
                "downgrade",
                "Downgrade the tables.",
                "database.downgrade",
                _arg(
                    "--revision",
                    default="base",
                    help="Revision to go back to. Default: base, which drops the tables and all messages.",
                ),
                _YES,
            ),
        ),
    )


def _command(name: str, help_text: str, function: str, *args: Arg) -> ActionCommand:
    return ActionCommand(name=name, help=help_text, func=_lazily(function), args=(*args, *_COMMON), epilog=_EXIT_CODES)


def _lazily(function: str) -> Callable[..., Any]:
    return lazy_load_command(f"airflow_delay_provider.cli.{function}")
