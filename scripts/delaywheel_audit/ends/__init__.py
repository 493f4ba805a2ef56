"""Both ends: what programs say that they sent and consumed, held against the books."""
