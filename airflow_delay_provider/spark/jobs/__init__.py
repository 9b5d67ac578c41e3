"""Jobs that spark-submit runs: bulk scheduling, the streaming dispatcher, the lateness report.

Each is a program with ``--help``; a DAG names it by its path and does not import it::

    SparkSubmitRetryOperator(task_id="schedule", application=BULK_SCHEDULE, application_args=[...])
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FOLDER = Path(__file__).parent

#: Files, tables -> scheduled messages, rejects, a report.
BULK_SCHEDULE: Final = str(_FOLDER / "bulk_schedule.py")
#: The journal -> lateness in numbers and pictures.
LATENESS: Final = str(_FOLDER / "lateness.py")
#: The inbox of a Kafka connection -> due messages in their topics.
DISPATCH: Final = str(_FOLDER / "dispatch.py")
