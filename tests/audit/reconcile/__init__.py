"""The reconciliation: cases, ledger, options, page."""
