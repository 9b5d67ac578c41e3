"""Running spark-submit: the hook, the guard of its process, and the log of its driver."""
