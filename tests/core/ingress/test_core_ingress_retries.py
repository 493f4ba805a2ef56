"""Retries of a consumer have the right meaning for the ingress, and come back."""

from hypothesis import given
from hypothesis import strategies as st

from delaywheel import ingress
from delaywheel.consumer import records
from delaywheel.headers import decode_headers
from delaywheel.ingress import PLAUSIBLE_MS
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import (
    ABSENT,
    CommittedRecord,
    Delayed,
    IngressRules,
    read,
)

RULES = IngressRules({}, 1 << 20, frozenset())
PLACE = IngressPlace("delaywheel-main-ingress", 1, 7)
names = st.sampled_from(["dw-id", "dw-wheel", "dw-topic", "ttl", "dw-retry-x", "trace"]) | st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8
)
headers = st.lists(st.tuples(names, st.none() | st.binary(max_size=20)), max_size=6)


@given(
    headers,
    st.none() | st.integers(0, 9),
    st.integers(PLAUSIBLE_MS.start, PLAUSIBLE_MS.stop - 1),
    st.none() | st.text(),
)
def test_a_retry_comes_back_as_it_was(
    own: records.RecordHeaders, partition: int | None, due_ms: int, error: str | None
) -> None:
    origin = records.Place("orders", 2, 5, 1_900_000_000_000)
    sent = records.retry_record(
        ingress_topic=PLACE.topic,
        retry_topic="orders.billing.retry",
        trip=records.Trip(2, origin, "first", error),
        key=b"key",
        value=b"value",
        headers=own,
        due_ms=due_ms,
        partition=partition,
    )
    found = read(CommittedRecord(PLACE, 1, sent.key, sent.value, sent.headers), RULES)
    assert isinstance(found, Delayed), found
    assert (found.topic, found.due_ms) == ("orders.billing.retry", due_ms)
    assert found.partition == (ABSENT if partition is None else partition)
    assert found.id.hex().encode() == dict(sent.headers)[ingress.ID]
    place = records.Place("orders.billing.retry", 0, 0, due_ms)
    back = records.Incoming(place, found.key, found.value, decode_headers(found.headers))
    trip, returned = records.unpack_retry(back)
    assert (trip.attempt, trip.origin, returned) == (2, origin, own)
