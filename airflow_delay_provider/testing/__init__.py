"""For tests of DAGs: a clock that is set, the embedded broker on it, and pytest fixtures. See docs/testing.md."""
