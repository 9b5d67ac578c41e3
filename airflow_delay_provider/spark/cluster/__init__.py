"""Spark clusters: their addresses and their health."""
