"""What weighs more than what."""

from __future__ import annotations

import json

from airflow_delay_provider.spark.failures import Evidence, Verdict, classify

REFUSED = "java.net.ConnectException: Connection refused"


def verdict(*output: str, exit_code: int | None = 1) -> Verdict:
    return classify(Evidence(exit_code=exit_code, output=output)).verdict


def test_a_classification_names_rule_line_and_reason_in_one_line() -> None:
    classification = classify(
        Evidence(exit_code=1, output=["Traceback (most recent call last):", "NameError: name 'x'"])
    )

    assert classification.rule == "python-mistake"
    assert classification.line == "NameError: name 'x'"
    assert classification.reason == "the Python program is wrong: NameError: name 'x'"


def test_nothing_known_is_unknown() -> None:
    classification = classify(Evidence())

    assert (classification.verdict, classification.rule, classification.line) == (Verdict.UNKNOWN, "", "")


def test_the_root_of_the_causes_decides_over_its_wrapper() -> None:
    wrapped = "pyspark.errors.exceptions.captured.AnalysisException: org.apache.hadoop.hive.ql.metadata.HiveException"

    assert verdict(f'Exception in thread "main" {wrapped}', f"Caused by: {REFUSED}") is Verdict.TRANSIENT
    assert verdict(f'Exception in thread "main" {wrapped}') is Verdict.PERMANENT


def test_a_lost_shuffle_file_is_no_missing_file() -> None:
    assert (
        verdict(
            "org.apache.spark.SparkException: Job aborted: org.apache.spark.shuffle.FetchFailedException",
            "Caused by: java.io.FileNotFoundException: /tmp/shuffle_0_0_0.index (No such file or directory)",
        )
        is Verdict.INFRASTRUCTURE
    )


def test_a_declared_cause_decides_over_its_effects() -> None:
    assert (
        verdict(
            "Traceback (most recent call last):",
            '  File "job.py", line 1, in <module>',
            "ConnectionRefusedError: [Errno 111] Connection refused",
            "",
            "The above exception was the direct cause of the following exception:",
            "",
            "Traceback (most recent call last):",
            '  File "job.py", line 3, in <module>',
            "RuntimeError: orders could not be loaded",
        )
        is Verdict.TRANSIENT
    )


def test_a_mistake_made_while_handling_a_failure_decides() -> None:
    assert (
        verdict(
            "Traceback (most recent call last):",
            '  File "job.py", line 1, in <module>',
            "ConnectionRefusedError: [Errno 111] Connection refused",
            "",
            "During handling of the above exception, another exception occurred:",
            "",
            "Traceback (most recent call last):",
            '  File "job.py", line 3, in <module>',
            "NameError: name 'notify' is not defined",
        )
        is Verdict.PERMANENT
    )


def test_an_unknown_exception_is_not_explained_by_an_earlier_one() -> None:
    assert (
        verdict(
            "26/01/01 00:00:00 ERROR Executor: Exception in task 0.0 in stage 0.0 (TID 0)",
            REFUSED,
            "Traceback (most recent call last):",
            '  File "job.py", line 3, in <module>',
            "shop.TooFewOrders: 3",
        )
        is Verdict.UNKNOWN
    )


def test_an_uninformative_end_is_explained_by_earlier_lines() -> None:
    assert (
        verdict(
            "26/01/01 00:00:00 ERROR StandaloneSchedulerBackend: Application has been killed. Reason: All masters are "
            "unresponsive! Giving up.",
            "Traceback (most recent call last):",
            '  File "job.py", line 3, in <module>',
            "py4j.protocol.Py4JJavaError: An error occurred while calling o1.count.",
            ": java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.",
        )
        is Verdict.INFRASTRUCTURE
    )


def test_errors_that_a_later_job_survived_decide_nothing() -> None:
    failed = ["26/01/01 00:00:00 ERROR Executor: Exception in task 0.0 in stage 0.0 (TID 0)", REFUSED]

    assert verdict(*failed) is Verdict.TRANSIENT
    assert verdict(*failed, "26/01/01 00:00:09 INFO DAGScheduler: Job 1 finished: count") is Verdict.UNKNOWN


