"""Around a consumer under test: a Kafka that fails on purpose, a relay in the place of ingress."""
