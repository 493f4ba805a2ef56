"""What `scripts/release` does: builds dist/ from what Git knows, and shows that it is right."""
