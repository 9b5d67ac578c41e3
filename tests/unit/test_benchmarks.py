from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from airflow_delay_provider.brokers.kafka.topology import Topology
from airflow_delay_provider.dispatcher.dispatch_embedded import DispatchEmbedded
from benchmarks import api as api_benchmark
from benchmarks import kafka as kafka_benchmark
from benchmarks import kafka_dispatch, kafka_report, kafka_schedule, kafka_writes, pipeline_report, rabbitmq_report
from benchmarks import ledger as ledger_benchmark
from benchmarks import pipeline as pipeline_benchmark
from benchmarks import rabbitmq as rabbitmq_benchmark
from benchmarks.api_report import api_tables
from benchmarks.databases import URL_VARIABLE
from benchmarks.kafka_leaps import rests_of
from benchmarks.kafka_report import DESIGNS, kafka_tables
from benchmarks.ledger import Sizes
from benchmarks.measurement import Results, percentile
from benchmarks.rabbitmq_methods import BINARY, KOMBU, OFF, ON, ONE, RAW, BinaryLadder
from benchmarks.report import fill, lateness_job_tables, ledger_tables, rabbitmq_tables
from benchmarks.results import read_csv, read_machine
from benchmarks.streaming_report import streaming_tables
from tests.kafkas import require_kafka
from tests.ladder_path import path_of
from tests.rabbits import URL_VARIABLE as RABBITMQ_VARIABLE
from tests.rabbits import fresh_vhost

TINY = Sizes(
    schedule_messages=20,
    schedule_singles=2,
    dispatch_messages=20,
    channel_messages=20,
    requeued=2,
    repeats=1,
    lateness_seconds=0.1,
    lateness_repeats=1,
    lookup_sizes=(2_000, 4_000),
    lookup_calls=1,
)
TINY_RABBITMQ = rabbitmq_benchmark.Sizes(
    publish_messages=20,
    single_messages=2,
    publish_repeats=1,
    delivery_seconds=0.05,
    delivery_repeats=1,
    idle_seconds=0.1,
)
TINY_KAFKA = kafka_benchmark.Sizes(
    schedule_messages=20,
    schedule_repeats=1,
    dispatch_messages=20,
    dispatch_repeats=1,
    writes_messages=5,
    writes_delays=("5 s", "5 min"),
    writes_factors=(1.0,),
    radixes=(4,),
    idle_seconds=0.1,
    idle_repeats=1,
    lateness_seconds=0.05,
    lateness_delays=(0.5, 1.0),
    pending=20,
    restart_repeats=1,
    large=3,
)
TINY_PIPELINE = pipeline_benchmark.Sizes(rows=40, cores=(2,), memory_rows=())
TINY_API = api_benchmark.Sizes(messages=(1_000, 2_000), requests=1, repeats=1)
DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.lateness.DELAY_SECONDS", (0.1, 0.3))
    monkeypatch.setattr("benchmarks.rabbitmq_measure.DELAY_SECONDS", (1, 1))


@pytest.fixture
def own_vhost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_vhost() as url:
        monkeypatch.setenv(RABBITMQ_VARIABLE, url)
        yield


@pytest.mark.timeout(900)
def test_a_tiny_run_measures_everything_and_finds_all_counts_right(tmp_path: Path) -> None:
    assert ledger_benchmark.main(["--results", str(tmp_path)], sizes=TINY) == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ledger.csv",
        "ledger_flat.png",
        "ledger_lateness.png",
        "ledger_machine.json",
        "ledger_rates.png",
    ]
    measurements = read_csv(tmp_path / "ledger.csv")
    names: dict[str, set[str]] = {}
    for measurement in measurements:
        names.setdefault(measurement.store, set()).add(measurement.name)
    assert list(names) == (["sqlite", "postgresql"] if URL_VARIABLE in os.environ else ["sqlite"])
    only_postgresql = {name for name in names.get("postgresql", ()) if "unnest" in name or "COPY" in name}
    assert len(only_postgresql) == (8 if "postgresql" in names else 0)
    assert all(names["sqlite"] == others - only_postgresql for others in names.values())
    assert all(0 < m.min <= m.value <= m.max for m in measurements if m.unit != "ms")
    tables = ledger_tables(measurements, read_machine(tmp_path / "ledger_machine.json"))
    assert "| sqlite | dispatch, 2 processes |" in fill(DOCUMENT.read_text(), tables)


def test_a_run_that_leaves_messages_undispatched_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.setattr(DispatchEmbedded, "run_once", lambda _: 1.0)

    assert ledger_benchmark.main(["--results", str(tmp_path)], sizes=TINY) == 1

    assert "error: messages that wait: found 20, wanted 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(300)
