"""The protocol: definitions and the code generated from them."""
