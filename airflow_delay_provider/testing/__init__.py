"""Test DAGs: a settable clock, the embedded broker on it, and pytest fixtures. See docs/testing.md."""
