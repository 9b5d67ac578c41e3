"""The Spark operator with a program of ours as spark-submit, a real ledger and the real trigger."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred

from airflow_delay_provider.brokers.ledger.embedded import EmbeddedBroker
from airflow_delay_provider.domain.exceptions import ConfigurationError, LedgerError
from airflow_delay_provider.domain.lifecycle import State
from airflow_delay_provider.operators.spark import SparkSubmitRetryOperator
from airflow_delay_provider.spark.admission import ClusterCircuit, TokenBucket
from airflow_delay_provider.spark.cluster.address import parse_address
from airflow_delay_provider.spark.failures import Verdict
from airflow_delay_provider.spark.retries import HISTORY_KEY, History, Phase, SparkRetries
from airflow_delay_provider.spark.tickets import DEFAULT_DEAD_LETTER_CHANNEL, WaitsFor
from airflow_delay_provider.testing.task_run import TaskRun
from airflow_delay_provider.triggers.spark import RetryTicketTrigger
from tests.unit.airflow.conftest import TaskInstance
from tests.unit.airflow.listening import MasterPort
from tests.unit.airflow.submitting import OUT_OF_MEMORY, REFUSED, UNHEARD_OF, WRONG_QUERY, SparkSubmit, TaskStateStore
from tests.unit.airflow.test_message_triggers import unreachable
from tests.unit.airflow.tickets import HOUR, tickets_in
from tests.unit.spark.answering import answering
from tools.servers.component import wait_for

GO = {"outcome": "go", "extensions": 0}
Dispatch = Callable[..., int]


@dataclass
class TryOfTask(TaskInstance):
    """One try of a task that has one retry."""

    try_number: int = 1
    max_tries: int = 1
    stats_tags: dict[str, str] = field(default_factory=dict)


class Task:
    """A task with its program, over all of its tries; each try is a new operator, as in a new process."""

    def __init__(self, folder: Path) -> None:
        self.program = SparkSubmit(folder / "program")
        self.store = TaskStateStore()
        self.ti = TryOfTask(task_id="load")
        self.options: dict[str, Any] = {}

    @property
    def context(self) -> Any:
        return {"ti": self.ti, "task_state_store": self.store}

    @property
    def history(self) -> History:
        return History.from_json(self.store.get(HISTORY_KEY))

    def operator(self) -> SparkSubmitRetryOperator:
        return SparkSubmitRetryOperator(
            task_id="load", application="job.py", spark_binary=self.program.path, retries=1, **self.options
        )

    def begin(self) -> RetryTicketTrigger | None:
        """Run until it ends or waits; return the trigger it waits with."""
        return self._run(lambda: self.operator().execute(self.context))

    def begin_next_try(self) -> RetryTicketTrigger | None:
        """As Airflow does after the process of a try was lost."""
        self.ti.try_number += 1
        return self.begin()

    def begin_cleared(self) -> RetryTicketTrigger | None:
        """As Airflow does after the task was cleared."""
        self.ti.max_tries = self.ti.try_number + 1
        return self.begin_next_try()

    def resume(self, event: dict[str, Any] | None = None) -> RetryTicketTrigger | None:
        return self._run(lambda: self.operator().resume(self.context, event or GO))

    def _run(self, work: Callable[[], None]) -> RetryTicketTrigger | None:
        try:
            work()
        except TaskDeferred as deferred:
            trigger: Any = deferred.trigger
            return trigger
        return None


@pytest.fixture
def task(tmp_path: Path, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> Task:
    """A task whose Spark runs where it runs."""
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", "host": "local[1]"}))
    return Task(tmp_path)


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch, task: Task) -> Iterator[MasterPort]:
    """Its Spark is a cluster."""
    port = MasterPort()
    port.define_connection(monkeypatch)
    yield port
    port.close()


# -- a job succeeds, fails for good, or comes back


def test_a_job_that_succeeds_ends_the_task_and_leaves_no_ticket(task: Task, broker: EmbeddedBroker) -> None:
    assert task.begin() is None
    assert (task.program.submissions, task.history.phase) == (1, Phase.ENDED)
    assert task.history.last.verdict is None
    assert tickets_in(broker) == []


def test_a_permanent_failure_fails_the_task_at_once_with_the_reason_in_one_line(
    task: Task, broker: EmbeddedBroker
) -> None:
    task.program.plan(WRONG_QUERY)
    with pytest.raises(AirflowFailException) as caught:
        task.begin()
    message = str(caught.value)
    assert message.startswith("the Spark job failed at attempt 1 (permanent): ")
    assert "TABLE_OR_VIEW_NOT_FOUND" in message
    assert message.endswith("; not tried again: it would fail again")
    assert "\n" not in message
    assert (task.program.submissions, task.history.phase) == (1, Phase.ENDED)
    assert tickets_in(broker) == []
    assert broker.peek(DEFAULT_DEAD_LETTER_CHANNEL) == []


def test_a_transient_failure_defers_the_task_with_a_ticket_in_the_ledger(task: Task, broker: EmbeddedBroker) -> None:
    task.program.plan(REFUSED)
    trigger = task.begin()
    assert trigger is not None

    (ticket,) = tickets_in(broker, State.SCHEDULED)
    history = task.history
    assert (ticket.attempt, ticket.verdict, ticket.waits_for) == (2, "transient", WaitsFor.BACKOFF)
    assert ticket.id == trigger._current.id
    assert "Connection refused" in ticket.reason
    assert (history.phase, history.last.verdict, history.last.exit_code) == (Phase.WAITING, Verdict.TRANSIENT, 1)
    assert history.next_at is not None
    assert timedelta(seconds=15) <= history.next_at - (history.last.ended_at or history.began_at)
    assert trigger.give_up_at == (history.began_at + timedelta(hours=24)).isoformat()
    assert json.loads(json.dumps(trigger.serialize()[1])) == trigger.serialize()[1]
    assert ticket.id in task.ti.pushed["delayed_message_link"]


def test_a_job_that_fails_twice_comes_back_by_its_tickets_and_succeeds(task: Task, dispatch: Dispatch) -> None:
    """With the trigger in between, as the triggerer runs it."""
    task.program.plan(REFUSED, REFUSED)
    run = TaskRun(task.operator(), task_state_store=task.store)
    for submissions in (1, 2):
        assert run.waiting
        assert task.program.submissions == submissions
        dispatch(HOUR)
        run.resume()
    assert not run.waiting
    assert [(each.number, each.verdict) for each in task.history.attempts] == [
        (1, Verdict.TRANSIENT),
        (2, Verdict.TRANSIENT),
        (3, None),
    ]
    assert task.program.submissions == 3


def test_unknown_failures_may_count_as_permanent(task: Task) -> None:
    task.program.plan(UNHEARD_OF)
    task.options["spark_retries"] = SparkRetries(unknown_as=Verdict.PERMANENT)
    with pytest.raises(AirflowFailException, match=r"attempt 1 \(unknown\)"):
        task.begin()


def test_rules_of_the_task_go_before_the_built_in_ones(task: Task) -> None:
    task.program.plan(UNHEARD_OF)
    task.options["failure_rules"] = [
        {"name": "full-moon", "verdict": "permanent", "reason": "the moon is full", "text": "the moon is full"}
    ]
    with pytest.raises(AirflowFailException, match="the moon is full"):
        task.begin()
    assert task.history.last.rule == "full-moon"


# -- budgets


def test_a_job_that_uses_up_its_attempts_fails_and_sends_a_dead_letter(task: Task, broker: EmbeddedBroker) -> None:
    task.program.plan(REFUSED, REFUSED)
    task.options["spark_retries"] = SparkRetries(max_attempts=2)
    assert task.begin() is not None
    with pytest.raises(
        AirflowFailException, match=r"attempt 2 \(transient\).*all 1 retries \(2 attempts\) are used up$"
    ):
        task.resume()

    (letter,) = broker.peek(DEFAULT_DEAD_LETTER_CHANNEL, limit=10)
    content = json.loads(letter.payload)
    assert content["reason"] == "all 1 retries (2 attempts) are used up"
    assert content["origin"] == {
        "dag_id": "invoices",
        "run_id": "manual__2030-01-01",
        "task_id": "load",
        "map_index": -1,
    }
    assert [each["verdict"] for each in content["attempts"]] == ["transient", "transient"]
    assert letter.origin is not None
    assert task.history.phase is Phase.ENDED


@pytest.mark.parametrize(("channel", "letters"), [("alarms", 1), (None, 0)])
def test_a_dead_letter_can_be_sent_elsewhere_or_nowhere(
    task: Task, broker: EmbeddedBroker, channel: str | None, letters: int
) -> None:
    task.program.plan(REFUSED)
    task.options |= {"spark_retries": SparkRetries(max_attempts=1), "dead_letter_channel": channel}
    with pytest.raises(AirflowFailException, match="used up"):
        task.begin()
    assert len(broker.peek("alarms", limit=10)) == letters
    assert broker.peek(DEFAULT_DEAD_LETTER_CHANNEL) == []


def test_a_job_that_wants_resources_stops_at_its_own_budget(task: Task) -> None:
    task.program.plan(OUT_OF_MEMORY, OUT_OF_MEMORY)
    task.options["spark_retries"] = SparkRetries(max_resource_failures=1)
    assert task.begin() is not None
    with pytest.raises(AirflowFailException, match="all 1 failures for lack of resources are used up"):
        task.resume()


def test_a_job_whose_attempts_are_used_up_fails_even_if_the_broker_is_unreachable(
    task: Task, broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """The dead letter cannot be sent, and the task still fails."""
    task.program.plan(REFUSED)
    task.options["spark_retries"] = SparkRetries(max_attempts=1)
    broker.check()
    operator = task.operator()
    operator._wait_out_a_known_outage = lambda *_: None  # type: ignore[method-assign]  # the broker is down only later
    with unreachable(Path(str(broker.ledger.url.database))), pytest.raises(AirflowFailException, match="used up"):
        operator.execute(task.context)
    assert "No dead letter was sent" in caplog.text
    assert task.history.phase is Phase.ENDED


# -- tickets that end otherwise


@pytest.mark.parametrize(
    ("end", "why", "letters"),
    [
        ("given_up", "it was given up", 0),
        ("expired", "the cluster is down and max_elapsed would be over", 1),
        ("lost", "its ticket could not be dispatched", 1),
    ],
)
def test_a_ticket_that_does_not_come_fails_the_task(
    task: Task, broker: EmbeddedBroker, end: str, why: str, letters: int
) -> None:
    """A user who gives a task up knows it; any other end sends a dead letter."""
    task.program.plan(REFUSED)
    task.begin()
    with pytest.raises(AirflowFailException, match=f"attempt 1 .transient.: .*; not tried again: {why}"):
        task.resume({"outcome": end, "extensions": 0})
    assert (task.program.submissions, task.history.phase) == (1, Phase.ENDED)
    assert len(broker.peek(DEFAULT_DEAD_LETTER_CHANNEL, limit=10)) == letters


def test_tickets_that_have_done_their_work_do_not_fill_their_channel(
    task: Task, broker: EmbeddedBroker, dispatch: Dispatch
) -> None:
    task.program.plan(REFUSED)
    task.begin()
    dispatch(HOUR)
    assert len(broker.peek("delay.retries", limit=10)) == 1
    task.resume()
    assert broker.peek("delay.retries", limit=10) == []


# -- processes that are lost


def test_an_attempt_whose_worker_is_gone_counts_for_the_cluster_and_is_submitted_again(task: Task) -> None:
    task.store.set(HISTORY_KEY, begun(task).as_json())
    assert task.begin_next_try() is None
    lost, second = task.history.attempts
    assert (lost.verdict, lost.rule) == (Verdict.INFRASTRUCTURE, "worker-lost")
    assert (second.number, second.verdict) == (2, None)
    assert task.program.submissions == 1


def test_workers_that_are_lost_again_and_again_use_up_the_budget_of_the_cluster(
    task: Task, broker: EmbeddedBroker
) -> None:
    task.options["spark_retries"] = SparkRetries(max_infrastructure_failures=0)
    task.store.set(HISTORY_KEY, begun(task).as_json())
    with pytest.raises(AirflowFailException, match=r"the Airflow worker of this attempt was lost.*all 0 failures"):
        task.begin_next_try()
    assert task.program.submissions == 0
    assert len(broker.peek(DEFAULT_DEAD_LETTER_CHANNEL, limit=10)) == 1


def begun(task: Task) -> History:
    now = task.operator()._clock.now()
    return History(began_at=now).begin_attempt(now)


def test_a_try_that_was_cut_off_while_it_waited_waits_for_the_same_ticket(task: Task, broker: EmbeddedBroker) -> None:
    task.program.plan(REFUSED)
    first = task.begin()
    again = task.begin_next_try()
    assert first is not None
    assert again is not None
    assert again._current.id == first._current.id
    assert len(tickets_in(broker)) == 1
    assert task.program.submissions == 1


def test_a_first_try_that_airflow_starts_again_waits_for_the_same_ticket(task: Task, broker: EmbeddedBroker) -> None:
    """It does so when the DAG cannot be read as the task comes back."""
    task.program.plan(REFUSED)
    first, again = task.begin(), task.begin()
    assert first is not None
    assert again is not None
    assert again._current.id == first._current.id
    assert (len(tickets_in(broker)), task.program.submissions) == (1, 1)


def test_a_ticket_that_could_not_be_stored_is_scheduled_by_the_next_try(task: Task, broker: EmbeddedBroker) -> None:
    task.program.plan(REFUSED)
    broker.check()
    operator = task.operator()
    operator._wait_out_a_known_outage = lambda *_: None  # type: ignore[method-assign]  # the broker is down only later
    with unreachable(Path(str(broker.ledger.url.database))), pytest.raises(LedgerError):
        operator.execute(task.context)
    assert task.history.phase is Phase.WAITING
    assert tickets_in(broker) == []

    assert task.begin_next_try() is not None
    (ticket,) = tickets_in(broker, State.SCHEDULED)
    assert (ticket.attempt, task.program.submissions) == (2, 1)
    assert ticket.deliver_at - task.history.next_at < timedelta(milliseconds=1)


def test_a_task_that_was_cleared_starts_over(task: Task, broker: EmbeddedBroker) -> None:
    task.program.plan(WRONG_QUERY)
    with pytest.raises(AirflowFailException):
        task.begin()
    assert task.begin_cleared() is None
    assert [each.number for each in task.history.attempts] == [1]


def test_a_task_that_was_cleared_while_it_waited_starts_over(task: Task, broker: EmbeddedBroker) -> None:
    """Its ticket was taken back by the trigger, which must not look like giving up."""
    task.program.plan(REFUSED)
    trigger = task.begin()
    assert trigger is not None
    broker.cancel([trigger._current.id])
    assert task.begin_cleared() is None
    assert ([each.number for each in task.history.attempts], task.program.submissions) == ([1], 2)


def test_a_task_that_was_cleared_long_after_its_worker_was_lost_starts_over(task: Task) -> None:
    long_ago = task.operator()._clock.now() - timedelta(days=30)
    task.store.set(HISTORY_KEY, History(began_at=long_ago).begin_attempt(long_ago).as_json())
    assert task.begin_cleared() is None
    assert [each.verdict for each in task.history.attempts] == [None]


# -- tasks that are ended


def test_ending_the_task_takes_back_the_ticket_it_has_just_scheduled(task: Task, broker: EmbeddedBroker) -> None:
    task.program.plan(REFUSED)
    operator = task.operator()
    with pytest.raises(TaskDeferred):
        operator.execute(task.context)
    operator.on_kill()
    assert tickets_in(broker, State.SCHEDULED) == []
    assert len(tickets_in(broker, State.CANCELLED)) == 1


def test_ending_a_task_before_its_ticket_is_stored_raises_nothing(task: Task, broker: EmbeddedBroker) -> None:
    operator = task.operator()
    operator._ticket_id = "not-stored-yet"
    operator.on_kill()
    assert tickets_in(broker) == []


def test_ending_a_task_that_has_not_begun_raises_nothing(task: Task) -> None:
    task.operator().on_kill()


def test_ending_the_task_ends_its_job_and_schedules_no_ticket(task: Task, broker: EmbeddedBroker) -> None:
    """Airflow lets a task that was ended run on, so it sees its job fail."""
    task.program.plan("exec sleep 300")
    operator, raised = task.operator(), list[BaseException]()

    def run() -> None:
        try:
            operator.execute(task.context)
        except (TaskDeferred, AirflowException) as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: running("sleep 300"), seconds=60, what="the job runs")
    operator.on_kill()
    thread.join(60)

    assert not thread.is_alive()
    assert not running("sleep 300")
    assert isinstance(raised[0], AirflowException)
    assert not isinstance(raised[0], TaskDeferred)
    assert tickets_in(broker) == []


def running(command: str) -> list[int]:
    """Children of this process that run the command."""
    children = psutil.Process().children(recursive=True)
    found = []
    for child in children:
        try:
            found += [child.pid] if " ".join(child.cmdline()) == command else []
        except psutil.NoSuchProcess:
            continue
    return found


# -- nothing was submitted


def test_a_wrong_argument_raises_as_it_is(task: Task, broker: EmbeddedBroker) -> None:
    task.options["track_driver_via_k8s_api"] = True
    with pytest.raises(Exception, match=r"(?i)kubernetes|k8s") as caught:
        task.begin()
    assert not isinstance(caught.value, AirflowFailException)
    assert (task.program.submissions, task.history.phase) == (0, Phase.ENDED)
    assert tickets_in(broker) == []


def test_a_wrong_connection_of_the_cluster_is_refused_before_anything_is_submitted(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"conn_type": "spark", "host": "spark://127.0.0.1:7077", "extra": {"rest-port": "seven"}}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(wrong))
    with pytest.raises(ConfigurationError, match="rest-port: 'seven'"):
        task.begin()
    assert task.program.submissions == 0


def test_a_wrong_connection_of_the_broker_is_refused_before_anything_is_submitted(task: Task) -> None:
    task.options["delay_conn_id"] = "delay_nowhere"
    with pytest.raises(ConfigurationError, match="'delay_nowhere' is not defined"):
        task.begin()
    assert task.program.submissions == 0


def test_a_program_that_is_not_there_is_a_permanent_failure(task: Task, broker: EmbeddedBroker) -> None:
    Path(task.program.path).unlink()
    with pytest.raises(AirflowFailException, match=r"attempt 1 \(permanent\)"):
        task.begin()
    assert tickets_in(broker) == []


# -- the cluster


def record_outage(broker: EmbeddedBroker, master: MasterPort) -> None:
    ClusterCircuit(broker.ledger, parse_address(master.name), bucket=TokenBucket(), clock=broker.clock).decide(1)


def test_nothing_is_submitted_to_a_cluster_that_is_known_to_be_down(
    task: Task, broker: EmbeddedBroker, master: MasterPort
) -> None:
    record_outage(broker, master)
    trigger = task.begin()
    assert trigger is not None
    (ticket,) = tickets_in(broker, State.SCHEDULED)
    assert (ticket.attempt, ticket.waits_for, ticket.cluster) == (1, WaitsFor.CLUSTER, master.name)
    assert (task.program.submissions, task.history.attempts, task.history.phase) == (0, (), Phase.WAITING)

    master.open()
    assert task.resume() is None
    assert ([each.number for each in task.history.attempts], task.program.submissions) == ([1], 1)


def test_a_task_whose_cluster_never_came_back_says_that_nothing_was_submitted(
    task: Task, broker: EmbeddedBroker, master: MasterPort
) -> None:
    record_outage(broker, master)
    task.begin()
    with pytest.raises(AirflowFailException, match="never submitted, as the cluster is down"):
        task.resume({"outcome": "expired", "extensions": 9})


@pytest.mark.parametrize("over", [True, False])
def test_a_cluster_whose_outage_may_be_over_is_checked_before_anything_is_submitted(
    task: Task, broker: EmbeddedBroker, master: MasterPort, over: bool
) -> None:
    record_outage(broker, master)
    broker.ledger.transact(lambda c: c.exec_driver_sql("UPDATE delay_cluster_circuit SET next_check_at_ms = 0"))
    if over:
        master.open()
    assert (task.begin() is None) is over
    assert task.program.submissions == (1 if over else 0)


def status_of(driver: str) -> str:
    return f"/v1/submissions/status/{driver}"


def in_state(state: str) -> bytes:
    """As a master writes it; the Spark provider reads it line by line."""
    return f'{{\n  "driverState" : "{state}",\n  "submissionId" : "driver-1",\n  "success" : true\n}}'.encode()


class OneAfterTheOther(dict[str, Any]):
    """Answers with the last state from then on."""

    def get(self, path: str, default: Any = None) -> Any:
        states = super().get(path, [default])
        return states.pop(0) if len(states) > 1 else states[0]


def test_a_job_that_the_cluster_no_longer_knows_is_submitted_again(
    task: Task, master: MasterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = "driver-20300101000000-0001", "driver-20300101000000-0002"
    task.program.plan(f'echo \'  "submissionId" : "{new}",\'')
    task.store.set("spark_job_id", old)
    task.store.set(HISTORY_KEY, begun(task).as_json())
    with answering({status_of(old): {"success": False}, status_of(new): in_state("FINISHED")}) as rest:
        cluster_mode = {"deploy-mode": "cluster", "rest-port": rest.rpartition(":")[2]}
        master.open().define_connection(monkeypatch, **cluster_mode)
        assert task.begin_next_try() is None
    assert task.program.submissions == 1
    assert task.store.get("spark_job_id") == new
    assert [(each.number, each.verdict) for each in task.history.attempts] == [(1, None)]


def test_a_job_that_still_runs_is_found_again_and_not_submitted_twice(
    task: Task, master: MasterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = "driver-20300101000000-0001"
    task.store.set("spark_job_id", job)
    task.store.set(HISTORY_KEY, begun(task).as_json())
    states = [in_state(state) for state in ("RUNNING", "RUNNING", "FINISHED")]
    with answering(OneAfterTheOther({status_of(job): states})) as rest:
        cluster_mode = {"deploy-mode": "cluster", "rest-port": rest.rpartition(":")[2]}
        master.open().define_connection(monkeypatch, **cluster_mode)
        assert task.begin_next_try() is None
    assert task.program.submissions == 0
    assert [(each.number, each.verdict) for each in task.history.attempts] == [(1, None)]


def test_an_attempt_is_stored_before_it_is_submitted(task: Task) -> None:
    """B61: else the next worker would not know of an attempt whose worker was lost."""
    stored = task.program.path + ".stored"
    store, submit = task.store, SparkSubmitRetryOperator._run_job

    def submit_what_is_stored(operator: SparkSubmitRetryOperator, context: Any, hook: Any) -> None:
        Path(stored).write_text(json.dumps(store.get(HISTORY_KEY)))
        submit(operator, context, hook)

    with patch.object(SparkSubmitRetryOperator, "_run_job", submit_what_is_stored):
        assert task.begin() is None
    known = History.from_json(json.loads(Path(stored).read_text()))
    assert known.phase is Phase.SUBMITTED
    assert [attempt.number for attempt in known.attempts] == [1]
