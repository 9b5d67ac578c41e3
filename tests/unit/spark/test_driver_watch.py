"""The log of a driver elsewhere: read on, not over, and never in the way. When a job has starved, told from the lines
of a real driver; times are seconds.
"""

from __future__ import annotations

from typing import Any

import pytest

from airflow_delay_provider.spark.process.driver_watch import MAX_BYTES, DriverLog, StarvationWatchdog, Stream
from tests.unit.spark.answering import answering

DRIVER = "driver-20261117130139-0000"
WORKER = "worker-20261117130136-127.0.0.1-37599"
WARNING = (
    "26/11/17 12:00:00 WARN TaskSchedulerImpl: Initial job has not accepted any resources; check your cluster UI to "
    "ensure that workers are registered and have sufficient resources"
)
ADDED = "26/11/17 12:00:00 INFO TaskSchedulerImpl: Adding task set {}.0 with 2 tasks resource profile 0"
REMOVED = "26/11/17 12:00:00 INFO TaskSchedulerImpl: Removed TaskSet {}.0 whose tasks have all completed, from pool "
REGISTERED = (
    "26/11/17 12:00:00 INFO StandaloneSchedulerBackend$StandaloneDriverEndpoint: Registered executor "
    "NettyRpcEndpointRef(spark-client://Executor) (127.0.0.1:46650) with ID {}, ResourceProfileId 0"
)
LOST = "26/11/17 12:00:00 ERROR TaskSchedulerImpl: Lost executor {} on 127.0.0.1: worker lost: 127.0.0.1:43757"
KILLED = "26/11/17 12:00:00 INFO TaskSchedulerImpl: Executor {} on 127.0.0.1 killed by driver."


def answer(begin: int, end: int, size: int, text: str) -> bytes:
    return f"==== Bytes {begin}-{end} of {size} of /var/spark/{DRIVER}/stderr ====\n{text}".encode()


def test_a_log_is_read_on_from_where_it_was_left() -> None:
    stream = Stream("stderr")
    assert stream.parameters() == {"logType": "stderr", "byteLength": MAX_BYTES}
    assert stream.take(answer(0, 8, 8, "one\ntwo\n")) == (["one", "two"], False)
    assert stream.parameters()["offset"] == 8
    assert stream.take(answer(8, 8, 8, "")) == ([], False)


def test_a_line_is_given_when_it_is_complete() -> None:
    stream = Stream("stderr")
    assert stream.take(answer(0, 6, 6, "one\ntw")) == (["one"], False)
    assert stream.take(answer(6, 8, 8, "o\n")) == (["two"], False)


def test_more_is_asked_for_while_there_is_more() -> None:
    stream = Stream("stderr")
    assert stream.take(answer(0, 4, 8, "one\n")) == (["one"], True)
    assert stream.take(answer(4, 8, 8, "two\n")) == (["two"], False)


def test_a_worker_that_does_not_move_on_is_not_asked_for_ever() -> None:
    stream = Stream("stderr")
    stream.take(answer(0, 4, 8, "one\n"))
    assert stream.take(answer(4, 4, 8, "")) == ([], False)


def test_a_worker_that_has_no_such_log_says_nothing() -> None:
    assert Stream("stderr").take(b"Error: invalid log directory") == ([], False)


def master(worker_ui: str, driver_worker: str = WORKER) -> dict[str, Any]:
    return {
        "workers": [{"id": WORKER, "webuiaddress": worker_ui}],
        "activedrivers": [],
        "completeddrivers": [{"id": DRIVER, "worker": driver_worker}],
    }


def test_the_master_that_knows_the_driver_names_the_worker_that_has_its_log() -> None:
    log = f"/log/?driverId={DRIVER}&logType={{}}&byteLength={MAX_BYTES}"
    logs = {log.format("stdout"): answer(0, 4, 4, "out\n"), log.format("stderr"): answer(0, 4, 4, "err\n")}
    standby = {"workers": [], "activedrivers": [], "completeddrivers": []}
    with (
        answering(logs) as worker,
        answering({"/json/": standby}) as other,
        answering({"/json/": master(f"http://{worker}")}) as leader,
    ):
        read = list(DriverLog([f"http://{other}", f"http://{leader}"], DRIVER).new_lines())
    assert read == ["out", "err"]


@pytest.mark.parametrize(
    "found",
    [503, b"<html>another program</html>", [], {"status": "ok"}, master("http://127.0.0.1:9"), master("", "None")],
    ids=["an error", "a page", "a list", "another object", "a worker that is gone", "a driver without a worker"],
)
def test_an_unexpected_answer_in_place_of_a_master_is_no_error(found: Any) -> None:
    with answering({"/json/": found}) as server:
        assert list(DriverLog([f"http://{server}"], DRIVER).new_lines()) == []


