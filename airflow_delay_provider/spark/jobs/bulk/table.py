"""Read the input of the bulk schedule job as a DataFrame."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import NoReturn

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import coalesce, col, unbase64
from pyspark.sql.types import StringType, StructField, StructType

from airflow_delay_provider.spark.jobs.command import UsageError, condition_of

CORRUPT = "_corrupt_record"
#: What a line of a rejects folder has.
REJECT_COLUMNS = frozenset({"field", "reason", "row"})
_BASE64 = "_base64"
_FORMATS = {
    "parquet": "parquet",
    "json": "json",
    "jsonl": "json",
    "ndjson": "json",
    "csv": "csv",
    "orc": "orc",
}
_COMPRESSION = re.compile(r"\.(gz|bz2|zst|zstd|lz4|snappy|deflate)$")
#: Doubled quotes inside of quotes, as spreadsheets and Python write them; Spark expects a backslash.
_CSV_OPTIONS = {"header": "true", "escape": '"'}


def read_table(spark: SparkSession, arguments: Namespace) -> DataFrame:
    """Return the rows; a problem with the input is a usage error that names the option."""
    try:
        if arguments.table:
            return spark.read.options(**arguments.read_options).table(arguments.table)
        arguments.format = arguments.format or guess_format(arguments.input)
        return _read_files(spark, arguments.input, arguments.format.lower(), arguments.read_options)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - of PySpark, or of the library under it
        _explain(error, arguments)


def guess_format(paths: Sequence[str]) -> str:
    """Return the format that the extensions name."""
    found = {_FORMATS.get(_COMPRESSION.sub("", path.rstrip("/*").lower()).rpartition(".")[2]) for path in paths}
    if len(found) != 1 or None in found:
        raise UsageError("--format", f"{', '.join(paths)} does not tell it", "give parquet, json, csv or orc")
    return str(found.pop())


def _read_files(spark: SparkSession, paths: Sequence[str], file_format: str, options: Mapping[str, str]) -> DataFrame:
    match file_format:
        case "json":
            return _read_json(spark, paths, options)
        case "csv":
            return _read_csv(spark, paths, {**_CSV_OPTIONS, **options})
    return spark.read.format(file_format).options(**options).load(list(paths))


def _read_json(spark: SparkSession, paths: Sequence[str], options: Mapping[str, str]) -> DataFrame:
    """Read all values as text, as they are written; a reading of its own finds the names.

    With the types of a schema, Spark would turn a value of another type into null, and nobody would know.
    """
    found = spark.read.options(**{"primitivesAsString": "true", **options}).json(list(paths)).schema
    _refuse_corrupt(spark.read.schema(found).options(**options).json(list(paths)), "one JSON object per line")
    if set(found.names) == REJECT_COLUMNS and isinstance(found["row"].dataType, StructType):
        return _read_rejects(spark, paths, found["row"].dataType, options)
    return spark.read.schema(_as_text(found)).options(**options).json(list(paths))


def _read_rejects(spark: SparkSession, paths: Sequence[str], row: StructType, options: Mapping[str, str]) -> DataFrame:
    """Return the rows of a rejects folder without field and reason; bytes were written in base64."""
    rows = spark.read.schema(StructType([StructField("row", _as_text(row))])).options(**options).json(list(paths))
    columns = {}
    for name in row.names:
        cell = col(f"row.`{name}`")
        plain = name.removesuffix(_BASE64)
        if plain != name:
            text = [col(f"row.`{plain}`").cast("binary")] if plain in row.names else []
            columns[plain] = coalesce(unbase64(cell), *text)
        else:
            columns.setdefault(name, cell)
    return rows.select(*(cell.alias(name) for name, cell in columns.items()))


def _as_text(schema: StructType) -> StructType:
    return StructType([StructField(name, StringType()) for name in schema.names])


def _read_csv(spark: SparkSession, paths: Sequence[str], options: Mapping[str, str]) -> DataFrame:
    """Read all cells as text; a row with too many or too few cells is an error."""
    found = spark.read.options(**options).csv(list(paths)).schema
    checked = StructType([*found.fields, StructField(CORRUPT, StringType())])
    _refuse_corrupt(
        spark.read.schema(checked).options(**options).csv(list(paths)),
        "one row per line with a cell for each column; if cells contain line breaks, add --read-option multiLine=true",
    )
    return spark.read.schema(found).options(**options).csv(list(paths))


def _refuse_corrupt(rows: DataFrame, remedy: str) -> None:
    if CORRUPT not in rows.columns:
        return
    # All columns are selected, as Spark parses no more than it is asked for.
    bad = rows.filter(col(CORRUPT).isNotNull()).select(*rows.columns).head(1)
    if bad:
        raise UsageError("--input", f"a line cannot be parsed: {bad[0][CORRUPT][:200]!r}", f"write {remedy}")


def _explain(error: Exception, arguments: Namespace) -> NoReturn:
    where = ", ".join(arguments.input or [arguments.table])
    condition = condition_of(error).partition(".")[0]
    option = "--table" if arguments.table else "--input"
    match condition:
        case "PATH_NOT_FOUND" | "TABLE_OR_VIEW_NOT_FOUND" | "SCHEMA_NOT_FOUND":
            raise UsageError(
                option, f"{where} does not exist", "correct the name, or wait until it is written"
            ) from None
        case "UNABLE_TO_INFER_SCHEMA":
            raise UsageError(option, f"{where} has no rows in this format", "correct the path or --format") from None
        case "DATA_SOURCE_NOT_FOUND":
            raise UsageError(
                "--format", f"Spark does not know {arguments.format!r}", "use parquet, json, csv or orc, or add its jar"
            ) from None
        case "FAILED_READ_FILE" | "CANNOT_READ_FILE_FOOTER" | "CANNOT_MERGE_SCHEMAS":
            raise UsageError(option, f"{where} cannot be read as {arguments.format}", "correct --format") from None
    raise error
