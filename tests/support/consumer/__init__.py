"""The environment of a consumer under test: a Kafka that fails on purpose."""
