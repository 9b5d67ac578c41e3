from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pytest

from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.brokers.port import Receipt
from airflow_delay_provider.domain.arguments import Limits, OnConflict
from airflow_delay_provider.domain.exceptions import BrokerError, InvalidMessageError, Reach, UnknownChannelError
from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.spark.datasource.batches import BatchScheduler, slices
from airflow_delay_provider.spark.datasource.columns import Rows
from airflow_delay_provider.testing.clock import SettableClock
from tests.unit.spark.datasource.batch import NOW, SOON, read


class PickyBroker(EmbeddedBroker):
    """An embedded broker whose channels refuse some payloads, as Kafka's do, and counts its calls."""

    refusal: Exception = InvalidMessageError("payload", "does not fit into the topic", "send less")

    def __init__(self) -> None:
        super().__init__(Ledger("sqlite://"), limits=Limits(max_payload_bytes=100), clock=SettableClock(NOW))
        self.written: list[int] = []

    def _schedule(self, messages: Sequence[Message], on_conflict: OnConflict) -> list[Receipt]:
        if any(message.payload == b"picky" for message in messages):
            raise self.refusal
        self.written.append(len(messages))
        return super()._schedule(messages, on_conflict)

    def scheduled_ids(self) -> set[str]:
        return {entry.message_id for entry in self.read_journal(after="0:0", limit=10_000)}


@pytest.fixture
def broker() -> Iterator[PickyBroker]:
    with PickyBroker() as broker:
        yield broker


def rows_of(payloads: dict[str, str]) -> Rows:
    return read(*({"id": name, "payload": payload} for name, payload in payloads.items()))


def test_a_batch_without_bad_rows_is_one_call(broker: PickyBroker):
    scheduled = BatchScheduler(broker, OnConflict.KEEP).schedule(rows_of({str(n): "p" for n in range(50)}))
    assert (scheduled.outcomes, scheduled.errors, broker.written) == ({"scheduled": 50}, {}, [50])


def test_only_the_rows_that_the_broker_refuses_are_rejected_and_no_other_is_sent_twice(broker: PickyBroker):
    payloads = {str(n): "p" for n in range(64)} | {"7": "picky", "40": "picky", "41": "x" * 101}
    scheduled = BatchScheduler(broker, OnConflict.KEEP).schedule(rows_of(payloads))
    assert {row: error.field for row, error in scheduled.errors.items()} == {7: "payload", 40: "payload", 41: "payload"}
    assert scheduled.outcomes == {"scheduled": 61}
    assert sum(broker.written) == 61
    assert broker.scheduled_ids() == payloads.keys() - {"7", "40", "41"}


@pytest.mark.parametrize(
    "refusal",
    [
        BrokerError("the broker is away"),
        BrokerError("the queue is full", reach=Reach.CHANNEL),
        UnknownChannelError("channel", "'orders' does not exist", "create it"),
    ],
)
def test_an_error_that_people_can_mend_fails_the_batch(broker: PickyBroker, refusal: Exception):
    broker.refusal = refusal
    with pytest.raises(type(refusal), match=str(refusal)):
        BatchScheduler(broker, OnConflict.KEEP).schedule(rows_of({"1": "p", "2": "picky"}))


def test_equal_rows_with_one_id_are_one_message(broker: PickyBroker):
    row = {"payload": "same", "deliver_at": SOON}
    scheduled = BatchScheduler(broker, OnConflict.KEEP).schedule(read(row, row, row))
    assert (scheduled.outcomes, scheduled.errors) == ({"scheduled": 1, "kept": 2}, {})


def test_a_row_that_equals_a_refused_one_is_refused_too(broker: PickyBroker):
    row = {"payload": "picky", "deliver_at": SOON}
    scheduled = BatchScheduler(broker, OnConflict.KEEP).schedule(read(row, row | {"payload": "p"}, row))
    assert (scheduled.outcomes, sorted(scheduled.errors)) == ({"scheduled": 1}, [0, 2])


def test_a_row_with_the_id_of_another_one_is_rejected_by_its_id(broker: PickyBroker):
    rows = read({"id": "a", "payload": "1"}, {"id": "b", "payload": "1"}, {"id": "a", "payload": "2"})
    scheduled = BatchScheduler(broker, OnConflict.KEEP).schedule(rows)
    assert scheduled.outcomes == {"scheduled": 2}
    assert str(scheduled.errors[2]).startswith("id: 'a' is also the id of a row with other content; give each")


def test_an_id_that_is_taken_is_rejected_if_conflicts_fail(broker: PickyBroker):
    first = BatchScheduler(broker, OnConflict.FAIL).schedule(rows_of({"1": "p", "2": "p"}))
    again = BatchScheduler(broker, OnConflict.FAIL).schedule(rows_of({"2": "p", "3": "p"}))
    assert (first.outcomes, again.outcomes) == ({"scheduled": 2}, {"scheduled": 1})
    assert "message '2' already exists (SCHEDULED)" in str(again.errors[0])


def test_a_batch_with_bad_rows_only_calls_no_broker(broker: PickyBroker):
    scheduled = BatchScheduler(broker, OnConflict.KEEP).schedule(rows_of({"1": "p" * 0, "": "p"}))
    assert (scheduled.outcomes, list(scheduled.errors)) == ({"scheduled": 1}, [1])
    scheduled = BatchScheduler(broker, OnConflict.KEEP).schedule(rows_of({"": "p"}))
    assert (scheduled.outcomes, broker.written) == ({}, [1])


def sizes(batch: pa.RecordBatch, **limits: int) -> list[int]:
    return [part.num_rows for part in slices(batch, **limits)]


def test_slices_are_limited_in_rows_and_bytes():
    small = pa.record_batch({"payload": ["p"] * 2500})
    assert sizes(small, most_rows=1000) == [1000, 1000, 500]
    large = pa.record_batch({"payload": ["p" * 1000] * 100})
    assert max(sizes(large, most_rows=1000, most_bytes=10_000)) <= 10
    assert sizes(pa.record_batch({"payload": ["p" * 1000] * 3}), most_rows=10, most_bytes=100) == [1, 1, 1]
    assert sizes(pa.record_batch({"payload": pa.array([], pa.string())}), most_rows=10) == []


def test_slices_contain_every_row_in_its_order():
    batch = pa.record_batch({"payload": ["p" * (n % 700) for n in range(1234)]})
    parts = [text for part in slices(batch, most_rows=100, most_bytes=5000) for text in part.column(0).to_pylist()]
    assert parts == batch.column(0).to_pylist()
