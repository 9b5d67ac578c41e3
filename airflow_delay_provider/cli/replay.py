"""`airflow delay replay`: messages that were given up go to their channels again."""

from __future__ import annotations

import sys
from argparse import Namespace

from airflow_delay_provider.cli.exit_codes import ExitCode, command
from airflow_delay_provider.cli.opening import open_hook
from airflow_delay_provider.cli.output import print_one
from airflow_delay_provider.domain.dead_letters import DeadCount, DeadLetters, Replayed
from airflow_delay_provider.domain.schedule import parse_moment
from airflow_delay_provider.exceptions import InvalidMessageError


@command
def replay(args: Namespace) -> None:
    """Count what is selected, ask, and replay it; end with 1 when an id is not dead or not all could be looked at."""
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
    _print(args, done)


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
    """Ask on a terminal; anywhere else nobody could answer."""
    many = f"{'' if found.is_exact else 'up to '}{found.count} messages"
    if not sys.stdin.isatty():
        raise InvalidMessageError("yes", f"{many} would be replayed", "add --yes to replay them, or --dry-run to count")
    sys.stderr.write(f"Replay {many}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise SystemExit(int(ExitCode.REFUSED))


def _print(args: Namespace, done: Replayed) -> None:
    missing: object = list(done.missing) if args.output == "json" else ", ".join(done.missing)
    print_one(args.output, {"replayed": done.count, "not_dead": missing, "is_complete": done.is_complete})
    if not done.is_complete:
        sys.stderr.write("more dead letters lie behind those that were looked at; replay them with a wider filter\n")
    if done.missing or not done.is_complete:
        raise SystemExit(int(ExitCode.REFUSED))
