"""What a wheel holds after its writer ended, and what is wrong with a data folder."""
