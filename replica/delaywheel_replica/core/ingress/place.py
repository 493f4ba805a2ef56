"""The place of a record, and the id derived from it.

docs/PROTOCOL.md, "Ingress", has what the id is made of. The timestamp is in it because a topic that
was deleted and recreated has the same places again: two records with the same id and due would be
taken for one.
"""

from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

from delaywheel.ingress import PLACE_ID_PREFIX

NO_TIMESTAMP = -1
"""The timestamp of a record whose producer gave none."""

_PLACE = Struct(">iqq")
_PERSON = b"delaywheel-place"
_VERSION_AT, _VERSION = 6, 0x80
_VARIANT_AT, _VARIANT = 8, 0x80


class IngressPlace(NamedTuple):
    """The place of a record, which never changes."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


def message_id(place: IngressPlace, timestamp_ms: int) -> bytes:
    """Returns the id of a record without one: 16 bytes, the same at every read."""
    numbers = _PLACE.pack(place.partition, place.offset, timestamp_ms)
    digest = blake2b(numbers + place.topic.encode(), digest_size=12, person=_PERSON).digest()
    made = bytearray(PLACE_ID_PREFIX + digest)
    made[_VERSION_AT] = made[_VERSION_AT] & 0x0F | _VERSION
    made[_VARIANT_AT] = made[_VARIANT_AT] & 0x3F | _VARIANT
    return bytes(made)