def test_a_record_of_another_thread_does_not_cut_a_traceback() -> None:
    assert (
        verdict(
            "Traceback (most recent call last):",
            '  File "job.py", line 3, in <module>',
            "26/01/01 00:00:00 INFO BlockManagerInfo: Removed broadcast_0_piece0",
            "    main()",
            "KeyError: 'eu'",
        )
        is Verdict.PERMANENT
    )


def test_a_kill_signal_decides_over_earlier_log_lines() -> None:
    logged = ["26/01/01 00:00:00 WARN Client: trouble", REFUSED]

    for exit_code in (137, 143, -9, -15):
        assert verdict(*logged, exit_code=exit_code) is Verdict.INFRASTRUCTURE


def test_memory_decides_over_the_signal_it_was_answered_with() -> None:
    assert verdict("java.lang.OutOfMemoryError: Java heap space", exit_code=143) is Verdict.RESOURCE


def test_exit_codes_speak_when_nothing_else_does() -> None:
    expected = {
        1: Verdict.UNKNOWN,
        2: Verdict.PERMANENT,
        52: Verdict.RESOURCE,
        56: Verdict.INFRASTRUCTURE,
        75: Verdict.TRANSIENT,
        101: Verdict.PERMANENT,
        127: Verdict.PERMANENT,
        134: Verdict.INFRASTRUCTURE,
        -100: Verdict.INFRASTRUCTURE,
        -102: Verdict.INFRASTRUCTURE,
        -104: Verdict.RESOURCE,
    }

    assert {code: verdict(exit_code=code) for code in expected} == expected


def test_the_exit_code_is_read_from_the_exception_of_the_hook() -> None:
    evidence = Evidence(exception="Cannot execute: spark-submit job.py. Error code is: 137.")

    assert classify(evidence).verdict is Verdict.INFRASTRUCTURE


def test_the_code_of_a_driver_elsewhere_says_more_than_that_of_the_submission() -> None:
    left = "org.apache.spark.SparkUserAppException: User application exited with"

    for code, expected in {137: Verdict.INFRASTRUCTURE, 75: Verdict.TRANSIENT, 1: Verdict.UNKNOWN}.items():
        evidence = Evidence(exit_code=0, driver_state="FAILED", driver_output=[f"Caused by: {left} {code}"])
        assert classify(evidence).verdict is expected


def test_states_and_reasons_of_clusters_are_heard() -> None:
    assert classify(Evidence(driver_state="ERROR")).verdict is Verdict.INFRASTRUCTURE
    assert classify(Evidence(driver_state="FAILED")).verdict is Verdict.UNKNOWN
    assert classify(Evidence(driver_state="KILLED")).verdict is Verdict.INFRASTRUCTURE
    assert classify(Evidence(pod_reason="OOMKilled", exit_code=137)).verdict is Verdict.RESOURCE
    assert classify(Evidence(pod_reason="Evicted")).verdict is Verdict.INFRASTRUCTURE
    assert classify(Evidence(pod_reason="ImagePullBackOff")).verdict is Verdict.PERMANENT
    assert classify(Evidence(diagnostics="User class threw exception: java.lang.NullPointerException")).verdict is (
        Verdict.PERMANENT
    )


def test_the_log_of_a_driver_elsewhere_decides_over_the_submission() -> None:
    evidence = Evidence(
        exit_code=1,
        output=["26/01/01 00:00:00 ERROR ClientEndpoint: State of driver-1 is FAILED"],
        driver_output=["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'shop'"],
        driver_state="FAILED",
    )

    assert classify(evidence).verdict is Verdict.PERMANENT


def test_structured_records_are_read_like_text() -> None:
    entry = {
        "ts": "2026-01-01T00:00:00Z",
        "level": "ERROR",
        "msg": "Exception in task 0.0 in stage 0.0 (TID 0)",
        "exception": {
            "class": "org.apache.spark.api.python.PythonException",
            "msg": 'Traceback (most recent call last):\n  File "job.py"\nConnectionResetError: [Errno 104] reset',
            "stacktrace": [{"class": "org.apache.spark.Task", "method": "run"}],
        },
        "logger": "Executor",
    }

    assert verdict(json.dumps(entry)) is Verdict.TRANSIENT


def test_an_error_condition_of_the_json_line_is_enough() -> None:
    entry = {"level": "ERROR", "msg": "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column. SQLSTATE: 42703", "logger": "x"}

    assert verdict(json.dumps(entry)) is Verdict.PERMANENT


