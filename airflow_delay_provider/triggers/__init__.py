"""Triggers of deferred tasks, and the threads that they share."""
