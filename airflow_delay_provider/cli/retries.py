"""`airflow delay retries`: list, expedite or give up Spark tasks that wait for a retry."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from textwrap import shorten
from typing import Any

from sqlalchemy import Connection

from airflow_delay_provider.brokers.ledger import listing
from airflow_delay_provider.cli.exit_codes import ExitCode, NotConfirmedError, command
from airflow_delay_provider.cli.options import open_hook, open_listing
from airflow_delay_provider.cli.output import iso, print_document, print_page_tokens, print_table
from airflow_delay_provider.domain.arguments import parse_count
from airflow_delay_provider.domain.exceptions import InvalidMessageError
from airflow_delay_provider.domain.lifecycle import Change, State
from airflow_delay_provider.domain.message import Message, Origin, require_channel, require_message_id
from airflow_delay_provider.hooks.task import cancel_in_time
from airflow_delay_provider.spark.tickets import Ticket

_ORIGIN = tuple(field.name for field in fields(Origin))
_COLUMNS = ("next_try", "task", "run_id", "attempt", "verdict", "waits_for", "reason", "message_id")
_REASON_CHARACTERS = 40
_PAGE_SIZE = "100"
_MAX_MAP_INDEX = 2**31 - 1


@command
def retries(args: Namespace) -> None:
    """Print one page of tickets by delivery time, or expedite or give up the selected ones."""
    origin = _parse_origin(args)
    if not args.expedite and not args.give_up:
        _list(args, origin)
        return
    _require_clear_request(args, origin)
    ids = _parse_ids(args) or _find_ids(args, origin)
    with open_hook(args.conn_id, hold=args.hold) as hook:
        broker = hook.get_conn()
        if args.expedite:
            broker.expedite(ids)
            _print_change(args, Change.EXPEDITED, ids)
        else:
            _print_change(args, Change.CANCELLED, ids, too_late=cancel_in_time(broker, ids))


# -- options -------------------------------------------------------------------------------------------------------


def _parse_origin(args: Namespace) -> dict[str, str | int]:
    given = {name: value for name in _ORIGIN if (value := getattr(args, name)) is not None}
    for name, value in given.items():
        if not value.isprintable():
            raise InvalidMessageError(name, f"{value!r} is not a name", "use one from the list")
    if "map_index" in given:
        given["map_index"] = _parse_map_index(given["map_index"])
    return given


def _parse_map_index(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -2
    if not -1 <= number <= _MAX_MAP_INDEX:
        raise InvalidMessageError("map_index", f"{text!r} is not an index", "use 0 or more, or -1 if it is not mapped")
    return number


def _parse_ids(args: Namespace) -> list[str]:
    return [require_message_id(each) for each in dict.fromkeys(args.ids)]


def _require_clear_request(args: Namespace, origin: dict[str, str | int]) -> None:
    """Raise unless exactly one change and one way to select tickets are given."""
    if args.expedite and args.give_up:
        raise InvalidMessageError("expedite", "cannot be combined with --give-up", "give only one of them")
    if args.limit is not None or args.page is not None:
        raise InvalidMessageError("limit", "applies to the list only", "leave out --limit and --page")
    if sum((bool(args.ids), bool(origin), args.all)) != 1:
        raise InvalidMessageError(
            "ids", "no clear selection of tickets", "give either ids, or filters such as --dag-id, or --all"
        )
    if args.give_up and not args.yes:
        raise NotConfirmedError("This fails the selected tasks.")


# -- reading tickets -----------------------------------------------------------------------------------------------


@contextmanager
def _open_pages(
    args: Namespace, origin: dict[str, str | int]
) -> Iterator[tuple[Connection, Callable[..., listing.Page]]]:
    channel = require_channel(args.channel)
    with open_listing(args.conn_id) as (ledger, destination), ledger.read() as connection:
        get_page = partial(listing.page, connection, channel=channel, destination=destination, origin=origin)
        yield connection, partial(get_page, states=[State.SCHEDULED])


def _find_ids(args: Namespace, origin: dict[str, str | int]) -> list[str]:
    """Return the ids of all pages of the list."""
    with _open_pages(args, origin) as (_, get_page):
        page = get_page(size=listing.MAX_PAGE_SIZE)
        ids = [record.message.id for record in page.records]
        while page.next is not None:
            page = get_page(size=listing.MAX_PAGE_SIZE, token=page.next)
            ids += [record.message.id for record in page.records]
    return ids


def _list(args: Namespace, origin: dict[str, str | int]) -> None:
    if args.ids:
        raise InvalidMessageError(
            "ids", "no action is given", "add --expedite or --give-up, or use `airflow delay show`"
        )
    size = parse_count("limit", args.limit or _PAGE_SIZE)
    with _open_pages(args, origin) as (connection, get_page):
        page = get_page(size=size, token=args.page)
        payloads = listing.get_payloads(connection, [record.message.id for record in page.records])
    found = [_fields(replace(each.message, payload=payloads.get(each.message.id, b""))) for each in page.records]
    if args.output == "json":
        print_document({"retries": found, "next": page.next, "prev": page.prev})
        return
    print_table(_COLUMNS, [_row(each) for each in found])
    print_page_tokens(page)


# -- output --------------------------------------------------------------------------------------------------------


def _fields(message: Message) -> dict[str, Any]:
    ticket = Ticket.from_message(message)
    return {
        # Other messages of the channel are listed with empty fields.
        **{name: getattr(message.origin, name, None) for name in _ORIGIN},
        **{name: getattr(ticket, name, None) for name in ("attempt", "verdict", "reason", "waits_for")},
        "extensions": getattr(ticket, "extension", None),
        "cluster": getattr(ticket, "cluster", None),
        "began_at": iso(getattr(ticket, "began_at", None)),
        "next_try": iso(message.deliver_at),
        "message_id": message.id,
    }


def _row(ticket: dict[str, Any]) -> list[object]:
    """Return the cells of a table row, shortened."""
    mapped = "" if ticket["map_index"] in (None, -1) else f"[{ticket['map_index']}]"
    extended = f" +{ticket['extensions']}" if ticket["extensions"] else ""
    short = {
        "next_try": f"{ticket['next_try'][:19]}Z".replace("T", " "),
        "task": ticket["dag_id"] and f"{ticket['dag_id']}.{ticket['task_id']}{mapped}",
        "waits_for": ticket["waits_for"] and f"{ticket['waits_for']}{extended}",
        "reason": ticket["reason"] and shorten(str(ticket["reason"]), _REASON_CHARACTERS, placeholder=" …"),
    }
    return [(ticket | short)[name] for name in _COLUMNS]


def _print_change(args: Namespace, change: Change, ids: Sequence[str], *, too_late: Sequence[str] = ()) -> None:
    missed = set(too_late)
    changed = [each for each in ids if each not in missed]
    if args.output == "json":
        print_document({"change": change.value, "message_ids": changed, "too_late": list(too_late)})
    else:
        rows = [(each, change.value) for each in changed] + [(each, "too late") for each in too_late]
        print_table(("message_id", "change"), rows)
    if too_late:
        raise SystemExit(int(ExitCode.REFUSED))
