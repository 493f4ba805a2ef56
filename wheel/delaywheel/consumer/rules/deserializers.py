"""Makes objects of keys and values, by the deserializers that a consumer was given.

A deserializer is a function of the bytes and of where they stand (topic, field and headers), like
confluent-kafka's own for Avro, Protobuf and JSON with a schema registry. Null stays None.

What it raises is an UnreadableError (a dead letter, UNREADABLE, with the bytes as they are), unless
the bytes may be fine: after an OSError, an error that came from one, or a registry's 401, 403, 408,
429 or 5xx that error stays, and the policy decides as for any failure of a handler.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from delaywheel.consumer.records import RecordHeaders, causes
from delaywheel.functions import check_plain

Deserializer: TypeAlias = Callable[[bytes, Any], object]
Field: TypeAlias = Literal["key", "value"]

_PASSING: Final = frozenset({401, 403, 408, 429, *range(500, 600)})


class FieldContext(NamedTuple):
    """Where the bytes stand: what confluent-kafka's `SerializationContext` says.

    The topic is the one that the record was first read from, the headers are its own; `field` is
    equal to confluent-kafka's `MessageField`.
    """

    topic: str
    field: Field
    headers: RecordHeaders


def read_text(content: bytes, _: object) -> str:
    """A deserializer: text in UTF-8."""
    return content.decode()


def read_json(content: bytes, _: object) -> Any:
    """A deserializer: JSON."""
    return json.loads(content)


def deserializers_of(given: Mapping[Field, Deserializer | None]) -> dict[Field, Deserializer]:
    """Returns those that are given; raises TypeError for one that is no plain function."""
    found: dict[Field, Deserializer] = {}
    for field, deserializer in given.items():
        if deserializer is None:
            continue
        check_plain(f"{field}_deserializer", deserializer)
        found[field] = deserializer
    return found


def may_pass(error: BaseException) -> bool:
    """Whether a deserializer failed for a reason that may pass: the registry does not answer."""
    return any(
        isinstance(one, OSError) or getattr(one, "http_status_code", None) in _PASSING
        for one in causes(error)
    )
