"""What `scripts/upgrade-check` does: nodes are upgraded one by one under load, and back."""
