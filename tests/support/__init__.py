"""What tests share: makers of values, fakes, and processes under test."""
