from __future__ import annotations

from itertools import product

import pytest

from airflow_delay_provider.domain.lifecycle import (
    FINAL_CHANGES,
    TRANSITIONS,
    Change,
    State,
    allowed_from,
    outcome_of,
)

#: Every pair, written a second time: a slip in the table shows as a difference.
ALLOWED = {
    None: {Change.SCHEDULED: State.SCHEDULED},
    State.SCHEDULED: {
        Change.DISPATCHED: State.DISPATCHED,
        Change.CANCELLED: State.CANCELLED,
        Change.RESCHEDULED: State.SCHEDULED,
        Change.EXPEDITED: State.SCHEDULED,
        Change.DEAD_LETTERED: State.DEAD,
        Change.REFUSED: State.SCHEDULED,
        Change.PARKED: State.DEAD,
    },
    State.DISPATCHED: {
        Change.REQUEUED: State.SCHEDULED,
        Change.DEAD_LETTERED: State.DEAD,
        Change.PARKED: State.DEAD,
    },
    State.CANCELLED: {},
    State.DEAD: {Change.REQUEUED: State.SCHEDULED},
}


@pytest.mark.parametrize(("state", "change"), list(product([None, *State], Change)))
def test_each_change_is_allowed_from_exactly_its_states(state: State | None, change: Change):
    """B22, B45"""
    assert TRANSITIONS.get((state, change)) == ALLOWED[state].get(change)
    if state is not None:
        assert (state in allowed_from(change)) == (change in ALLOWED[state])


@pytest.mark.parametrize("change", Change)
def test_a_change_leads_to_one_state_wherever_it_starts(change: Change):
    """B22"""
    assert {to for (_, what), to in TRANSITIONS.items() if what is change} == {outcome_of(change)}


def test_a_cancelled_message_stays_cancelled():
    assert not [change for change in Change if State.CANCELLED in allowed_from(change)]


def test_final_changes_are_those_after_which_a_message_waits_no_longer():
    assert {outcome_of(change) for change in FINAL_CHANGES} == set(State) - {State.SCHEDULED}
    assert len(FINAL_CHANGES) == 4


def test_the_stored_numbers_of_the_states():
    """B19"""
    assert [(state.name, state.value) for state in State] == [
        ("SCHEDULED", 100),
        ("DISPATCHED", 101),
        ("CANCELLED", 102),
        ("DEAD", 103),
    ]


@pytest.mark.parametrize("text", ["DISPATCHED", "dispatched", "Dispatched", "101"])
def test_a_state_is_named_in_any_case_or_by_its_number(text: str):
    """B11, B64"""
    assert State.parse(text) is State.DISPATCHED


@pytest.mark.parametrize("text", ["", "99", "gone", "²", "-101"])
def test_an_unknown_state_is_refused_with_the_known_ones(text: str):
    """B64"""
    with pytest.raises(ValueError, match=r"state: .*SCHEDULED \(100\), DISPATCHED \(101\)"):
        State.parse(text)
