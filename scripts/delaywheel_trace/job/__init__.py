"""The job that keeps an index: one streaming query, and what merges its batches beside it."""
