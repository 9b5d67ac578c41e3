"""The log of a driver elsewhere: read on, not over, and never in the way."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_delay_provider.spark.process.driver_log import MAX_BYTES, DriverLog, Stream
from tests.unit.spark.answering import answering

DRIVER = "driver-20261117130139-0000"
WORKER = "worker-20261117130136-127.0.0.1-37599"


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
    ids=["an error", "a page", "a list", "another object", "a worker that is gone", "a driver that nobody took"],
)
def test_whatever_is_found_in_the_place_of_a_master_is_no_error(found: Any) -> None:
    with answering({"/json/": found}) as server:
        assert list(DriverLog([f"http://{server}"], DRIVER).new_lines()) == []
