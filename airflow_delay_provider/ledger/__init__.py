"""The ledger: SQL tables of messages and their state, on SQLite with no set-up or on PostgreSQL."""
