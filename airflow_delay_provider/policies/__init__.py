"""Retry policies for operators of others."""
