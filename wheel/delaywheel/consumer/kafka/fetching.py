"""What the client has fetched, in columns: no step of Python for each record.

`map` of a method over the client's messages is one call for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import cast

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from delaywheel.consumer.records import NO_TIMESTAMP, FetchedRecords, Partition
from delaywheel.record_headers import all_headers


def in_columns(messages: Sequence[Message]) -> list[FetchedRecords]:
    """Returns records in columns, one set for those of a partition that follow each other."""
    return [_columns(at, messages[begin:end]) for at, begin, end in _parts(messages)]


def _parts(messages: Sequence[Message]) -> Iterator[tuple[Partition, int, int]]:
    begin = 0
    topics, numbers = map(Message.topic, messages), map(Message.partition, messages)
    for at, those in groupby(zip(topics, numbers, strict=True)):
        end = begin + len(list(those))
        topic, number = at
        assert topic is not None
        assert number is not None
        yield Partition(topic, number), begin, end
        begin = end


def _columns(at: Partition, messages: Sequence[Message]) -> FetchedRecords:
    headers, unread = all_headers(messages)
    return FetchedRecords(
        at,
        cast("list[int]", list(map(Message.offset, messages))),
        [
            NO_TIMESTAMP if kind == TIMESTAMP_NOT_AVAILABLE else at_ms
            for kind, at_ms in map(Message.timestamp, messages)
        ],
        cast("list[bytes | None]", list(map(Message.key, messages))),
        cast("list[bytes | None]", list(map(Message.value, messages))),
        headers,
        frozenset(unread),
    )
