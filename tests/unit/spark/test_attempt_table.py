from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow_delay_provider.spark.failures import Classification, Verdict
from airflow_delay_provider.spark.retries import History, attempt_table

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def test_the_table_shows_every_attempt_with_its_reason():
    refused = Classification(verdict=Verdict.TRANSIENT, rule="connection-refused", line="", reason="a source refused")
    history = History(began_at=NOW).begin_attempt(NOW).fail_attempt(refused, NOW + MINUTE, exit_code=1)
    history = history.begin_attempt(NOW + 2 * MINUTE)

    assert list(attempt_table(history)) == [
        "attempt  started (UTC)        took  exit  verdict    rule                reason",
        "1        2030-01-01 12:00:00  60 s  1     transient  connection-refused  a source refused",
        "2        2030-01-01 12:02:00",
    ]


def test_a_task_that_submitted_nothing_has_an_empty_table():
    (head,) = attempt_table(History(began_at=NOW))
    assert head.startswith("attempt  started (UTC)")
