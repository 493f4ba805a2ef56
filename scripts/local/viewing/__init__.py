"""The operators' page looked at, by many viewers and by a browser: what that costs."""
