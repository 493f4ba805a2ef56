"""What a wheel holds after its writer ended, and older formats."""
