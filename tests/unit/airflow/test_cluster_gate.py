"""The gate before a cluster, with a real port to look at and a real ledger."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier

import pytest

from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.hooks.cluster_gate import LOOKS, MAX_NAME_LENGTH, Answer, Bucket, ClusterGate
from airflow_delay_provider.ledger.database import Ledger
from airflow_delay_provider.ledger.gates import Outage
from airflow_delay_provider.spark.probes.address import ClusterAddress, parse_address
from airflow_delay_provider.testing.clock import START, SettableClock
from tests.unit.airflow.listening import MasterPort

SECOND = timedelta(seconds=1)


@pytest.fixture
def master() -> Iterator[MasterPort]:
    port = MasterPort()
    yield port
    port.close()


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


def gate_of(ledger: Ledger, master: MasterPort, clock: SettableClock, *, drawn: float = 1.0) -> ClusterGate:
    bucket = Bucket(per_second=2, burst=2)
    return ClusterGate(ledger, parse_address(master.name), bucket=bucket, clock=clock, random_source=lambda: drawn)


@pytest.fixture
def gate(ledger: Ledger, master: MasterPort, clock: SettableClock) -> ClusterGate:
    return gate_of(ledger, master, clock)


def test_a_cluster_that_is_up_is_looked_at_once_and_each_gets_a_turn(gate: ClusterGate, master: MasterPort):
    master.open()
    assert gate.ask(4) == [
        Answer(at=START),
        Answer(at=START),
        Answer(at=START + SECOND / 2),
        Answer(at=START + SECOND),
    ]
    assert master.looks == 1
    assert gate.known_outage() is None


def test_who_has_had_a_turn_needs_no_other(gate: ClusterGate, master: MasterPort):
    master.open()
    assert gate.ask(9, had_turn=9) == [Answer(at=START)] * 9
    assert gate.ask(3)[-1] == Answer(at=START + SECOND / 2)


def test_nobody_who_asks_causes_no_look(gate: ClusterGate, master: MasterPort):
    master.open()
    assert gate.ask(0) == []
    assert master.looks == 0


def test_a_cluster_that_is_down_is_told_to_all_with_the_next_look(gate: ClusterGate, master: MasterPort):
    answers = gate.ask(3)
    assert {answer.at for answer in answers} == {START + LOOKS.initial}
    assert all("Connection refused" in answer.down for answer in answers)
    assert gate.known_outage() == Outage(since=START, looks=1, next_look_at=START + LOOKS.initial)


def test_nobody_looks_before_the_next_look_is_due_even_if_it_is_up_again(
    ledger: Ledger, master: MasterPort, clock: SettableClock, gate: ClusterGate
):
    """Another process asks with a gate of its own."""
    gate.ask(1)
    master.open()
    clock.advance(LOOKS.initial - SECOND / 10)

    (answer,) = gate_of(ledger, master, clock).ask(1)

    assert answer.at == START + LOOKS.initial
    assert answer.down == f"{master.name} was down when last looked at, since 00:00:00 UTC"
    assert master.looks == 0


def test_a_cluster_that_is_back_opens_the_gate_and_gives_turns(
    gate: ClusterGate, master: MasterPort, clock: SettableClock
):
    gate.ask(1)
    master.open()
    now = clock.advance(LOOKS.initial)
    assert gate.ask(3) == [Answer(at=now), Answer(at=now), Answer(at=now + SECOND / 2)]
    assert master.looks == 1
    clock.set(START)
    assert gate.known_outage() is None


def test_who_asks_for_an_outage_when_the_next_look_is_due_looks(
    gate: ClusterGate, master: MasterPort, clock: SettableClock
):
    gate.ask(1)
    clock.advance(LOOKS.initial)
    assert gate.known_outage() == Outage(since=START, looks=2, next_look_at=clock.now() + 2 * LOOKS.initial)
    clock.advance(2 * LOOKS.initial)
    master.open()
    assert gate.known_outage() is None
    assert gate.known_outage() is None
    assert master.looks == 1


def test_a_cluster_that_stays_down_is_looked_at_ever_more_rarely(gate: ClusterGate, clock: SettableClock):
    pauses = []
    for _ in range(6):
        (answer,) = gate.ask(1)
        pauses.append(answer.at - clock.now())
        clock.set(answer.at)
    assert pauses == [seconds * SECOND for seconds in (10, 20, 40, 60, 60, 60)]


def test_the_pause_between_looks_is_never_less_than_its_floor(ledger: Ledger, master: MasterPort, clock: SettableClock):
    (answer,) = gate_of(ledger, master, clock, drawn=0.0).ask(1)
    assert answer.at == START + LOOKS.floor


def test_those_who_look_at_the_same_time_count_as_one(ledger: Ledger, master: MasterPort, clock: SettableClock):
    start = Barrier(4)

    class Late(ClusterGate):
        """Knows what was known before anybody looked, as a process that looks at the same time does."""

        def _note_down(self, known: Outage | None, reason: str) -> Answer:
            start.wait(20)
            return super()._note_down(known, reason)

    bucket = Bucket()
    gates = [Late(ledger, parse_address(master.name), bucket=bucket, clock=clock) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: each.ask(1), gates))
    noted = gates[0].known_outage()
    assert noted is not None
    assert noted.looks == 1


def test_submissions_have_a_bucket_beside_that_of_coming_back(gate: ClusterGate, master: MasterPort):
    gate.take_turns(10)
    assert gate.submission_turns(3) == [START, START, START + SECOND / 2]
    assert master.looks == 0


def test_a_long_name_of_a_cluster_is_still_a_key_of_its_own(ledger: Ledger, clock: SettableClock):
    masters = ",".join(f"host-{number:03}.example.org:7077" for number in range(20))
    clusters = [parse_address(f"spark://{masters},{last}:7077") for last in ("zz-one", "zz-two")]
    assert all(len(cluster.name) > MAX_NAME_LENGTH for cluster in clusters)

    def turn(cluster: ClusterAddress) -> list[timedelta]:
        gate = ClusterGate(ledger, cluster, bucket=Bucket(burst=1), clock=clock)
        return [each - START for each in gate.take_turns(1) + gate.submission_turns(1)]

    assert [turn(cluster) for cluster in clusters] == [[timedelta(0)] * 2] * 2
    assert turn(clusters[0]) == [SECOND, SECOND]


def test_the_bucket_is_set_in_airflows_configuration(monkeypatch: pytest.MonkeyPatch):
    assert Bucket.from_airflow() == Bucket(per_second=1.0, burst=5)
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSIONS_PER_SECOND", "0.5")
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSION_BURST", "7")
    assert Bucket.from_airflow() == Bucket(per_second=0.5, burst=7)


@pytest.mark.parametrize("settings", [{"per_second": 0.0}, {"per_second": 1001}, {"per_second": -1}, {"burst": 0}])
def test_a_bucket_that_gives_nothing_is_refused(settings: dict[str, float]):
    with pytest.raises(ConfigurationError, match=r"\[delay\] spark_submission"):
        Bucket(**settings)  # type: ignore[arg-type]
