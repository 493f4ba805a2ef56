"""From a request's bytes to messages that may be accepted: bounds, decoding, validation."""
