"""Rows as records of the inbox, in expressions of Spark SQL alone: no row passes through Python.

The rules are those of :mod:`airflow_delay_provider.domain.arguments` and of the Kafka broker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

from airflow_delay_provider.brokers.kafka import header_protocol as protocol
from airflow_delay_provider.brokers.kafka.admin import ChannelSettings
from airflow_delay_provider.brokers.kafka.publish import OVERHEAD_BYTES
from airflow_delay_provider.brokers.kafka.topology import MAX_VALUE_BYTES, VERSION, Topology
from airflow_delay_provider.domain.arguments import MAX_PRIORITY, Limits, OnPast
from airflow_delay_provider.domain.message import MAX_CONTENT_TYPE_LENGTH, MAX_ID_LENGTH
from airflow_delay_provider.spark.inbox import times

REASON = "_reason"
#: Of payloads of type string.
TEXT = "text/plain; charset=utf-8"
_ENTRIES = t.ArrayType(t.StructType([t.StructField("key", t.StringType()), t.StructField("value", t.StringType())]))


@dataclass(frozen=True, kw_only=True)
class InboxRules:
    """What makes a row a record, and what rejects it."""

    topology: Topology
    limits: Limits
    #: Of rows without a channel of their own.
    channel: str | None
    #: The channels that were looked at.
    known: Mapping[str, ChannelSettings]
    #: Whether rows may name no others.
    only_known: bool
    on_past: OnPast
    id_prefix: str
    #: The begin of the write, by the driver's clock.
    now_ms: int


def check_rows(df: DataFrame, rules: InboxRules) -> DataFrame:
    """Return the rows with the reason to reject each; null if it is good."""
    reasons = [f.when(is_wrong, text) for is_wrong, text in _Columns(df, rules).faults()]
    return df.withColumn(REASON, f.coalesce(*reasons, f.lit(None).cast("string")))


def records(checked: DataFrame, rules: InboxRules) -> DataFrame:
    """Return the good rows with the columns of Spark's Kafka sink."""
    return checked.where(f.col(REASON).isNull()).select(*_Columns(checked, rules).record())


def rejects(checked: DataFrame) -> DataFrame:
    """Return the other rows as they are written down."""
    reason = f.col(REASON)
    row = f.struct(*(_shown(checked, name) for name in checked.columns if name != REASON))
    return checked.where(reason.isNotNull()).select(
        f.substring_index(reason, ":", 1).alias("field"), reason.alias("reason"), row.alias("row")
    )


def _shown(df: DataFrame, name: str) -> Column:
    """Return a column as JSON can hold it; bytes are in base64, under a name that says so."""
    column, kind = f.col(name), df.schema[name].dataType
    if isinstance(kind, t.BinaryType):
        return f.base64(column).alias(f"{name}_base64")
    if isinstance(kind, t.DayTimeIntervalType):
        return times.seconds_of(column).cast("double").alias(name)
    return column


