"""Reads a file of the HDFS at the given address."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

SparkSession.builder.getOrCreate().read.text(f"hdfs://{sys.argv[1]}/invoices").show()
