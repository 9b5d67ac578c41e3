"""Is a Spark cluster up? Asked before a job is submitted again, so that an outage costs no attempt."""

from __future__ import annotations

from airflow_delay_provider.spark.probes.address import ClusterAddress, ClusterKind, parse_address
from airflow_delay_provider.spark.probes.asking import Probe
from airflow_delay_provider.spark.probes.looking import probe

__all__ = ["ClusterAddress", "ClusterKind", "Probe", "parse_address", "probe"]
