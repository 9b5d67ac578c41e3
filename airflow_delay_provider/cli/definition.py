"""What Airflow reads at each ``airflow`` call: names and options only, the code behind them is loaded when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from airflow.cli.cli_config import ActionCommand, Arg, GroupCommand, lazy_load_command

from airflow_delay_provider.hooks.connections import DEFAULT_CONN_ID
from airflow_delay_provider.spark.tickets import DEFAULT_CHANNEL


def _arg(*flags: str, **how: Any) -> Arg:
    return Arg(flags, **how)  # type: ignore[no-untyped-call] # Airflow's class carries no types


_EXIT_CODES = "exit codes: 0 done, 1 refused by the message's state, 2 bad input, 3 broker or ledger not reachable"

_CONN_ID = _arg("--conn-id", default=DEFAULT_CONN_ID, help=f"connection of the broker (default: {DEFAULT_CONN_ID})")
_OUTPUT = _arg("-o", "--output", choices=("table", "json"), default="table", help="how to print (default: table)")
_COMMON = (_CONN_ID, _OUTPUT)
_YES = _arg("-y", "--yes", action="store_true", help="do it")
_HOLD = _arg("--hold", choices=("broker", "ledger"), help="who keeps the wait (default: what the connection says)")

_CHANNEL = _arg("channel", metavar="CHANNEL", help="where the messages go")
_OPTIONAL_CHANNEL = _arg(
    "channel", metavar="CHANNEL", nargs="?", help="where the message goes; a line of --file may name its own"
)
_ONE_CHANNEL = _arg("--channel", help="only this channel")
_IDS = _arg("ids", metavar="ID", nargs="+", help="message ids; all of them or none are changed")

_AT = _arg("--at", metavar="TIME", help="when, in ISO-8601 with a time zone: 2030-01-31T17:00:00Z")
_AFTER = _arg("--after", metavar="SECONDS", help="how long from now")
_PAGE = _arg("--page", metavar="TOKEN", help="another page, as printed below a listing")
_ON_PAST = _arg(
    "--on-past", choices=("deliver", "fail"), default="deliver", help="if the time has passed (default: deliver)"
)

_MESSAGE = (
    _arg("--payload", metavar="TEXT", help="the message"),
    _arg("--payload-file", metavar="FILE", help="the message's bytes from a file, - is stdin"),
    _arg("--id", help="message id (default: a new one)"),
    _arg("--key", help="messages of one key that are due in order are delivered in order"),
    _arg("--header", metavar="NAME=VALUE", action="append", help="a header; may be repeated"),
    _arg("--content-type", metavar="TYPE", help="default: text for --payload, bytes for --payload-file"),
    _arg("--priority", metavar="NUMBER", default="0", help="0 to 255 (default: 0)"),
)


def get_delay_cli_commands() -> list[GroupCommand | ActionCommand]:
    """Return the group ``airflow delay``."""
    return [
        GroupCommand(
            name="delay",
            help="Delayed and scheduled messages",
            subcommands=(
                *_scheduling(),
                *_looking(),
                *_control(),
                _retries(),
                _consume(),
                _dispatcher(),
                _topology(),
                _db(),
            ),
        )
    ]


def _scheduling() -> tuple[ActionCommand, ...]:
    return (
        _command(
            "schedule",
            "Deliver a message, or each line of a file, at its time",
            "scheduling.schedule",
            _OPTIONAL_CHANNEL,
            *_MESSAGE,
            _arg("--file", metavar="BULK", help="JSON lines (.jsonl) or CSV (.csv), a message a line"),
            _AT,
            _AFTER,
            _ON_PAST,
            _arg(
                "--on-conflict",
                choices=("keep", "fail", "replace"),
                default="keep",
                help="if the id is taken (default: keep)",
            ),
            _HOLD,
        ),
        _command("send", "Put a message into its channel now", "scheduling.send", _CHANNEL, *_MESSAGE, _HOLD),
    )


def _looking() -> tuple[ActionCommand, ...]:
    return (
        _command(
            "list",
            "List messages in due order",
            "looking.list_messages",
            _ONE_CHANNEL,
            _arg("--state", action="append", help="only this state, by name or code; may be repeated"),
            _arg("--limit", metavar="NUMBER", default="100", help="messages on a page (default: 100)"),
            _PAGE,
        ),
        _command(
            "show",
            "Show a message and its history",
            "looking.show",
            _arg("id", metavar="ID", help="message id"),
            _arg("--payload", action="store_true", help="print the payload and nothing else; with json, include it"),
        ),
        _command("status", "Count messages by channel and state", "looking.status", _ONE_CHANNEL),
    )


def _control() -> tuple[ActionCommand, ...]:
    return (
        _command("cancel", "Never dispatch messages that wait", "control.cancel", _IDS, _HOLD),
        _command(
            "reschedule",
            "Move messages that wait to another time",
            "control.reschedule",
            _IDS,
            _AT,
            _AFTER,
            _ON_PAST,
            _HOLD,
        ),
        _command("expedite", "Make messages that wait due now", "control.expedite", _IDS, _HOLD),
        _command(
            "replay",
            "Hand messages that were given up to their channels again",
            "replay.replay",
            _arg("ids", metavar="ID", nargs="*", help="message ids (default: all that the filters select)"),
            _ONE_CHANNEL,
            _arg(
                "--dead-letter-channel",
                metavar="CHANNEL",
                help="where consumers put them (default: the channel with .dead behind it)",
            ),
            _arg("--dag-id", help="only this DAG"),
            _arg("--run-id", help="only this run"),
            _arg("--task-id", help="only this task"),
            _arg("--reason", metavar="TEXT", help="only if the reason contains this text"),
            _arg("--since", metavar="TIME", help="only what was given up at this time or later"),
            _arg("--until", metavar="TIME", help="only what was given up before this time"),
            _arg("--dry-run", action="store_true", help="count, and change nothing"),
            _arg("-y", "--yes", action="store_true", help="do not ask for confirmation"),
            _HOLD,
        ),
    )


def _retries() -> ActionCommand:
    return _command(
        "retries",
        "List Spark tasks that wait for their next submission, expedite them or give them up",
        "retries.retries",
        _arg("ids", metavar="ID", nargs="*", help="tickets to expedite or give up"),
        _arg("--dag-id", help="only this DAG"),
        _arg("--run-id", help="only this run"),
        _arg("--task-id", help="only this task"),
        _arg("--map-index", metavar="NUMBER", help="only this one of a mapped task; -1 is a task that is not mapped"),
        _arg("--all", action="store_true", help="expedite or give up every ticket of the channel"),
        _arg("--expedite", action="store_true", help="submit those selected now"),
        _arg("--give-up", action="store_true", help="fail those selected now"),
        _YES,
        _arg("--limit", metavar="NUMBER", help="tickets on a page (default: 100)"),
        _PAGE,
        _arg("--channel", default=DEFAULT_CHANNEL, help=f"where tickets go (default: {DEFAULT_CHANNEL})"),
        _HOLD,
    )


def _consume() -> ActionCommand:
    return ActionCommand(
        name="consume",
        help="Take messages from a channel",
        func=_lazily("consuming.consume"),
        epilog=_EXIT_CODES,
        args=(
            _CHANNEL,
            _arg("--print", action="store_true", help="print each message as a JSON line (default)"),
            _arg(
                "--exec",
                metavar="COMMAND",
                help="run it for each message, payload on stdin; it ends with 0: done, 75: again later, else: given up",
            ),
            _arg("--limit", metavar="NUMBER", help="stop after so many messages"),
            _arg("--timeout", metavar="SECONDS", help="stop after this time (default: never)"),
            _arg("--defer-seconds", metavar="SECONDS", default="60", help="how much later 75 means (default: 60)"),
            _arg("--max-handled", metavar="NUMBER", default="10", help="give up after so many times (default: 10)"),
            _arg("--dead-letter-channel", metavar="CHANNEL", help="for what is given up (default: CHANNEL.dead)"),
            _arg(
                "--visibility",
                metavar="SECONDS",
                default="300",
                help="a message not handled in this time is handed out again (default: 300)",
            ),
            _CONN_ID,
            _arg("-o", "--output", choices=("json", "table"), default="json", help="how to print (default: json)"),
        ),
    )


def _dispatcher() -> ActionCommand:
    return ActionCommand(
        name="dispatcher",
        help="Run the service that hands due messages to their channels",
        description="Run until SIGTERM or SIGINT. What is not given is taken from section delay of airflow.cfg.",
        func=_lazily("running.dispatcher"),
        epilog=_EXIT_CODES,
        args=(
            _CONN_ID,
            _arg("--batch", metavar="NUMBER", help="most messages in one transaction"),
            _arg("--poll-interval", metavar="SECONDS", help="how soon a message scheduled just now is noticed"),
            _arg(
                "--rate-limit",
                metavar="NUMBER",
                help="most messages of the ledger a second, 0 is no limit; what --climb moves is not limited",
            ),
            _arg("--retention-days", metavar="DAYS", help="how long messages that ended are kept"),
            _arg(
                "--project",
                metavar="CONN",
                action="append",
                help="list what the broker of this connection holds, by following its journal; may be repeated",
            ),
            _arg(
                "--climb",
                metavar="CONN",
                action="append",
                help="move on what waits in the Kafka of this connection; may be repeated",
            ),
            _arg(
                "--instance",
                metavar="NAME",
                help="a name that only this dispatcher has, also after a restart, which then takes up --climb at once",
            ),
            _arg("--health-host", metavar="HOST", help="where /health and /metrics answer"),
            _arg("--health-port", metavar="PORT", help="0 is any free port, -1 is no HTTP"),
        ),
    )


def _topology() -> GroupCommand:
    return GroupCommand(
        name="topology",
        help="What a broker needs before messages can wait in it",
        subcommands=(
            _command(
                "create",
                "Create what is missing",
                "topology.create",
                _arg(
                    "--channel",
                    action="append",
                    help="also the way to this channel, for publishers that may not bind; may be repeated",
                ),
            ),
            _command("verify", "Say what is wrong or needs care, and change nothing", "topology.verify"),
            _command(
                "delete",
                "Take everything away",
                "topology.delete",
                _arg("--force", action="store_true", help="even if messages wait, which are lost then"),
                _YES,
            ),
            _command(
                "replay-parked",
                "Send messages whose channel was gone to it; without --yes, count them",
                "topology.replay_parked",
                _arg("--channel", action="append", help="only those of this channel; may be repeated"),
                _YES,
            ),
        ),
    )


def _db() -> GroupCommand:
    return GroupCommand(
        name="db",
        help="The tables of the ledger",
        subcommands=(
            _command("migrate", "Create or upgrade the tables", "database.migrate"),
            _command("check", "Say whether this version can work with the tables", "database.check"),
            _command(
                "downgrade",
                "Take the tables back to an older version",
                "database.downgrade",
                _arg("--revision", default="base", help="default: base, which drops the tables and all messages"),
                _YES,
            ),
        ),
    )


def _command(name: str, help_text: str, function: str, *args: Arg) -> ActionCommand:
    return ActionCommand(name=name, help=help_text, func=_lazily(function), args=(*args, *_COMMON), epilog=_EXIT_CODES)


def _lazily(function: str) -> Callable[..., Any]:
    return lazy_load_command(f"airflow_delay_provider.cli.{function}")
