"""Wheels on disk: bytes, files, reading, writing, recovery. Without gRPC, Kafka, asyncio."""
