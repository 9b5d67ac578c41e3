"""How awaited messages ended: from the journal to the task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from airflow_delay_provider.domain.clock import ONE_MS
from airflow_delay_provider.domain.lifecycle import Change

if TYPE_CHECKING:
    from airflow_delay_provider.domain.journal import JournalEntry

#: Above this many ids an event names only those that were not dispatched.
MAX_NAMED_OUTCOMES = 100


def describe_outcomes(message_ids: Sequence[str], entries: Mapping[str, JournalEntry]) -> dict[str, Any]:
    """Say how the messages ended: each by name up to a hundred, above that the counts and the exceptions."""
    named = {message_id: _describe(entries[message_id]) for message_id in dict.fromkeys(message_ids)}
    counts = dict(Counter(outcome["change"] for outcome in named.values()))
    if len(named) > MAX_NAMED_OUTCOMES:
        named = {each: outcome for each, outcome in named.items() if outcome["change"] != Change.DISPATCHED}
    return {"counts": counts, "outcomes": named}


def require_dispatched(event: Mapping[str, Any]) -> None:
    """Fail the task when a message it waited for will never be dispatched.

    Without another try by itself, which would meet the same refusal. Once the cause is mended, dead messages are
    replayed; where the ledger holds them, clearing the task schedules them again.
    """
    missed = {each: outcome for each, outcome in event["outcomes"].items() if outcome["change"] != Change.DISPATCHED}
    if missed:
        shown = ", ".join(f"{each} {outcome['change']}" for each, outcome in list(missed.items())[:10])
        more = f" and {len(missed) - 10} more" if len(missed) > 10 else ""
        told = f"{len(missed)} of {sum(event['counts'].values())} messages were not dispatched ({shown}{more});"
        if any(outcome["change"] == Change.PARKED for outcome in missed.values()):
            told += (
                " the broker keeps parked ones, whose channel was gone: create it again, run `airflow delay topology"
                " replay-parked`, then clear this task;"
            )
        raise AirflowFailException(
            f"{told} bring dead ones back with `airflow delay replay`, or clear this task where the ledger holds them;"
            " cancelled ones need another message_id"
        )


def _describe(entry: JournalEntry) -> dict[str, Any]:
    described: dict[str, Any] = {
        "change": entry.change.value,
        "at": entry.at.isoformat(),
        "lateness_ms": entry.lateness // ONE_MS,
    }
    return described | ({"reason": entry.reason} if entry.reason else {})