def test_a_tiny_run_on_the_api_gets_full_pages_from_every_route(tmp_path: Path) -> None:
    assert api_benchmark.main(["--results", str(tmp_path)], sizes=TINY_API) == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == ["api.csv", "api_flat.png", "api_machine.json"]
    measurements = read_csv(tmp_path / "api.csv")
    assert all(m.value > 0 for m in measurements)
    tables = api_tables(measurements, read_machine(tmp_path / "api_machine.json"))
    assert "| sqlite | messages by DAG, run and task |" in fill(DOCUMENT.read_text(), tables)


def test_a_run_on_the_api_that_gets_too_little_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.setattr(api_benchmark, "CHANNELS", ("bench.none", *api_benchmark.CHANNELS[1:]))

    assert api_benchmark.main(["--results", str(tmp_path)], sizes=TINY_API) == 1

    assert "error: messages of messages by channel in bench_small: found 0, wanted 50" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_ratio_is_the_median_of_repeats_that_ran_side_by_side() -> None:
    results = Results()
    results.add("sqlite", "ours", [10, 30, 50], "messages/s", ratio_to="bare", base=[20, 30, 200])

    measurement = results.measurements[0]
    assert (measurement.value, measurement.min, measurement.max) == (30, 10, 50)
    assert measurement.ratio == 0.5


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: int) -> None:
    assert percentile(list(range(1, 101)), share) == expected


def test_a_document_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place <!-- rates: begin -->"):
        fill("# Performance", {"rates": "| a |"})


def test_a_tiny_run_on_rabbitmq_measures_everything_and_finds_all_counts_right(tmp_path: Path, own_vhost: None) -> None:
    assert rabbitmq_benchmark.main(["--results", str(tmp_path)], sizes=TINY_RABBITMQ) == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rabbitmq.csv",
        "rabbitmq_cpu.png",
        "rabbitmq_lateness.png",
        "rabbitmq_machine.json",
        "rabbitmq_rates.png",
    ]
    measurements = read_csv(tmp_path / "rabbitmq.csv")
    assert {m.store for m in measurements} == {"quorum"}
    assert all(m.value == 1 for m in measurements if m.unit == "hops/message")
    tables = rabbitmq_tables(measurements, read_machine(tmp_path / "rabbitmq_machine.json"))
    assert "| quorum | hops, ours, journal off | 1.0 |" in fill(DOCUMENT.read_text(), tables)


def test_a_run_on_rabbitmq_that_loses_messages_fails(
    tmp_path: Path, own_vhost: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.rabbitmq_methods.Publisher.publish", lambda *_: None)

    assert rabbitmq_benchmark.main(["--results", str(tmp_path)], sizes=TINY_RABBITMQ) == 1

    assert "error: messages that wait, raw publish: found 0, wanted 100" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("delay_ms", "exchange", "bits"),
    [
        (1, "bench.binary.0", "1"),
        (20_000, "bench.binary.4", "1.0.1.0.0"),
        (20_001, "bench.binary.4", "1.0.1.0.1"),
    ],
)
def test_the_binary_ladder_is_entered_at_the_highest_bit(delay_ms: int, exchange: str, bits: str) -> None:
    binary = BinaryLadder()
    levels = len(list(binary.queues()))

    assert binary.route("invoices", delay_ms) == (exchange, f"{'0.' * (levels - len(bits) // 2 - 1)}{bits}.invoices")
    assert sum(path_of(binary.ladder, delay_ms)) >= delay_ms
    assert len(path_of(binary.ladder, delay_ms)) == bits.count("1")
    assert len(binary.ladder.holds_ms) == levels == 28


def test_an_aim_is_met_or_it_is_said_that_it_is_not() -> None:
    results = Results()
    rates = {ON: [38.0], OFF: [40.0], ONE: [5.0], RAW: [100.0], BINARY: [25.0], KOMBU: [2.0]}
    rabbitmq_report.add_ratios(results, rates=rates, cpu={ON: [7.0], OFF: [5.0], BINARY: [10.0]})

    assert rabbitmq_report.table(results.measurements).splitlines()[2:] == [
        "| quorum | rate: ours, journal on / raw publish | >= 0.37 | 0.38 | 0.38 - 0.38 | times | yes |",
        "| quorum | rate: ours, journal on / binary ladder | >= 1.7 | 1.52 | 1.52 - 1.52 | times | **no** |",
        "| quorum | rate: ours, journal on / kombu, one by one | >= 15 | 19.0 | 19.0 - 19.0 | times | yes |",
        "| quorum | rate: ours, journal on, one by one / kombu, one by one | >= 2 | 2.50 | 2.50 - 2.50 | times | yes |",
        "| quorum | CPU: ours, journal on / binary ladder | <= 0.6 | 0.70 | 0.70 - 0.70 | times | **no** |",
    ]


