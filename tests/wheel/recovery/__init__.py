"""Recovery of a wheel after its writer ended, and older formats."""
