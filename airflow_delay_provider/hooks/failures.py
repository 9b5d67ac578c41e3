"""Which errors fail a task at once, because trying again cannot help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow.sdk.exceptions import AirflowFailException

from airflow_delay_provider.exceptions import DelayError, InvalidMessageError, LifecycleError
from airflow_delay_provider.metrics import AirflowMetrics


@contextmanager
def failing_at_once() -> Iterator[None]:
    """Fail the task without further tries for what the DAG asks wrongly; let everything else be tried again.

    A broker or database may come back. So may a missing connection: Airflow also reports it while its own API is away.
    """
    try:
        yield
    except (InvalidMessageError, LifecycleError) as error:
        AirflowMetrics().failed(type(error).__name__)
        # The sentence says it all; the way through our validation would bury it in the task's log.
        raise AirflowFailException(str(error)) from None
    except DelayError as error:
        AirflowMetrics().failed(type(error).__name__)
        raise
