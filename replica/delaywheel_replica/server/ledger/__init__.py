"""The ledger: rows of what was accepted, and their publication as Parquet."""
