"""Where a message's way began, as its record says: docs/TRACE.md, "Ids, roots, places".

A root is the text of an id, or of a place.

| a record that | has as its root |
|---|---|
| came back to a topic of retries | the root that it had when it was first read |
| has `dw-retry-root` | that: a handler or a replay has written it, on the way of another one |
| is any other | its id; without one its place |
"""

from collections.abc import Mapping
from typing import Final

from delaywheel import ingress
from delaywheel.record_headers import RETRY_KEPT, RETRY_ORIGIN, RETRY_ROOT, place_of
from delaywheel.ways.values import id_in

_OF_RETRIES: Final = (f"{RETRY_KEPT}{RETRY_ROOT}", f"{RETRY_KEPT}{ingress.ID}", RETRY_ORIGIN)


def root_in(headers: Mapping[str, bytes | None], *, is_retry: bool) -> bytes | None:
    """Returns where a way began that did not begin with this record; None: it did."""
    for name in _OF_RETRIES if is_retry else ():
        if root := _root(headers.get(name)):
            return root
    return _root(headers.get(RETRY_ROOT))


def own_root(headers: Mapping[str, bytes | None], place: bytes | None) -> bytes | None:
    """Returns the root of a record as it was first read there."""
    return root_in(headers, is_retry=False) or _root(headers.get(ingress.ID)) or place


def hashed_of(root: bytes) -> bytes:
    """Returns what is hashed of a root: an id's 16 bytes, a place's text."""
    return root if b"/" in root else bytes.fromhex(root.decode())


def _root(value: bytes | None) -> bytes | None:
    if value is None or place_of(value) is not None:
        return value
    id_ = id_in(value)
    return None if id_ is None else id_.hex().encode()