def test_a_tiny_run_on_kafka_measures_everything_and_finds_all_counts_right(tmp_path: Path) -> None:
    require_kafka()

    assert kafka_benchmark.main(["--results", str(tmp_path)], sizes=TINY_KAFKA) == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "kafka.csv",
        "kafka_cpu.png",
        "kafka_lateness.png",
        "kafka_machine.json",
        "kafka_rates.png",
        "kafka_writes.png",
    ]
    measurements = read_csv(tmp_path / "kafka.csv")
    assert list(dict.fromkeys(m.store for m in measurements)) == list(DESIGNS)
    tables = kafka_tables(measurements, read_machine(tmp_path / "kafka_machine.json"))
    document = fill(DOCUMENT.read_text(), tables)
    assert "| radix 4 | dispatch, 2 processes |" in document
    assert "| writes for 1 h: mean / most | 6.9 / 11 | 5.6 / 7 | 4.6 / 5 | 3.9 / 4 | 12.5 / 20 |" in document


def test_a_run_on_kafka_whose_records_are_not_confirmed_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_kafka()
    monkeypatch.setattr("benchmarks.kafka_schedule.RawProducer._note", lambda *_: None)

    assert kafka_benchmark.main(["--results", str(tmp_path)], sizes=TINY_KAFKA) == 1

    assert "error: delivery reports: found 0, wanted 20" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("radix", "holds"),
    [
        (2, [2_048_000, 1_024_000, 512_000, 8_000, 4_000, 2_000]),
        (4, [2_048_000, 1_536_000, 8_000, 6_000]),
        (16, [3_584_000, 14_000]),
    ],
)
def test_an_hour_is_a_sum_of_rests_and_less_than_a_tick(radix: int, holds: list[int]) -> None:
    assert rests_of(Topology(radix=radix).ladder, 3_600_000) == holds


@pytest.mark.parametrize(
    ("remaining_ms", "bucket"), [(0, 0), (999, 0), (1_000, 1), (1_999, 1), (2_000, 2), (9_200, 4), (256_000, 9)]
)
def test_buckets_of_the_seed_grow_exponentially(remaining_ms: int, bucket: int) -> None:
    assert kafka_writes.bucket_of(remaining_ms) == bucket


def test_a_message_in_buckets_is_scanned_until_it_is_due() -> None:
    # In bucket 0 every 100 ms, whenever the first scan comes.
    assert {kafka_writes.writes_of(500, Random(seed)) for seed in range(50)} == {5, 6}
    assert kafka_writes.writes_of(0, Random(1)) == 0


def test_more_rungs_mean_fewer_writes() -> None:
    results = Results()
    kafka_writes.count(results)

    def values(name: str) -> list[float]:
        return [m.value for design in DESIGNS if (m := results.get(design, name)) is not None]

    assert values("rungs") == [22, 33, 53, 83, 24]
    for delay in kafka_writes.DELAYS_MS:
        writes = values(f"writes counted, {delay}")
        assert writes[-1] > writes[0] >= writes[1] >= writes[2] >= writes[3]


def test_an_aim_for_kafka_is_met_or_it_is_said_that_it_is_not() -> None:
    results = Results()
    kafka_report.add_ratios(
        results,
        schedule={
            kafka_schedule.OURS: [40.0],
            kafka_schedule.COMPOSED: [10.0],
            kafka_schedule.RAW: [100.0],
            kafka_schedule.RAW_SAME: [80.0],
        },
        dispatch={kafka_dispatch.OURS: [31.0], kafka_dispatch.TWO: [62.0], kafka_dispatch.RAW: [100.0]},
    )
    results.add("radix 4", "1000/s, seen by a consumer, p99", [101.0], "ms")

    assert kafka_report.aims_table(results.measurements).splitlines()[2:] == [
        "| rate: schedule / raw produce | >= 0.8 | 0.40 | 0.40 - 0.40 | times | **no** |",
        "| rate: schedule / raw produce of the same bytes | >= 0.5 | 0.50 | 0.50 - 0.50 | times | yes |",
        "| rate: dispatch, 1 process / raw transactional copy | >= 0.3 | 0.31 | 0.31 - 0.31 | times | yes |",
        "| 1000/s, seen by a consumer, p99 | <= 100 | 101 | 101 - 101 | ms | **no** |",
    ]


