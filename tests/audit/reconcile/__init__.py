"""The reconciliation: cases, ledger, options, page, seeded faults."""
