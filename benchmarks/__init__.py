"""Rates, lateness and growth, each compared with the cheapest program that does the same work."""
