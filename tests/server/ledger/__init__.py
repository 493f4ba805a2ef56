"""The ledger's rows, and their publication."""
