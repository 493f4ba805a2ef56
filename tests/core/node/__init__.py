"""State and inputs of a member's parts."""
