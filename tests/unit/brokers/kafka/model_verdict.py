"""What must hold at the end of any life of a partition."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from airflow_delay_provider.brokers.kafka.journal import EncodedEntry
from airflow_delay_provider.brokers.kafka.recall import Command
from airflow_delay_provider.domain.lifecycle import Change
from tests.unit.brokers.kafka.model import MAX_NOTE, MISSING, Delivered
from tests.unit.brokers.kafka.model_run import RandomRun, Sent


@dataclass(slots=True)
class Fate:
    """What became of one message."""

    delivered: list[Delivered] = field(default_factory=list)
    recorded: list[EncodedEntry] = field(default_factory=list)
    accepted: list[Command] = field(default_factory=list)

    @property
    def changes(self) -> list[Change | None]:
        """The entries of the journal."""
        return [encoded.change for encoded in self.recorded]


def find_violations(run: RandomRun) -> list[str]:
    """Return everything that is wrong, in words."""
    fates = _fates_in(run)
    sent = {each.message_id: each for each in run.sent}
    return [
        *_of_the_lane(run),
        *(f"{each} was never sent" for each in fates.keys() - sent.keys()),
        *(f"{id}: {wrong}; {fates[id]}" for id, each in sent.items() for wrong in _of_a_message(run, each, fates[id])),
    ]


def most_rests(run: RandomRun, wait_ms: int) -> int:
    """Return how often a message can rest: once for each digit of its delay, whenever its turns come.

    Where the broker's clock runs behind, once in each rung.
    """
    ladder, radix = run.kafka.topology.ladder, run.kafka.topology.radix
    if run.skew_ms < 0:
        return sum(hold_ms <= wait_ms for hold_ms in ladder.holds_ms)
    digits, unit_ms = 0, ladder.tick_ms
    while unit_ms <= wait_ms + run.skew_ms:
        digits, unit_ms = digits + 1, unit_ms * radix
    return digits


def _fates_in(run: RandomRun) -> dict[str, Fate]:
    fates: dict[str, Fate] = defaultdict(Fate)
    commands = {each.id: each for each in run.commands}
    for encoded in run.kafka.journal:
        result = encoded.result
        if result is None:
            fates[encoded.message_id.decode()].recorded.append(encoded)
        elif result.accepted:
            command = commands[result.command_id]
            fates[command.message_id].accepted.append(command)
    for each in run.kafka.delivered:
        fates[each.envelope.message_id.decode()].delivered.append(each)
    return fates


def _of_the_lane(run: RandomRun) -> Iterator[str]:
    kafka = run.kafka
    if not run.is_finished:
        yield "the partition never comes to an end"
    if kafka.longest_note > MAX_NOTE:
        yield f"a note has {kafka.longest_note} characters"
    if left := [f"{topic} at {record.offset}" for topic, record in kafka.waiting()]:
        yield f"records are left: {left}"
    if kafka.recalled:
        yield f"recalled places are not forgotten: {kafka.recalled}"
    yield from (f"refused, although the message is there: {each}" for each in run.lies)
    answers = Counter(result.command_id for encoded in kafka.journal if (result := encoded.result) is not None)
    if answers != Counter(each.id for each in run.commands):
        yield f"commands are not answered once each: {answers}"
    dead_lettered = Counter((each.key, each.value) for each in kafka.dead)
    for bad in run.bad:
        if dead_lettered.pop((bad.key, bad.value), 0) != 1:
            yield f"nonsense is not dead-lettered once: {bad}"
    dead = sum(encoded.change is Change.DEAD_LETTERED for encoded in kafka.journal)
    if dead_lettered.total() != dead:
        yield f"{dead_lettered.total()} messages are dead-lettered, {dead} are in the journal"


def _of_a_message(run: RandomRun, sent: Sent, fate: Fate) -> Iterator[str]:
    changes = [command.change for command in fate.accepted]
    is_cancelled = Change.CANCELLED in changes
    is_delivered = not is_cancelled and sent.channel != MISSING
    if len(fate.delivered) != is_delivered:
        yield f"delivered {len(fate.delivered)} times"
    moves_ms = [command.deliver_at_ms for command in fate.accepted if command.envelope]
    due_ms = moves_ms[-1] if moves_ms else sent.due_ms
    for each in fate.delivered:
        if each.at_ms < due_ms:
            yield f"{due_ms - each.at_ms} ms early"
        if (each.envelope.deliver_at_ms, each.envelope.payload) != (due_ms, sent.payload):
            yield "not what was sent"
    end = [] if is_cancelled else [Change.DISPATCHED if is_delivered else Change.DEAD_LETTERED]
    start = [] if _is_called_back_unread(run, fate) else [Change.SCHEDULED]
    if fate.changes != [*start, *changes, *end]:
        yield "the journal disagrees"
    rests = run.kafka.rests[sent.message_id.encode()]
    waits_ms = [sent.due_ms - sent.sent_ms, *(each.deliver_at_ms - run.written_ms[each.id] for each in fate.accepted)]
    if rests > sum(most_rests(run, wait_ms) for wait_ms in waits_ms):
        yield f"rested {rests} times"


def _is_called_back_unread(run: RandomRun, fate: Fate) -> bool:
    """Whether it never began to wait; then its first entry carries it, unless it was cancelled."""
    if not fate.accepted or not fate.recorded or fate.accepted[0].position.topic != run.kafka.topology.inbox:
        return False
    first = fate.recorded[0]
    return first.change is Change.CANCELLED or bool(first.envelope and first.change is not Change.SCHEDULED)
