"""The ledger: messages and their states in SQL tables, on SQLite (no set-up) or PostgreSQL, and its two brokers."""
