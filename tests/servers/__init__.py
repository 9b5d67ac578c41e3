"""Private servers for tests and benchmarks: `python -m tests.servers postgres -- command ...`."""