@pytest.fixture
def watch() -> StarvationWatchdog:
    return StarvationWatchdog(120)


def see(watch: StarvationWatchdog, *events: tuple[float, str]) -> None:
    for now, line in events:
        watch.observe(now, line)


def test_a_job_that_no_executor_accepts_starves_after_the_timeout(watch: StarvationWatchdog) -> None:
    see(watch, *((15 * n, WARNING) for n in range(1, 9)))
    assert not watch.starved(120)
    watch.observe(135, WARNING)
    assert watch.starved(135) == "no executor accepted work for 120 s (starvation watchdog)"


def test_warnings_that_have_stopped_are_of_a_job_that_was_accepted(watch: StarvationWatchdog) -> None:
    see(watch, *((15 * n, WARNING) for n in range(1, 9)))
    assert not watch.starved(10_000)


def test_warnings_of_another_context_are_counted_separately(watch: StarvationWatchdog) -> None:
    see(watch, (15, WARNING), (30, WARNING), (900, WARNING), (915, WARNING))
    assert not watch.starved(915)


def test_an_executor_that_comes_ends_the_wait(watch: StarvationWatchdog) -> None:
    see(watch, *((15 * n, WARNING) for n in range(1, 9)), (121, REGISTERED.format(0)), (135, WARNING), (150, WARNING))
    assert not watch.starved(150)


def test_a_job_starves_when_all_executors_were_lost_while_tasks_wait(watch: StarvationWatchdog) -> None:
    see(watch, (0, ADDED.format(0)), (5, REGISTERED.format(0)), (6, REGISTERED.format(1)))
    see(watch, (50, LOST.format(0)), (60, LOST.format(1)))
    assert not watch.starved(179)
    assert watch.starved(180) == "all executors were lost and none came back for 120 s (starvation watchdog)"


def test_one_executor_that_is_left_or_comes_back_is_enough(watch: StarvationWatchdog) -> None:
    see(watch, (0, ADDED.format(0)), (5, REGISTERED.format(0)), (6, REGISTERED.format(1)), (50, LOST.format(0)))
    assert not watch.starved(1_000)
    see(watch, (1_000, LOST.format(1)), (1_100, REGISTERED.format(2)))
    assert not watch.starved(2_000)
    watch.observe(2_000, LOST.format(2))
    assert not watch.starved(2_119)
    assert watch.starved(2_120)


def test_a_driver_with_nothing_to_do_needs_no_executor(watch: StarvationWatchdog) -> None:
    see(watch, (0, ADDED.format(0)), (5, REGISTERED.format(0)), (50, REMOVED.format(0)), (60, KILLED.format(0)))
    assert not watch.starved(1_000)
    watch.observe(1_000, ADDED.format(1))
    assert not watch.starved(1_119)
    assert watch.starved(1_120)


def test_local_mode_registers_no_executor_and_never_starves(watch: StarvationWatchdog) -> None:
    watch.observe(0, ADDED.format(0))
    assert not watch.starved(10_000)


def test_without_info_lines_a_lost_executor_says_nothing_of_the_others(watch: StarvationWatchdog) -> None:
    watch.observe(0, LOST.format(0))
    assert not watch.starved(10_000)


def test_structured_log_lines_say_the_same(watch: StarvationWatchdog) -> None:
    structured = '{{"ts":"2026-11-17T12:00:00Z","level":"INFO","msg":"{}","logger":"TaskSchedulerImpl"}}'
    lines = (ADDED.format(0), REGISTERED.format(0), LOST.format(0))
    see(watch, *((0, structured.format(line[18:])) for line in lines))
    assert watch.starved(120)


def test_a_driver_that_no_worker_takes_starves(watch: StarvationWatchdog) -> None:
    watch.observe_driver(0, "SUBMITTED")
    watch.observe_driver(119, "SUBMITTED")
    assert not watch.starved(119)
    assert watch.starved(120) == "no worker took the driver for 120 s (starvation watchdog)"


@pytest.mark.parametrize("state", ["RUNNING", "FINISHED", "RELAUNCHING", None])
def test_a_driver_that_was_taken_does_not_starve(watch: StarvationWatchdog, state: str | None) -> None:
    watch.observe_driver(0, "SUBMITTED")
    watch.observe_driver(100, state)
    assert not watch.starved(1_000)


def test_a_watch_without_a_limit_waits_for_ever() -> None:
    watch = StarvationWatchdog(float("inf"))
    see(watch, (0, WARNING), (15, WARNING), (16, ADDED.format(0)), (17, REGISTERED.format(0)), (18, LOST.format(0)))
    watch.observe_driver(0, "SUBMITTED")
    assert not watch.starved(1e12)