@pytest.mark.timeout(600)
def test_a_tiny_run_of_the_pipeline_measures_everything_and_finds_all_counts_right(
    tmp_path: Path, own_vhost: None
) -> None:
    require_kafka()

    assert pipeline_benchmark.main(["--results", str(tmp_path)], sizes=TINY_PIPELINE) == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipeline.csv", "pipeline.png", "pipeline_machine.json"]
    measurements = read_csv(tmp_path / "pipeline.csv")
    assert {m.store for m in measurements} >= {"kafka", "rabbitmq"}
    rates = {m.name for m in measurements if m.store == "kafka" and m.unit == "rows/s"}
    assert rates == {"bare produce with headers", "hook, 1 process", "data source, 2 cores", "JVM sink, 2 cores"}
    assert all(m.value > 0 for m in measurements)
    tables = pipeline_report.pipeline_tables(measurements, read_machine(tmp_path / "pipeline_machine.json"))
    assert "| kafka | rate: JVM sink, 2 cores / hook | >= 3 |" in fill(DOCUMENT.read_text(), tables)


def test_a_run_of_the_pipeline_that_loses_rows_fails(
    tmp_path: Path, own_vhost: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DELAY_TEST_KAFKA_BOOTSTRAP", raising=False)
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.setattr("airflow_delay_provider.hooks.delay.DelayHook.schedule", lambda *_: [])

    sizes = pipeline_benchmark.Sizes(rows=40, cores=(), memory_rows=())
    assert pipeline_benchmark.main(["--results", str(tmp_path)], sizes=sizes) == 1

    said = "error: rabbitmq: messages that wait, hook, 1 process, to warm up: found 0, wanted 40"
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_aim_for_the_pipeline_is_met_or_it_is_said_that_it_is_not() -> None:
    results = Results()
    rates = {"hook, 1 process": [10.0], "data source, 1 core": [10.0], "data source, 2 cores": [18.0]}
    pipeline_report.add_rates(results, {("kafka", name): values for name, values in rates.items()})
    for rows, size in ((100, 50.0), (1000, 70.0)):
        results.add("kafka", pipeline_report.memory_name("data source", rows, "Python"), [size], "MiB")
    pipeline_report.add_growth(results, (100, 1000))

    assert pipeline_report.aims_table(results.measurements).splitlines()[2:] == [
        "| kafka | rate: data source, 2 cores / hook | >= 1.7 | 1.80 | 1.80 - 1.80 | yes |",
        "| kafka | rate: data source, 2 cores / 1 core | >= 1.6 | 1.80 | 1.80 - 1.80 | yes |",
        "| kafka | memory: data source, Python, most / fewest rows | <= 1.15 | 1.40 | 1.40 - 1.40 | **no** |",
    ]


def test_the_dispatcher_on_spark_stands_beside_the_plain_one_in_the_report() -> None:
    results = Results()
    for store, late in (("plain dispatcher", 10.0), ("Spark, 2 executors", 2000.0)):
        results.add(store, "lost, of 200,000", [0.0], "messages")
        results.add(store, "bulk, all, late p50", [late], "ms")
        results.add(store, "500/s, late p99", [late * 2], "ms")
        results.add(store, "1000/s, achieved by the producer", [999.0], "messages/s")
    machine = {"cores": 2, "system": "Linux", "python": "3.11", "load_at_begin": 0.1, "load_at_end": 3, "quick": False}

    tables = streaming_tables(results.measurements, {**machine, "kafka": "4.3.1", "pyspark": "4.2.0"})

    assert "| Spark, 2 executors | 0 |  |  | 2,000 ms |  |  |  |  |  |" in tables["streaming bulk"]
    assert "| plain dispatcher | 500 |  | 20.0 ms |  |  |  |" in tables["streaming rates"]
    assert "| plain dispatcher | 1,000 |  |  |  |  | 999 |" in tables["streaming rates"]
    fill(DOCUMENT.read_text(), tables)


def test_the_days_of_the_lateness_job_stand_side_by_side_in_the_report() -> None:
    results = Results()
    for day, seconds in (("first day", 60.0), ("second, incremental day", 61.0)):
        results.add("postgresql", f"{day}: whole job", [seconds], "s")
    machine = {"cores": 2, "system": "Linux", "python": "3.11", "load_at_begin": 0.1, "load_at_end": 3, "quick": False}
    software = {"postgresql": "15", "spark": "4.2.0", "job_cores": "2", "driver_memory": "2g", "rows": "20,000,000"}

    tables = lateness_job_tables(results.measurements, {**machine, **software})

    assert tables["lateness job"].splitlines() == [
        "| | first day | second, incremental day |",
        "|---|---:|---:|",
        "| whole job | 60.0 s | 61.0 s |",
    ]
    fill(DOCUMENT.read_text(), tables)
