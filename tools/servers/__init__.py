"""Private servers for tests and benchmarks: `python -m tools.servers postgres -- command ...`."""
