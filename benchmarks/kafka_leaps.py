"""A dispatcher for which an hour passes in seconds, so that whole lives of messages can be measured.

A clock that merely runs faster would lie: what takes the dispatcher 100 ms would count as a minute, messages would be
late for their next rest, and skip it. So time stands still here while there is work, and leaps to the end of the rest
when all messages have been put into it: each message passes exactly the rests that its delay has, and each rest costs
what it costs in real time. All else is the code of production, with three changes in the process that is measured:

- the moment at which a record was put into a rung, which the broker notes in real time, is that of the standing clock
  (the same arithmetic, on another number);
- records are read ahead without a look at how soon their turn is: real time hides what it takes to read on (it begins
  4 s ahead of their turn), a leap would not;
- rests are counted (about 0.1 us each, which count against us).
"""

from __future__ import annotations

import inspect
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

from airflow_delay_provider.brokers.kafka import flow, lane
from airflow_delay_provider.brokers.kafka.broker import KafkaBroker
from airflow_delay_provider.brokers.kafka.climber import KafkaClimber
from airflow_delay_provider.brokers.kafka.lane import SLACK_MS, Source
from airflow_delay_provider.domain.clock import from_ms
from airflow_delay_provider.domain.ladder import Ladder
from benchmarks.kafka_node import config_of
from benchmarks.kafka_processes import STOP
from benchmarks.measuring import MismatchError, expect

LANES = "lanes"
#: Messages of one lane that all can be in memory before they are due.
MOST_IN_A_LANE = 20_000
#: How long nothing may move.
STUCK_SECONDS = 60.0
_TURN_MS, _PUT_AT = Source.turn_ms, "record.timestamp_ms"


def rests_of(ladder: Ladder, delay_ms: int) -> list[int]:
    """Return the holds that a message rests for; what remains below the tick passes in the dispatcher's memory."""
    remaining, holds = delay_ms - SLACK_MS, list[int]()
    while hold := ladder.next_hold(remaining):
        holds.append(hold)
        remaining -= hold
    return holds


@dataclass(frozen=True, kw_only=True)
class Voyage:
    """Messages in the inbox that are all due at the same time."""

    start_ms: int
    delay_ms: int
    #: How many there are in each lane.
    by_lane: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """What a dispatcher did for the messages of its lanes."""

    dispatched: int
    rests: int
    #: On the machine's monotonic clock.
    ended_at: float
    cpu_seconds: float


class StandingClock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.at_ms = int(time.time() * 1000)

    def now(self) -> datetime:
        """Return the time it was set to."""
        return from_ms(self.at_ms)


def climb(pipe: Connection, settings: Mapping[str, Any]) -> None:
    """A dispatcher that tells its lanes, and what it did for each voyage it is told of."""
    clock, counts = StandingClock(), {"dispatched": 0, "rests": 0}

    def on_dispatched(_channels: Mapping[str, int], lateness_ms: Sequence[int]) -> None:
        counts["dispatched"] += len(lateness_ms)

    _read_ahead_without_limit()
    with KafkaBroker(config_of(settings), clock=clock) as broker:
        climber = broker.open_climber(on_dispatched=on_dispatched)
        assert isinstance(climber, KafkaClimber)
        climber.run_once()
        _count_rests(climber, counts)
        while True:
            climber.run_once()
            if not pipe.poll():
                continue
            try:
                heard = pipe.recv()
            except EOFError:
                break
            if heard == STOP:
                break
            if heard == LANES:
                pipe.send(sorted(climber._lanes))
            else:
                pipe.send(_travel(pipe, climber, clock, counts, heard, broker.topology.ladder))
        climber.close()


def _travel(
    pipe: Connection,
    climber: KafkaClimber,
    clock: StandingClock,
    counts: dict[str, int],
    voyage: Voyage,
    ladder: Ladder,
) -> Arrived:
    counts |= {"dispatched": 0, "rests": 0}
    n = sum(voyage.by_lane[number] for number in climber._lanes)
    if max(voyage.by_lane) > MOST_IN_A_LANE:
        raise MismatchError(f"{max(voyage.by_lane)} messages in a lane are too many to leap with")
    holds, clock.at_ms = rests_of(ladder, voyage.delay_ms), voyage.start_ms
    _note_rests(voyage.start_ms, holds)
    left, cpu = list(holds), time.process_time()
    pipe.send("begin")
    seen, since = counts.copy(), time.monotonic()
    while counts["dispatched"] < n:
        climber.run_once()
        if left:
            if counts["rests"] == n * (len(holds) - len(left) + 1):
                clock.at_ms += left.pop(0)
        elif sum(len(each._held) for each in climber._lanes.values()) == n:
            clock.at_ms = voyage.start_ms + voyage.delay_ms
        if counts != seen:
            seen, since = counts.copy(), time.monotonic()
        elif time.monotonic() > since + STUCK_SECONDS:
            raise MismatchError(f"nothing moves any more: {counts} of {n} messages and {len(holds)} rests")
    return Arrived(
        dispatched=counts["dispatched"],
        rests=counts["rests"],
        ended_at=time.monotonic(),
        cpu_seconds=time.process_time() - cpu,
    )


# -- what is changed in this process -------------------------------------------------------------------------------


def _read_ahead_without_limit() -> None:
    flow.FAR_MS = flow.NEAR_MS = 10**13


def _note_rests(start_ms: int, holds: Sequence[int]) -> None:
    """Let all records of a rung have been put there when the clock stood at the end of the rest before.

    The code that asks for the time of a record is the same, with this time in its place.
    """
    put_at, at = dict[int, int](), start_ms
    for hold in holds:
        if hold in put_at:
            raise MismatchError(f"messages rest twice in the rung of {hold} ms, which cannot be leapt over")
        put_at[hold] = at
        at += hold

    code = textwrap.dedent(inspect.getsource(_TURN_MS))
    expect("places in the code where a record's time is looked at", code.count(_PUT_AT), 1)
    names = {**vars(lane), "put_at": put_at}
    exec(code.replace(_PUT_AT, "put_at[self.hold_ms]"), names)
    Source.turn_ms = names["turn_ms"]  # type: ignore[method-assign]


def _count_rests(climber: KafkaClimber, counts: dict[str, int]) -> None:
    outlet = climber._outlet
    assert outlet is not None
    rest = outlet.rest

    def counted(lane: int, hold_ms: int, key: bytes, value: bytes) -> None:
        counts["rests"] += 1
        rest(lane, hold_ms, key, value)

    outlet.rest = counted  # type: ignore[method-assign]