def test_secrets_do_not_reach_the_classification() -> None:
    classification = classify(
        Evidence(
            output=[
                "java.sql.SQLException: Connection refused: jdbc:postgresql://etl:hunter2@db/shop?password=hunter2 "
                "fs.azure.account.key.shop=hunter2 Authorization: Bearer hunter2hunter2 token: 'hunter2'"
            ]
        )
    )

    assert classification.verdict is Verdict.TRANSIENT
    assert "hunter2" not in classification.reason
    assert "***" in classification.line


def test_lines_that_lost_their_indentation_are_read_all_the_same() -> None:
    stripped = [
        "Traceback (most recent call last):",
        'File "/jobs/load.py", line 9, in <module>',
        "main()",
        "^^^^^^",
        'File "/opt/spark/python/lib/pyspark.zip/pyspark/sql/session.py", line 1915, in sql',
        'File "/jobs/load.py", line 3, in main',
        'raise TooFewOrders("Connection refused")',
        "KeyError: 'eu'",
    ]

    assert verdict(*stripped) is Verdict.PERMANENT


def test_prefixes_of_airflow_and_containers_are_ignored() -> None:
    airflow = "[2026-01-01 00:00:00,000] {spark_submit.py:536} INFO - "
    runtime = "2026-01-01T00:00:00.123456789Z stderr F "

    for prefix in (airflow, runtime, "2026-01-01 00:00:00 "):
        lines = ["Traceback (most recent call last):", '  File "job.py", line 1', "KeyError: 'eu'"]
        assert verdict(*(prefix + line for line in lines)) is Verdict.PERMANENT
        assert verdict(f"{prefix}26/01/01 00:00:00 ERROR Client: x", f"{prefix}{REFUSED}") is Verdict.TRANSIENT


def test_a_word_of_the_launcher_does_not_belong_to_the_warning_before_it() -> None:
    warning = "26/01/01 00:00:00 WARN NativeCodeLoader: Unable to load native-hadoop library"

    assert verdict(warning, "Error: Failed to load class com.example.Orders.") is Verdict.PERMANENT


def test_the_last_remarks_count_where_nothing_looks_like_a_failure() -> None:
    stopped = "26/01/01 00:00:00 INFO SparkContext: Successfully stopped SparkContext"

    assert verdict("orders API answered: Connection refused", stopped) is Verdict.TRANSIENT
    assert verdict("orders API answered: Connection refused", *["row"] * 5, stopped) is Verdict.UNKNOWN


def test_errors_that_are_logged_after_the_end_do_not_decide() -> None:
    ended = (
        "26/01/01 00:00:00 ERROR ApplicationMaster: User class threw exception: java.util.NoSuchElementException: eu"
    )

    for later in (
        "26/01/01 00:00:01 ERROR TransportClient: Failed to send RPC 7: java.nio.channels.ClosedChannelException",
        "26/01/01 00:00:01 ERROR ShutdownHookManager: Exception while deleting Spark temp dir: /tmp/spark-1",
        "26/01/01 00:00:01 ERROR Executor: Exception in task 1.0 in stage 0.0 (TID 1): Connection reset",
    ):
        assert verdict(ended, later, "java.io.IOException: Failed to connect to worker-1:7337") is Verdict.PERMANENT


def test_records_of_other_layouts_are_recognised() -> None:
    for prefix in (
        "00:00:01.123 [main] ERROR shop.Load - ",
        "2026-01-01T00:00:01,123 ERROR [main] shop.Load - ",
        "ERROR:root:",
    ):
        assert verdict(f"{prefix}cannot load", REFUSED, "  continued") is Verdict.TRANSIENT


def test_a_job_of_this_package_says_itself_whether_it_may_be_run_again() -> None:
    """Whatever stands above its last line."""
    above = "java.net.ConnectException: Connection refused"
    refused = classify(Evidence(exit_code=3, output=[above, "bulk_schedule: error: --on-rejects: 1 of 2 rows ..."]))
    assert (refused.verdict, refused.rule) == (Verdict.PERMANENT, "delay-job")
    failed = classify(Evidence(exit_code=1, output=[above, "bulk_schedule: failed: the broker does not answer"]))
    assert failed.verdict is Verdict.TRANSIENT
