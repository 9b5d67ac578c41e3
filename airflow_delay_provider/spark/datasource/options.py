"""Options of the data source ``delay``: text, shown in the query plan, and so never a secret."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from airflow_delay_provider.domain.arguments import OnConflict, OnPast, parse_choice, parse_count
from airflow_delay_provider.domain.exceptions import ConfigurationError, InvalidMessageError
from airflow_delay_provider.domain.message import require_channel

#: Each batch ends with a wait for its last confirmation, in which the task does nothing else.
DEFAULT_BATCH_SIZE = 5000


class OnRejects(StrEnum):
    """What to do if rows were rejected; all other rows are scheduled either way."""

    #: The write fails at its end, and says how many rows were rejected and why.
    FAIL = "fail"
    #: The write succeeds.
    KEEP = "keep"


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Options of ``df.write.format("delay")``, checked."""

    #: The id of the Airflow connection.
    connection: str | None = None
    #: A JSON file of Airflow connections to read instead of asking Airflow.
    connection_file: str | None = None
    #: ``broker`` or ``ledger``: what stores messages until they are due; None is what the connection says.
    hold: str | None = None
    #: Of rows without a channel of their own.
    channel: str | None = None
    #: With ``fail``, a task that Spark runs again rejects what its failed attempt has scheduled.
    on_conflict: OnConflict = OnConflict.KEEP
    on_past: OnPast = OnPast.DELIVER
    on_rejects: OnRejects = OnRejects.FAIL
    #: The folder to which rejected rows are written.
    rejects: str | None = None
    #: Part of every derived id.
    id_prefix: str = ""
    #: How many rows are scheduled at once.
    batch_size: int = DEFAULT_BATCH_SIZE
    #: The file to which the driver writes the counts.
    report: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """Check the options of a writer; their names are case-insensitive, as Spark's are."""
        given = require_known(options, _WRITE_OPTIONS, of="df.write")
        try:
            parsed = cls(
                connection=given.get("connection"),
                connection_file=given.get("connectionFile"),
                hold=given.get("hold"),
                channel=require_channel(given["channel"]) if "channel" in given else None,
                on_conflict=parse_choice("onConflict", OnConflict, given.get("onConflict", OnConflict.KEEP)),
                on_past=parse_choice("onPast", OnPast, given.get("onPast", OnPast.DELIVER)),
                on_rejects=parse_choice("onRejects", OnRejects, given.get("onRejects", OnRejects.FAIL)),
                rejects=given.get("rejects"),
                id_prefix=given.get("idPrefix", ""),
                batch_size=parse_count("batchSize", given.get("batchSize", str(DEFAULT_BATCH_SIZE))),
                report=given.get("report"),
            )
        except InvalidMessageError as error:
            raise ConfigurationError(str(error)) from None
        if parsed.on_rejects is OnRejects.KEEP and parsed.rejects is None:
            raise ConfigurationError(
                "rejects: onRejects=keep needs a folder for the rejected rows, or they would be lost; name one with"
                ' .option("rejects", "FOLDER")'
            )
        return parsed


_WRITE_OPTIONS = (
    "connection",
    "connectionFile",
    "hold",
    "channel",
    "onConflict",
    "onPast",
    "onRejects",
    "rejects",
    "idPrefix",
    "batchSize",
    "report",
)


def require_known(options: Mapping[str, str], names: Iterable[str], *, of: str) -> dict[str, str]:
    """Return the given options under their own names; refuse one that is unknown or empty."""
    known = {name.lower(): name for name in names}
    given: dict[str, str] = {}
    for name, value in options.items():
        if name.lower() not in known:
            raise ConfigurationError(f"{name}: {of} has no such option; use one of {', '.join(known.values())}")
        if not value.strip() and name.lower() != "idprefix":
            raise ConfigurationError(f"{known[name.lower()]}: is empty; give it a value, or leave the option out")
        given[known[name.lower()]] = value
    return given
