"""Arguments of the bulk schedule job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from airflow_delay_provider.domain.arguments import OnConflict, OnPast
from airflow_delay_provider.spark.jobs.command import UsageError

NAME = "bulk_schedule"
DATA_SOURCE, KAFKA_SINK = "data-source", "kafka-sink"

_EPILOG = """\
columns: id, channel, payload, deliver_at (a timestamp, or ISO-8601 text with a zone) or deliver_after (seconds), key,
headers, content_type, priority. If there is no column id, the ids depend on --id-prefix and on all columns of a row, so
that the same rows scheduled again are the same messages.

exit codes: 0 all rows are scheduled, or rejects were kept as asked; 1 the job failed, run it again; 2 an argument, the
input or the connection has to be corrected; 3 all good rows are scheduled, the others were rejected.

The folder of --rejects can be an --input again (--format json) after you have corrected its rows.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its help is the reference."""
    parser = argparse.ArgumentParser(
        prog=NAME,
        description="Schedule each row of files or of a table as a message.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_input(parser.add_argument_group("input"))
    _add_columns(parser.add_argument_group("columns"))
    _add_target(parser.add_argument_group("messages"))
    _add_results(parser.add_argument_group("results"))
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the arguments; end with code 2 if they are wrong."""
    given = build_parser().parse_args(argv)
    if bool(given.input) == bool(given.table):
        raise UsageError("--input", "give either --input or --table", "name files that Spark can read, or a table")
    if given.on_rejects == "keep" and not given.rejects and not given.dry_run:
        raise UsageError("--rejects", "is missing, so --on-rejects keep would lose rows", "name a folder for them")
    if given.deliver_at is not None and given.deliver_after is not None:
        raise UsageError("--deliver-at", "--deliver-after is given, too", "give only one of them")
    if given.via == KAFKA_SINK:
        _check_kafka_sink(given)
    given.columns = _pairs("--column", given.column, example="deliver_at=due_time")
    given.expressions = _pairs("--expression", given.expression, example="payload=to_json(struct(*))")
    given.read_options = _pairs("--read-option", given.read_option, example="sep=;")
    for name in sorted(given.columns.keys() & given.expressions.keys()):
        raise UsageError("--expression", f"--column gives {name}, too", "give only one of them")
    return given


def _check_kafka_sink(given: argparse.Namespace) -> None:
    for option, is_wrong in (
        ("--on-conflict", given.on_conflict != OnConflict.KEEP),
        ("--hold", given.hold == "ledger"),
        ("--batch-size", given.batch_size is not None),
    ):
        if is_wrong:
            raise UsageError(
                option, f"--via {KAFKA_SINK} does not know it", f"leave it out, or use --via {DATA_SOURCE}"
            )


def _add_input(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input", nargs="+", metavar="PATH", help="files or folders, any URI that Spark can read")
    group.add_argument("--table", help="a table or view of Spark's catalog")
    group.add_argument(
        "--format",
        help="parquet, json (one object per line), csv (with a header), orc, or another format of Spark;"
        " default: the extension of --input",
    )
    group.add_argument(
        "--read-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of Spark's reader, such as sep=; for CSV; repeat it for more",
    )
    group.add_argument("--partitions", type=int, help="distribute the rows over so many tasks; default: as Spark reads")


def _add_columns(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="NAME=SOURCE",
        help="take this column of a message from another column, such as deliver_at=due_time; repeat it for more",
    )
    group.add_argument(
        "--expression",
        action="append",
        default=[],
        metavar="NAME=SQL",
        help="compute this column, such as payload=to_json(struct(*)); other columns are then ignored",
    )
    group.add_argument(
        "--ignore-other-columns", action="store_true", help="do not refuse columns that are no part of a message"
    )
    group.add_argument("--channel", help="of rows without a channel")
    group.add_argument("--deliver-at", metavar="TIME", help="of rows without a time, such as 2030-01-31T17:00:00Z")
    group.add_argument("--deliver-after", type=float, metavar="SECONDS", help="of rows without a time")
    group.add_argument("--content-type", metavar="TYPE", help="of rows without a content type")
    group.add_argument("--priority", type=int, help="of rows without a priority")


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--connection", metavar="ID", help="the Airflow connection of the broker; default: delay_default"
    )
    group.add_argument(
        "--connection-file",
        metavar="FILE",
        help="take the connection from a file that `airflow connections export --file-format json FILE` has written",
    )
    group.add_argument("--hold", choices=["broker", "ledger"], help="what stores the messages; default: the connection")
    group.add_argument(
        "--via",
        choices=[DATA_SOURCE, KAFKA_SINK],
        default=DATA_SOURCE,
        help="data-source: any broker (default); kafka-sink: only Kafka, faster, needs Spark's Kafka connector",
    )
    group.add_argument(
        "--on-conflict",
        choices=list(OnConflict),
        default=OnConflict.KEEP,
        help="if an id is taken: keep the scheduled message (default), fail, or replace it",
    )
    group.add_argument(
        "--on-past",
        choices=list(OnPast),
        default=OnPast.DELIVER,
        help="if a time has passed: deliver at once (default), or reject the row (fail)",
    )
    group.add_argument("--id-prefix", default="", help="part of each derived id, such as a date or a run id")
    group.add_argument("--batch-size", type=int, help="rows that are scheduled at once; default: 5000")


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rejects", metavar="FOLDER", help="where to write rejected rows with the reason (JSON lines)")
    group.add_argument(
        "--on-rejects",
        choices=["fail", "keep"],
        default="fail",
        help="if rows are rejected: end with exit code 3 (default), or with 0; all other rows are scheduled either way",
    )
    group.add_argument("--report", metavar="FILE", help="where to write the counts and the duration (JSON)")
    group.add_argument("--dry-run", action="store_true", help="check and count all rows; schedule and write nothing")
    group.add_argument("--verbose", action="store_true", help="print Spark's own errors, too")


def _pairs(option: str, given: Sequence[str], *, example: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise UsageError(option, f"{text!r} is not NAME=VALUE", f"write for example {option} {example}")
        if name.strip() in pairs:
            raise UsageError(option, f"{name.strip()} is given twice", "give it once")
        pairs[name.strip()] = value if option == "--read-option" else value.strip()
    return pairs
