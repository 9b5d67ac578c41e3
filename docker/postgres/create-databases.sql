-- The airflow database comes from POSTGRES_DB; the ledger has its own.
CREATE DATABASE delay;
