"""Batches of rows: limited in number and bytes, scheduled at once, searched for the rows that the broker refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_delay_provider.domain.exceptions import DelayError, InvalidMessageError, Reach

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from airflow_delay_provider.brokers.port import Broker
    from airflow_delay_provider.domain.arguments import OnConflict
    from airflow_delay_provider.domain.message import Message
    from airflow_delay_provider.spark.datasource.columns import Rows

#: A batch of Spark may have any number of bytes; as Python objects it needs several times as many.
MOST_BYTES = 8 * 1024 * 1024
#: The outcome of a row that equals an earlier one.
KEPT = "kept"


def slices(batch: RecordBatch, *, most_rows: int, most_bytes: int = MOST_BYTES) -> Iterator[RecordBatch]:
    """Divide a batch; a slice with more bytes than that has a single row."""
    for start in range(0, batch.num_rows, most_rows):
        yield from _halves(batch.slice(start, most_rows), most_bytes)


def _halves(batch: RecordBatch, most_bytes: int) -> Iterator[RecordBatch]:
    if batch.num_rows == 1 or batch.nbytes <= most_bytes:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _halves(batch.slice(0, middle), most_bytes)
    yield from _halves(batch.slice(middle), most_bytes)


@dataclass(kw_only=True, slots=True)
class Scheduled:
    """What became of the rows of a batch."""

    #: Of the rows whose messages the broker has confirmed.
    outcomes: Counter[str] = field(default_factory=Counter)
    #: Of the others.
    errors: dict[int, DelayError] = field(default_factory=dict)


class BatchScheduler:
    """Schedules the sound rows of each batch, whatever is wrong with the others."""

    def __init__(self, broker: Broker, on_conflict: OnConflict) -> None:
        self._broker = broker
        self._on_conflict = on_conflict

    def schedule(self, rows: Rows) -> Scheduled:
        """Return once the broker has confirmed; an error that does not concern a single message is raised."""
        result = Scheduled(errors={**rows.errors})
        messages, numbers = _distinct(rows, result)
        if messages:
            self._schedule(messages, numbers, result)
        return result

    def _schedule(self, messages: Sequence[Message], numbers: Sequence[int], result: Scheduled) -> None:
        """Schedule all; if a message is refused, the broker has stored none of them.

        Those that it refuses whatever the others are like are found one by one, and the rest by halves.
        """
        if self._try(messages, numbers, result):
            return
        sound = [index for index, message in enumerate(messages) if self._is_sound(message, numbers[index], result)]
        self._bisect([messages[index] for index in sound], [numbers[index] for index in sound], result)

    def _bisect(self, messages: Sequence[Message], numbers: Sequence[int], result: Scheduled) -> None:
        if not messages or self._try(messages, numbers, result):
            return
        middle = len(messages) // 2
        self._bisect(messages[:middle], numbers[:middle], result)
        self._bisect(messages[middle:], numbers[middle:], result)

    def _try(self, messages: Sequence[Message], numbers: Sequence[int], result: Scheduled) -> bool:
        """Tell whether it is known what became of all of them."""
        try:
            receipts = self._broker.schedule(messages, on_conflict=self._on_conflict)
        except DelayError as error:
            if error.reach is not Reach.MESSAGE:
                raise
            if len(messages) > 1:
                return False
            result.errors[numbers[0]] = error
        else:
            result.outcomes.update(receipt.outcome.value for receipt in receipts)
        return True

    def _is_sound(self, message: Message, number: int, result: Scheduled) -> bool:
        try:
            self._broker.check_message(message, now=self._broker.clock.now())
        except InvalidMessageError as error:
            result.errors[number] = error
            return False
        return True


def _distinct(rows: Rows, result: Scheduled) -> tuple[Sequence[Message], Sequence[int]]:
    """Leave out rows whose id an earlier row has: an equal one is the same message, any other is an error."""
    first = {message.id: message for message in reversed(rows.messages)}
    if len(first) == len(rows.messages):
        return rows.messages, rows.numbers
    messages, numbers, seen = list[Message](), list[int](), set[str]()
    for message, number in zip(rows.messages, rows.numbers, strict=True):
        if message.id not in seen:
            seen.add(message.id)
            messages.append(message)
            numbers.append(number)
        elif message == first[message.id]:
            result.outcomes[KEPT] += 1
        else:
            result.errors[number] = InvalidMessageError(
                "id", f"{message.id!r} is also the id of a row with other content", "give each message its own id"
            )
    return messages, numbers