class _Columns:
    """The expressions of one DataFrame."""

    def __init__(self, df: DataFrame, rules: InboxRules) -> None:
        self._rules = rules
        self._types = {each.name: each.dataType for each in df.schema if each.name != REASON}
        self._channel = f.lit(rules.channel)
        if "channel" in self._types:
            self._channel = f.coalesce(f.col("channel"), self._channel)
        self._payload = f.col("payload").cast("binary")
        self._key = self._column("key", "string")
        default_type = protocol.DEFAULT_CONTENT_TYPE if self._is_binary() else TEXT
        self._content_type = f.coalesce(
            f.nullif(self._column("content_type", "string"), f.lit("")), f.lit(default_type)
        )
        # The dispatcher has the same default.
        self._has_content_type = "content_type" in self._types or not self._is_binary()
        self._entries = f.map_entries("headers") if "headers" in self._types else f.lit(None).cast(_ENTRIES)
        self._due_ms = times.due_ms(df)
        self._after_ms = times.after_ms(df)
        self._id = f.col("id") if "id" in self._types else self._derived_id()

    def _is_binary(self) -> bool:
        return isinstance(self._types["payload"], t.BinaryType)

    def _column(self, name: str, kind: str) -> Column:
        return f.col(name) if name in self._types else f.lit(None).cast(kind)

    # -- the record ----------------------------------------------------------------------------------------------

    def record(self) -> list[Column]:
        """The columns of Spark's Kafka sink."""
        topology = self._rules.topology
        partition = f.crc32(f.coalesce(self._key, self._id)) % topology.partitions
        return [
            f.lit(topology.inbox).alias("topic"),
            partition.cast("int").alias("partition"),
            self._key.cast("binary").alias("key"),
            self._payload.alias("value"),
            self._headers().alias("headers"),
        ]

    def _headers(self) -> Column:
        time_name = f.when(self._due_ms.isNotNull(), protocol.DELIVER_AT).otherwise(protocol.DELIVER_AFTER_MS)
        given = [
            _header(f.lit(protocol.ID), self._id),
            _header(f.lit(protocol.CHANNEL), self._channel),
            _header(time_name, f.coalesce(self._due_ms, self._after_ms).cast("string")),
        ]
        if self._has_content_type:
            given.append(_header(f.lit(protocol.CONTENT_TYPE), self._content_type))
        if "priority" in self._types:
            priority = f.coalesce(f.col("priority").cast("string"), f.lit("0"))
            given.append(_header(f.lit(protocol.PRIORITY), priority))
        own = f.array(*given)
        if "headers" not in self._types:
            return own
        users = f.transform(self._entries, lambda entry: _header(entry["key"], entry["value"]))
        return f.when(self._entries.isNull(), own).otherwise(f.concat(own, users))

    def _derived_id(self) -> Column:
        """A UUID (of version 8: of one's own making) of all that the row says, the same whenever it is computed."""
        said = {name: f.col(name) for name in self._types} | {"channel": self._channel}
        if isinstance(self._types.get("deliver_at"), t.TimestampType):
            said["deliver_at"] = f.unix_micros("deliver_at")
        if "deliver_after" in self._types:
            said["deliver_after"] = said["deliver_after"].cast("string")
        if "headers" in self._types:
            said["headers"] = f.array_sort(self._entries)
        parts = [f.lit(self._rules.id_prefix).alias("prefix")]
        digest = f.sha2(f.to_json(f.struct(*parts, *(said[name].alias(name) for name in sorted(said)))), 256)
        digits = [f.substring(digest, start, length) for start, length in ((1, 8), (9, 4), (14, 3), (18, 3), (21, 12))]
        version, variant = f.concat(f.lit("8"), digits[2]), f.concat(f.lit("8"), digits[3])
        return f.concat_ws("-", digits[0], digits[1], version, variant, digits[4])

    # -- what is wrong with a row --------------------------------------------------------------------------------

    def faults(self) -> Iterator[tuple[Column, Column]]:
        """Yield each condition that rejects a row, with the reason: ``column: what is wrong; what to do``."""
        yield from self._faults_of_channel()
        if "id" in self._types:
            no_id = "id: is null; give each row an id, or leave the column out to have ids derived from the rows"
            yield self._id.isNull(), f.lit(no_id)
            # Characters of these categories are not printable, and neither are spaces other than the plain one.
            is_ascii = self._id.rlike(rf"\A[ -~]{{1,{MAX_ID_LENGTH}}}\z")
            yield (
                ~(is_ascii | self._id.rlike(rf"\A[ [^\p{{C}}\p{{Z}}]]{{1,{MAX_ID_LENGTH}}}\z")),
                f.lit(f"id: is not a valid id; use 1-{MAX_ID_LENGTH} printable characters"),
            )
        yield from self._faults_of_payload()
        if "key" in self._types:
            yield ~_is_text(self._key), f.lit("key: is not text; use UTF-8 without NUL, or null")
        compacted = [channel for channel, settings in self._rules.known.items() if settings.is_compacted]
        if compacted:
            yield (
                self._key.isNull() & self._channel.isin(*compacted),
                _said("key: topic '", self._channel, "' is compacted and accepts no message without one; give a key"),
            )
        if "headers" in self._types:
            yield from self._faults_of_headers()
        if "key" in self._types or "headers" in self._types:
            yield (
                self._headers_bytes() > protocol.MAX_HEADERS_BYTES,
                f.lit(
                    f"headers: headers and key have more than {protocol.MAX_HEADERS_BYTES} bytes; put the data into"
                    " the payload"
                ),
            )
        if "content_type" in self._types:
            yield (
                ~(_is_text(self._content_type) & (f.length(self._content_type) <= MAX_CONTENT_TYPE_LENGTH)),
                f.lit("content_type: is not a content type; use one such as application/json"),
            )
        if "priority" in self._types:
            yield (
                ~f.col("priority").between(0, MAX_PRIORITY),
                _said("priority: ", f.col("priority"), f" is out of range; use 0 to {MAX_PRIORITY}"),
            )
        rules = self._rules
        yield from times.faults(
            self._types, self._due_ms, self._after_ms, limits=rules.limits, on_past=rules.on_past, now_ms=rules.now_ms
        )

    def _faults_of_channel(self) -> Iterator[tuple[Column, Column]]:
        if "channel" not in self._types:
            # The default was checked on the driver.
            return
        channel = self._channel
        yield channel.isNull(), f.lit("channel: is null and there is no default; fill it, or give a default channel")
        yield (
            ~channel.rlike(rf"\A{protocol.CHANNEL_FORM.pattern}\z"),
            _said(
                "channel: '",
                f.left(channel, f.lit(250)),
                "' cannot be a Kafka topic; use 1-249 letters, digits and . _ - starting with a letter, digit or _",
            ),
        )
        is_taken = channel.startswith("__") | (channel == VERSION) | channel.startswith(f"{VERSION}.")
        yield is_taken, _said("channel: '", channel, "' belongs to Kafka or to a ladder; use another topic")
        if self._rules.only_known:
            yield (
                ~channel.isin(*self._rules.known),
                _said("channel: '", channel, "' is none of the channels given; correct it, or add it to them"),
            )

    def _faults_of_payload(self) -> Iterator[tuple[Column, Column]]:
        size, most = f.octet_length(self._payload), self._rules.limits.max_payload_bytes
        yield self._payload.isNull(), f.lit("payload: is null; use an empty one if nothing is to be said")
        yield (
            size > most,
            _said(
                "payload: ",
                size,
                f" bytes are more than max_payload_bytes ({most}); send a reference to the data,"
                " or raise max_payload_bytes in the connection",
            ),
        )
        accepted = self._accepted_bytes()
        yield (
            size + self._headers_bytes() + OVERHEAD_BYTES > accepted,
            _said(
                "payload: ",
                size,
                " bytes with headers do not fit into the topic, which accepts ",
                accepted,
                "; send a reference to the data, or raise max.message.bytes of the topic",
            ),
        )

    def _accepted_bytes(self) -> Column:
        accepted = f.lit(MAX_VALUE_BYTES)
        for channel, settings in self._rules.known.items():
            if settings.max_message_bytes < MAX_VALUE_BYTES:
                accepted = f.when(self._channel == channel, settings.max_message_bytes).otherwise(accepted)
        return accepted

    def _headers_bytes(self) -> Column:
        size = f.coalesce(f.octet_length(self._key), f.lit(0))
        if "headers" not in self._types:
            return size
        own = f.aggregate(
            self._entries,
            f.lit(0),
            lambda sum_, entry: (
                sum_ + f.octet_length(entry["key"]) + f.coalesce(f.octet_length(entry["value"]), f.lit(0))
            ),
        )
        return size + f.coalesce(own, f.lit(0))

    def _faults_of_headers(self) -> Iterator[tuple[Column, Column]]:
        reserved = f.filter(f.map_keys("headers"), _is_reserved)
        yield (
            f.size(reserved) > 0,
            _said("headers: '", f.element_at(reserved, 1), "' is reserved; use another name"),
        )
        yield (
            f.exists(self._entries, lambda entry: (entry["key"] == "") | ~_is_text(entry["key"])),
            f.lit("headers: a name is empty or not text; use UTF-8 without NUL"),
        )
        yield (
            f.exists(self._entries, lambda entry: entry["value"].isNull() | ~_is_text(entry["value"])),
            f.lit("headers: a value is null or not text; use UTF-8 without NUL, or leave the header out"),
        )


def _is_reserved(name: Column) -> Column:
    return (name == protocol.CONTENT_TYPE) | name.startswith("delay-")


def _is_text(column: Column) -> Column:
    """Null for null."""
    return f.is_valid_utf8(column) & ~f.contains(column, f.lit("\0"))


def _header(name: Column, value: Column) -> Column:
    return f.struct(name.alias("key"), value.cast("binary").alias("value"))


def _said(*parts: Column | str) -> Column:
    return f.concat(*(f.lit(each) if isinstance(each, str) else each.cast("string") for each in parts))
