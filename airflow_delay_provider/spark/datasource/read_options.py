"""The options of ``spark.read.format("delay")``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from airflow_delay_provider.domain.exceptions import ConfigurationError
from airflow_delay_provider.spark.datasource.options import require_known

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)

#: As users write them; Spark ignores upper and lower case.
_KNOWN = (
    "connection",
    "connectionFile",
    "hold",
    "table",
    "columns",
    "partitions",
    "after",
    "until",
    "onGap",
    "copied",
    "retentionDays",
)
_OF_JOURNAL = ("after", "until", "onGap", "copied", "retentionDays")
MAX_PARTITIONS = 10_000
#: As long as dispatchers keep finished messages by default.
RETENTION_DAYS = 30.0


class Table(StrEnum):
    """What can be read."""

    MESSAGES = "messages"
    JOURNAL = "journal"


class OnGap(StrEnum):
    """What to do if entries behind ``after`` are deleted already."""

    FAIL = "fail"
    CONTINUE = "continue"


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options of one read, checked."""

    connection: str | None = None
    connection_file: str | None = None
    hold: str | None = None
    table: Table = Table.MESSAGES
    #: In the order in which they were given; empty means all.
    columns: tuple[str, ...] = ()
    #: None lets the reader decide.
    partitions: int | None = None
    after: str | None = None
    until: str | None = None
    on_gap: OnGap = OnGap.FAIL
    #: Read the copy of the journal that a dispatcher makes in the ledger.
    copied: bool = False
    retention_days: float = RETENTION_DAYS

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """Return checked options; refuse unknown ones, and those that do not fit the table."""
        given = require_known(options, _KNOWN, of="spark.read")
        table = _choice("table", Table, given.get("table", Table.MESSAGES))
        for name in _OF_JOURNAL:
            if table is not Table.JOURNAL and name in given:
                raise ConfigurationError(f"{name}: is an option of the journal; add option table=journal, or leave it")
        return cls(
            connection=given.get("connection"),
            connection_file=given.get("connectionFile"),
            hold=given.get("hold"),
            table=table,
            columns=tuple(each.strip() for each in given.get("columns", "").split(",") if each.strip()),
            partitions=_partitions(given.get("partitions")),
            after=given.get("after"),
            until=given.get("until"),
            on_gap=_choice("onGap", OnGap, given.get("onGap", OnGap.FAIL)),
            copied=_flag("copied", given.get("copied", "false")),
            retention_days=_days(given.get("retentionDays")),
        )

    def select(self, known: Mapping[str, str]) -> dict[str, str]:
        """Return the columns to read with their types, in the order of ``columns``."""
        for name in self.columns:
            if name not in known:
                raise ConfigurationError(
                    f"columns: {name!r} is no column of table {self.table.value}; use some of {', '.join(known)}"
                )
        return {name: known[name] for name in self.columns or known}


def _choice(name: str, choices: type[ChoiceT], text: str) -> ChoiceT:
    try:
        return choices(text.lower())
    except ValueError:
        raise ConfigurationError(f"{name}: {text!r} is unknown; use one of {', '.join(choices)}") from None


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigurationError(f"{name}: {text!r} is neither true nor false; use one of them")
    return text.lower() == "true"


def _partitions(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PARTITIONS:
        raise ConfigurationError(f"partitions: {text!r} is not a number of partitions; use 1 to {MAX_PARTITIONS}")
    return int(text)


def _days(text: str | None) -> float:
    try:
        days = float(text) if text else RETENTION_DAYS
    except ValueError:
        days = 0.0
    if not 0 < days <= 36_500:
        raise ConfigurationError(
            f"retentionDays: {text!r} is not a number of days; use the dispatcher's retention_days"
        )
    return days
