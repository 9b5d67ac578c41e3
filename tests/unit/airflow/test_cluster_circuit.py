"""The circuit of a cluster, with a real port to check and a real ledger."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier

import pytest

from airflow_delay_provider.brokers.ledger.cluster_circuits import Outage
from airflow_delay_provider.brokers.ledger.database import Ledger
from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.admission import (
    CHECKS,
    MAX_NAME_LENGTH,
    AdmissionDecision,
    ClusterCircuit,
    TokenBucket,
)
from airflow_delay_provider.spark.cluster.address import ClusterAddress, parse_address
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


def circuit_of(ledger: Ledger, master: MasterPort, clock: SettableClock, *, drawn: float = 1.0) -> ClusterCircuit:
    bucket = TokenBucket(per_second=2, burst=2)
    return ClusterCircuit(ledger, parse_address(master.name), bucket=bucket, clock=clock, random_source=lambda: drawn)


@pytest.fixture
def circuit(ledger: Ledger, master: MasterPort, clock: SettableClock) -> ClusterCircuit:
    return circuit_of(ledger, master, clock)


def test_a_cluster_that_is_up_is_checked_once_and_each_gets_a_token(circuit: ClusterCircuit, master: MasterPort):
    master.open()
    assert circuit.decide(4) == [
        AdmissionDecision(at=START),
        AdmissionDecision(at=START),
        AdmissionDecision(at=START + SECOND / 2),
        AdmissionDecision(at=START + SECOND),
    ]
    assert master.looks == 1
    assert circuit.known_outage() is None


def test_a_submission_with_a_token_takes_no_other(circuit: ClusterCircuit, master: MasterPort):
    master.open()
    assert circuit.decide(9, with_token=9) == [AdmissionDecision(at=START)] * 9
    assert circuit.decide(3)[-1] == AdmissionDecision(at=START + SECOND / 2)


def test_no_submission_causes_no_check(circuit: ClusterCircuit, master: MasterPort):
    master.open()
    assert circuit.decide(0) == []
    assert master.looks == 0


def test_all_submissions_to_a_cluster_that_is_down_wait_for_the_next_check(circuit: ClusterCircuit, master: MasterPort):
    decisions = circuit.decide(3)
    assert {decision.at for decision in decisions} == {START + CHECKS.initial}
    assert all("Connection refused" in decision.down for decision in decisions)
    assert circuit.known_outage() == Outage(since=START, failed_checks=1, next_check_at=START + CHECKS.initial)


def test_no_check_runs_before_it_is_due_even_if_the_cluster_is_up_again(
    ledger: Ledger, master: MasterPort, clock: SettableClock, circuit: ClusterCircuit
):
    """Another process asks with a circuit of its own."""
    circuit.decide(1)
    master.open()
    clock.advance(CHECKS.initial - SECOND / 10)

    (decision,) = circuit_of(ledger, master, clock).decide(1)

    assert decision.at == START + CHECKS.initial
    assert decision.down == f"{master.name} was down at the last check, since 00:00:00 UTC"
    assert master.looks == 0


def test_a_cluster_that_is_back_closes_the_circuit_and_gives_tokens(
    circuit: ClusterCircuit, master: MasterPort, clock: SettableClock
):
    circuit.decide(1)
    master.open()
    now = clock.advance(CHECKS.initial)
    assert circuit.decide(3) == [
        AdmissionDecision(at=now),
        AdmissionDecision(at=now),
        AdmissionDecision(at=now + SECOND / 2),
    ]
    assert master.looks == 1
    clock.set(START)
    assert circuit.known_outage() is None


def test_asking_for_an_outage_checks_when_that_is_due(
    circuit: ClusterCircuit, master: MasterPort, clock: SettableClock
):
    circuit.decide(1)
    clock.advance(CHECKS.initial)
    assert circuit.known_outage() == Outage(
        since=START, failed_checks=2, next_check_at=clock.now() + 2 * CHECKS.initial
    )
    clock.advance(2 * CHECKS.initial)
    master.open()
    assert circuit.known_outage() is None
    assert circuit.known_outage() is None
    assert master.looks == 1


def test_a_cluster_that_stays_down_is_checked_ever_more_rarely(circuit: ClusterCircuit, clock: SettableClock):
    pauses = []
    for _ in range(6):
        (decision,) = circuit.decide(1)
        pauses.append(decision.at - clock.now())
        clock.set(decision.at)
    assert pauses == [seconds * SECOND for seconds in (10, 20, 40, 60, 60, 60)]


def test_the_pause_between_checks_is_never_less_than_its_floor(
    ledger: Ledger, master: MasterPort, clock: SettableClock
):
    (decision,) = circuit_of(ledger, master, clock, drawn=0.0).decide(1)
    assert decision.at == START + CHECKS.floor


def test_checks_at_the_same_time_count_as_one(ledger: Ledger, master: MasterPort, clock: SettableClock):
    start = Barrier(4)

    class Late(ClusterCircuit):
        """Knows what was known before any check, as a process that checks at the same time does."""

        def _open(self, known: Outage | None, reason: str) -> AdmissionDecision:
            start.wait(20)
            return super()._open(known, reason)

    bucket = TokenBucket()
    circuits = [Late(ledger, parse_address(master.name), bucket=bucket, clock=clock) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: each.decide(1), circuits))
    noted = circuits[0].known_outage()
    assert noted is not None
    assert noted.failed_checks == 1


def test_submissions_have_a_token_bucket_beside_that_of_coming_back(circuit: ClusterCircuit, master: MasterPort):
    circuit.take_tokens(10)
    assert circuit.take_submission_tokens(3) == [START, START, START + SECOND / 2]
    assert master.looks == 0


def test_a_long_name_of_a_cluster_is_still_a_key_of_its_own(ledger: Ledger, clock: SettableClock):
    masters = ",".join(f"host-{number:03}.example.org:7077" for number in range(20))
    clusters = [parse_address(f"spark://{masters},{last}:7077") for last in ("zz-one", "zz-two")]
    assert all(len(cluster.name) > MAX_NAME_LENGTH for cluster in clusters)

    def turn(cluster: ClusterAddress) -> list[timedelta]:
        circuit = ClusterCircuit(ledger, cluster, bucket=TokenBucket(burst=1), clock=clock)
        return [each - START for each in circuit.take_tokens(1) + circuit.take_submission_tokens(1)]

    assert [turn(cluster) for cluster in clusters] == [[timedelta(0)] * 2] * 2
    assert turn(clusters[0]) == [SECOND, SECOND]


def test_the_bucket_is_set_in_airflows_configuration(monkeypatch: pytest.MonkeyPatch):
    assert TokenBucket.from_airflow() == TokenBucket(per_second=1.0, burst=5)
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSIONS_PER_SECOND", "0.5")
    monkeypatch.setenv("AIRFLOW__DELAY__SPARK_SUBMISSION_BURST", "7")
    assert TokenBucket.from_airflow() == TokenBucket(per_second=0.5, burst=7)


@pytest.mark.parametrize("settings", [{"per_second": 0.0}, {"per_second": 1001}, {"per_second": -1}, {"burst": 0}])
def test_a_bucket_that_gives_nothing_is_refused(settings: dict[str, float]):
    with pytest.raises(ConfigurationError, match=r"\[delay\] spark_submission"):
        TokenBucket(**settings)  # type: ignore[arg-type]
