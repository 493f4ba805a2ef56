"""Whether frames are what their origin wrote: all frames of a bundle at once.

=============  ====================================================================================
looked at      of each frame
=============  ====================================================================================
its row        its check value; of a row without a frame, whether it is a hole or gone
its header     magic, version, kind; wheel, slot and seq; the same numbers as in its row
its lengths    that they add up to that of the frame, as a reader reckons them
its checksum   over all that is behind it
=============  ====================================================================================

What lies within a frame whose checksum is right is what its origin wrote: that names of topics can
be read, and that the lengths of messages add up, only a reader looks at (`format.decode_frame`).
"""

from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.bundle import FrameBundle
from delaywheel.format import (
    CANCEL_ROW_BYTES,
    CHECKED_FROM,
    HAS_PARTITIONS,
    HAS_TIMESTAMPS,
    HEADER,
    HEADER_LENGTH_BYTES,
    MAGIC_NUMBER,
    MESSAGE_ROW_BYTES,
    NEWEST_READ,
    OLDEST_READ,
    PARTITION_BYTES,
    TIMESTAMP_BYTES,
    Kind,
)
from delaywheel.identity import WheelId
from delaywheel.rows import SLOT_FILE_LIMIT_BYTES, cancel_counts, flawed_rows, message_counts

_HEADER_WORDS = np.arange(HEADER_LENGTH_BYTES // 8)


class Good(NamedTuple):
    """What is good of a bundle.

    Attributes:
        frames: so many, from the first on.
        accepted_at_ms: when the newest of those that have bytes was accepted; 0: none has.
    """

    frames: int
    accepted_at_ms: int


def good_frames(wheel: WheelId, bundle: FrameBundle) -> Good:
    """How many of a wheel's frames are what they should be, up to the first that is not."""
    rows, has_content = bundle.rows, bundle.has_content
    good = _up_to_first(flawed_rows(rows) | (has_content & _has_unfit_place(rows)))
    filled = has_content[:good].nonzero()[0]
    if not len(filled):
        return Good(good, 0)
    headers = _headers(bundle, filled)
    wrong = _is_misplaced(headers, wheel, rows[filled], bundle.seqs[filled])
    fitting = _up_to_first(wrong | _has_wrong_sums(headers))
    fitting = _right_checksums(bundle, filled[:fitting], headers)
    if fitting < len(filled):
        good = int(filled[fitting])
    accepted_at_ms = int(headers["accepted_at_ms"][:fitting].max(initial=0))
    return Good(good, accepted_at_ms)


def _up_to_first(wrong: NDArray[np.bool_]) -> int:
    return int(wrong.argmax()) if wrong.any() else len(wrong)


def _has_unfit_place(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows speak of a place where no frame can be."""
    offsets, lengths = rows["offset"].astype(np.int64), rows["length"].astype(np.int64)
    unfit = ((offsets | lengths) & 7 != 0) | (lengths < HEADER_LENGTH_BYTES)
    return unfit | (offsets + lengths > SLOT_FILE_LIMIT_BYTES)  # type: ignore[no-any-return]


def _headers(bundle: FrameBundle, frames: NDArray[np.intp]) -> NDArray[Any]:
    """The headers of these frames, which begin at multiples of 8."""
    begins = bundle.edges[frames]
    words = np.frombuffer(bundle.content, "<u8", int(begins[-1]) // 8 + len(_HEADER_WORDS))
    found = words[(begins >> 3)[:, np.newaxis] + _HEADER_WORDS].view(HEADER)
    return found[:, 0]  # type: ignore[no-any-return]  # numpy's stubs


def _is_misplaced(
    headers: NDArray[Any], wheel: WheelId, rows: NDArray[Any], seqs: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which are no frames, or not those of which rows and seqs speak."""
    cancels = cancel_counts(rows)
    kinds = np.where(cancels > 0, int(Kind.CANCELS), int(Kind.MESSAGES))
    return (  # type: ignore[no-any-return]  # numpy's stubs
        (headers["magic"] != MAGIC_NUMBER)
        | (headers["version"] < OLDEST_READ)
        | (headers["version"] > NEWEST_READ)
        | (headers["kind"] != kinds)
        | (headers["wheel_hash"] != wheel.hash64)
        | (headers["slot"] != rows["slot"])
        | (headers["seq"] != seqs.astype(np.uint64))
        | (headers["length_bytes"] != rows["length"])
        | (headers["messages"] != cancels + message_counts(rows))
    )


def _has_wrong_sums(headers: NDArray[Any]) -> NDArray[np.bool_]:
    """Of which a reader would say that lengths do not add up."""
    is_cancels = headers["kind"] == int(Kind.CANCELS)
    flags = headers["flags"]
    row_bytes = np.full(len(headers), MESSAGE_ROW_BYTES)
    row_bytes += ((flags & HAS_TIMESTAMPS) != 0) * TIMESTAMP_BYTES
    row_bytes += ((flags & HAS_PARTITIONS) != 0) * PARTITION_BYTES
    row_bytes[is_cancels] = CANCEL_ROW_BYTES
    columns = headers["messages"] * row_bytes
    columns += -columns % 8
    end = HEADER_LENGTH_BYTES + columns + headers["topics_length"] + headers["blob_length"]
    end += -end % 8
    return (  # type: ignore[no-any-return]  # numpy's stubs
        (headers["columns_length"] != columns) | (end != headers["length_bytes"])
    )


def _right_checksums(bundle: FrameBundle, frames: NDArray[np.intp], headers: NDArray[Any]) -> int:
    """How many of these have the right one, up to the first that has not."""
    content = bundle.content
    begins = (bundle.edges[frames] + CHECKED_FROM).tolist()
    ends = bundle.edges[frames + 1].tolist()
    found = [crc32c(content[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    return _up_to_first(headers["checksum"][: len(found)] != np.array(found, np.uint32))
