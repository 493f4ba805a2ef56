"""Decodes a request of columns, which must be consistent as a whole."""

from collections.abc import Mapping
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns, content_starts
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.intake.unpacking import ByteRange, Outline
from delaywheel_replica.server.node.refusals import RequestRefusedError

_Scalar = TypeVar("_Scalar", bound=np.generic)

NO_ROWS: Final = np.empty(0, np.intp)


def content_lengths(
    key_lengths: NDArray[np.int32],
    value_lengths: NDArray[np.int32],
    headers_lengths: NDArray[np.int32],
) -> NDArray[np.int64]:
    """Returns the bytes of each message in the blob."""
    lengths = np.maximum(key_lengths, 0).astype(np.int64)
    lengths += np.maximum(value_lengths, 0)
    lengths += headers_lengths
    return lengths


def headers_bytes(request: bytes, outline: Outline) -> int:
    """Returns the total length of all headers, as a request of columns states it."""
    begin, end = (outline.columns or {}).get("headers_lengths", (0, 0))
    return int(np.frombuffer(request[begin : end - (end - begin) % 4], "<i4").sum(dtype=np.int64))


def decode_columns(request: bytes, outline: Outline) -> Columns:
    """Returns the messages; their contents stay in the request's buffer.

    Raises:
        RequestRefusedError: REQUEST_MALFORMED.
    """
    messages = outline.messages
    if not messages:
        raise RequestRefusedError(Reason.REQUEST_MALFORMED, "No messages")
    packed = _Packed(request, outline.columns or {}, messages)
    key_lengths = packed.column("key_lengths", np.int32)
    value_lengths = packed.column("value_lengths", np.int32)
    headers_lengths = packed.column("headers_lengths", np.int32)
    topic_numbers = packed.column("topic_numbers", np.uint32)
    blob = packed.blob()
    if int(key_lengths.min()) < -1 or int(value_lengths.min()) < -1:
        raise RequestRefusedError(Reason.REQUEST_MALFORMED, "A length below -1")
    if int(headers_lengths.min()) < 0:
        raise RequestRefusedError(Reason.REQUEST_MALFORMED, "A length of headers below 0")
    if int(topic_numbers.max()) >= len(outline.topics):
        raise RequestRefusedError(Reason.REQUEST_MALFORMED, "A topic number without a topic")
    topics, topic_numbers = _topics(request, outline, topic_numbers)
    lengths_bytes = content_lengths(key_lengths, value_lengths, headers_lengths)
    starts = content_starts(lengths_bytes)
    end = int(starts[-1] + lengths_bytes[-1])
    if end != len(blob):
        raise RequestRefusedError(
            Reason.REQUEST_MALFORMED, f"A blob of {len(blob):,} bytes for lengths of {end:,}"
        )
    return Columns(
        due_ms=packed.column("due_ms", np.int64),
        ids=packed.column("ids", np.uint8, each=ID_LENGTH_BYTES).reshape(messages, ID_LENGTH_BYTES),
        topics=topics,
        topic_numbers=topic_numbers,
        key_lengths=key_lengths,
        value_lengths=value_lengths,
        headers_lengths=headers_lengths,
        partitions=packed.optional("partitions", np.int32),
        timestamps_ms=packed.optional("timestamps_ms", np.int64),
        blob=blob,
        starts=starts,
    ).compacted()


def _topics(
    request: bytes, outline: Outline, numbers: NDArray[np.uint32]
) -> tuple[tuple[str, ...], NDArray[np.uint32]]:
    """Returns the topics, each once, and the number of each message's among them.

    What is decided by topic (rights, quotas) is decided once for each, however often it is named.
    """
    named = [_text(request, span) for span in outline.topics]
    places = {topic: place for place, topic in enumerate(dict.fromkeys(named))}
    if len(places) < len(named):
        numbers = np.array([places[topic] for topic in named], np.uint32)[numbers]
    return tuple(places), numbers


def rows_to_check(request: bytes, outline: Outline) -> NDArray[np.intp]:
    """Returns the rows of a request of columns that ask for their ids to be checked.

    Raises:
        RequestRefusedError: REQUEST_MALFORMED.
    """
    if outline.columns is None or "check_ids" not in outline.columns:
        return NO_ROWS
    packed = _Packed(request, outline.columns, outline.messages)
    return np.flatnonzero(packed.column("check_ids", np.uint8) == 1)


class _Packed:
    """The packed columns of a request."""

    def __init__(self, request: bytes, places: Mapping[str, ByteRange], messages: int) -> None:
        self._request = request
        self._places = places
        self._messages = messages

    def column(self, name: str, dtype: type[_Scalar], *, each: int = 1) -> NDArray[_Scalar]:
        """Returns a copy of one column, which need not be aligned within the request."""
        begin, end = self._places.get(name, (0, 0))
        items = self._messages * each
        expected = items * np.dtype(dtype).itemsize
        if end - begin != expected:
            raise RequestRefusedError(
                Reason.REQUEST_MALFORMED,
                f"Column {name} has {counted(end - begin, 'byte')}, not {expected:,}",
            )
        little = np.dtype(dtype).newbyteorder("<")
        return np.frombuffer(self._request, little, items, begin).astype(dtype)

    def optional(self, name: str, dtype: type[_Scalar]) -> NDArray[_Scalar]:
        """Returns a column that may be absent: then no message has a value."""
        begin, end = self._places.get(name, (0, 0))
        if begin == end:
            return np.full(self._messages, -1, dtype=dtype)
        return self.column(name, dtype)

    def blob(self) -> memoryview:
        begin, end = self._places.get("blob", (0, 0))
        return memoryview(self._request)[begin:end]


def _text(request: bytes, span: ByteRange) -> str:
    try:
        return request[span[0] : span[1]].decode()
    except UnicodeDecodeError as error:
        raise RequestRefusedError(Reason.REQUEST_MALFORMED, "A topic that is not UTF-8") from error
