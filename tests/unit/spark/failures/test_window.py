"""The window keeps what matters of a stream of any length."""

from __future__ import annotations

from airflow_delay_provider.spark.failures import Evidence, OutputWindow, Verdict, classify

NOISE = "26/01/01 00:00:00 INFO BlockManagerInfo: Added broadcast_0_piece0 in memory"


def fed(*lines: str) -> OutputWindow:
    window = OutputWindow()
    for line in lines:
        window.feed(line)
    return window


def test_a_short_stream_is_kept_whole_and_in_order() -> None:
    assert fed("one\n", "two\r\n", "three").lines() == ["one", "two", "three"]


def test_gaps_say_how_many_lines_are_missing() -> None:
    lines = fed(*[NOISE] * 1000).lines()

    assert lines[0] == "... 800 lines left out ..."
    assert len(lines) == 201


def test_the_first_error_is_kept_with_the_lines_after_it() -> None:
    lines = fed(*[NOISE] * 500, "java.io.IOException: broken", "\tat a.b.C", *[NOISE] * 5000).lines()

    assert "java.io.IOException: broken" in lines
    assert "\tat a.b.C" in lines


def test_decisive_lines_of_the_whole_stream_are_kept() -> None:
    middle = ["Caused by: java.net.ConnectException: Connection refused", "x [DIVIDE_BY_ZERO] y SQLSTATE: 22012"]
    lines = fed("ERROR: first", *[NOISE] * 500, *middle, *[NOISE] * 5000).lines()

    assert [line for line in lines if line in middle] == middle


def test_any_exception_name_after_a_traceback_is_kept() -> None:
    traceback = ["Traceback (most recent call last):", '  File "job.py"', "    load()", "shop.TooFew: 3"]

    assert "shop.TooFew: 3" in fed("ERROR: first", *[NOISE] * 500, *traceback, *[NOISE] * 5000).lines()


def test_the_cause_in_the_middle_of_a_long_log_decides() -> None:
    window = fed(
        *[NOISE] * 3000,
        "26/01/01 00:00:00 ERROR StandaloneSchedulerBackend: Reason: All masters are unresponsive! Giving up.",
        *[NOISE] * 3000,
        "java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.",
        *[NOISE] * 100,
    )

    assert classify(Evidence(exit_code=1, output=window.lines())).verdict is Verdict.INFRASTRUCTURE


def test_memory_is_bounded_in_lines_and_in_length() -> None:
    window = OutputWindow()
    for number in range(50_000):
        window.feed(f"java.io.IOException: broken {number}")
    window.feed("x" * 5_000_000)

    assert len(window.lines()) < 1000
    assert max(map(len, window.lines())) <= 4000


def test_structured_records_become_text() -> None:
    lines = fed('{"ts":"t","level":"ERROR","msg":"a\\nb","exception":{"class":"C","msg":"m"},"logger":"L"}').lines()

    assert lines == ["t ERROR L: a", "b", "C: m"]
