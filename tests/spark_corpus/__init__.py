"""Jobs that really fail, the logs they left, and what each of them is."""
