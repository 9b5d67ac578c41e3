"""Whatever a job prints, classifying it ends, soon, with a classification."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_delay_provider.spark.failures import Evidence, OutputWindow, Verdict, classify

PIECES = st.sampled_from(
    [
        "Traceback (most recent call last):",
        '  File "job.py", line 1, in <module>',
        "KeyError: 'x'",
        "java.net.ConnectException: Connection refused",
        "Caused by: java.io.EOFException",
        "\tat org.apache.spark.Task.run(Task.scala:1)",
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
        "26/01/01 00:00:00 ERROR Executor: Exception in task 0.0",
        "26/01/01 00:00:00 WARN TaskSetManager: Lost task 0.0: x.YException",
        "26/01/01 00:00:00 INFO DAGScheduler: Job 1 finished: count",
        'Exception in thread "main" java.lang.Error',
        '{"level":"ERROR","msg":"[A_B] x SQLSTATE: 42000","exception":{"class":1,"msg":null,"stacktrace":[1,{}]}}',
        '{"msg":{"a":[]},"exception":[]}',
        "... 5 lines left out ...",
        "",
    ]
)
LINES = st.lists(PIECES | st.text(max_size=200), max_size=30)


@settings(max_examples=300, deadline=20_000)
@given(
    output=LINES,
    driver_output=LINES,
    exception=st.text(max_size=300),
    diagnostics=st.text(max_size=300),
    exit_code=st.none() | st.integers(-300, 300),
    driver_state=st.none() | st.sampled_from(["FAILED", "ERROR", "KILLED", "?"]),
    pod_reason=st.none() | st.text(max_size=20),
)
def test_classifying_never_raises_and_explains_itself_in_one_short_line(
    output: list[str],
    driver_output: list[str],
    exception: str,
    diagnostics: str,
    exit_code: int | None,
    driver_state: str | None,
    pod_reason: str | None,
) -> None:
    window = OutputWindow()
    for line in output:
        window.feed(line)

    classification = classify(
        Evidence(
            output=window.lines(),
            driver_output=driver_output,
            exception=exception,
            diagnostics=diagnostics,
            exit_code=exit_code,
            driver_state=driver_state,
            pod_reason=pod_reason,
        )
    )

    assert isinstance(classification.verdict, Verdict)
    assert bool(classification.rule) or classification.verdict is Verdict.UNKNOWN
    assert len(classification.reason) < 500
    assert len(classification.reason.splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    [
        "a" * 1_000_000,
        "a." * 500_000,
        "Caused by: " * 100_000,
        "[" + "A_" * 500_000,
        "(" * 1_000_000,
        "java.lang.Exception" * 50_000,
        "Error: " * 150_000,
        "x(" * 500_000,
        " " * 1_000_000,
        "\tat " * 250_000,
        "password=" * 110_000,
        "://a:" * 200_000,
        '{"msg":' * 140_000,
        "[" * 1_000_000,
        "exceeding " * 100_000,
        "token (" * 140_000,
    ],
    ids=lambda line: line[:12],
)
def test_a_line_of_a_megabyte_takes_no_time(line: str) -> None:
    began = time.process_time()

    window = OutputWindow()
    for _ in range(20):
        window.feed(line)
        window.feed(f"java.io.IOException: {line}")
    classify(Evidence(exit_code=1, output=window.lines(), exception=line, diagnostics=line))
    classify(Evidence(exit_code=1, output=[line] * 20))

    assert time.process_time() - began < 3
