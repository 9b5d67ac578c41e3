"""`airflow delay cancel`, `reschedule`, `expedite` and `replay`."""

from __future__ import annotations

import sys
from argparse import Namespace

from airflow_delay_provider.cli.exit_codes import ExitCode, NotConfirmedError, command
from airflow_delay_provider.cli.options import open_hook
from airflow_delay_provider.cli.output import iso, print_document, print_one, print_table
from airflow_delay_provider.domain.arguments import parse_moment, resolve_deliver_at
from airflow_delay_provider.domain.dead_letters import DeadCount, DeadLetters, Replayed
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.lifecycle import Change
from airflow_delay_provider.domain.message import require_message_id


@command
def cancel(args: Namespace) -> None:
    """Cancel all of the messages or none."""
    with open_hook(args.conn_id, hold=args.hold) as hook:
        hook.get_conn().cancel(_ids_of(args))
    _print_change(args, Change.CANCELLED)


@command
def reschedule(args: Namespace) -> None:
    """Change the delivery time of all of the messages or none."""
    if args.at is None and args.after is None:
        raise InvalidMessageError(
            "deliver_at", "missing", "give --at or --after; to deliver now, use `airflow delay expedite`"
        )
    with open_hook(args.conn_id, hold=args.hold) as hook:
        broker = hook.get_conn()
        deliver_at = resolve_deliver_at(
            deliver_at=args.at, deliver_after=args.after, on_past=args.on_past, now=broker.clock.now()
        )
        broker.reschedule(_ids_of(args), deliver_at)
    _print_change(args, Change.RESCHEDULED, deliver_at=iso(deliver_at))


@command
def expedite(args: Namespace) -> None:
    """Make all of the messages due now, or none."""
    with open_hook(args.conn_id, hold=args.hold) as hook:
        hook.get_conn().expedite(_ids_of(args))
    _print_change(args, Change.EXPEDITED)


@command
def replay(args: Namespace) -> None:
    """Count the selected dead letters, ask for confirmation, and replay them.

    Exit with 1 if an id is not dead or if not all dead letters could be read.
    """
    selection = _selection_of(args)
    with open_hook(args.conn_id, hold=args.hold) as hook:
        broker = hook.get_conn()
        found = broker.count_dead(selection)
        if args.dry_run:
            print_one(args.output, {"would_replay": found.count, "is_exact": found.is_exact})
            return
        if found.count and not args.yes and not args.ids:
            _confirm(found)
        done = broker.replay(selection)
    _print_replayed(args, done)


def _ids_of(args: Namespace) -> list[str]:
    return [require_message_id(message_id) for message_id in args.ids]


def _print_change(args: Namespace, change: Change, *, deliver_at: str | None = None) -> None:
    if args.output == "json":
        print_document({"change": change.value, "message_ids": args.ids, "deliver_at": deliver_at})
        return
    print_table(("message_id", "change", "deliver_at"), [(item, change.value, deliver_at) for item in args.ids])


def _selection_of(args: Namespace) -> DeadLetters:
    return DeadLetters(
        message_ids=tuple(args.ids),
        channel=args.channel,
        dead_letter_channel=args.dead_letter_channel,
        dag_id=args.dag_id,
        run_id=args.run_id,
        task_id=args.task_id,
        reason=args.reason,
        since=None if args.since is None else parse_moment("since", args.since),
        until=None if args.until is None else parse_moment("until", args.until),
    )


def _confirm(found: DeadCount) -> None:
    """Ask on a terminal; require ``--yes`` everywhere else."""
    many = f"{'' if found.is_exact else 'up to '}{found.count} messages"
    if not sys.stdin.isatty():
        raise NotConfirmedError(f"This replays {many}.")
    sys.stderr.write(f"Replay {many}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise SystemExit(int(ExitCode.REFUSED))


def _print_replayed(args: Namespace, done: Replayed) -> None:
    missing: object = list(done.missing) if args.output == "json" else ", ".join(done.missing)
    print_one(args.output, {"replayed": done.count, "not_dead": missing, "is_complete": done.is_complete})
    if not done.is_complete:
        sys.stderr.write("not all dead letters were read; use a wider filter to reach the others\n")
    if done.missing or not done.is_complete:
        raise SystemExit(int(ExitCode.REFUSED))
