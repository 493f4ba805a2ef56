"""Finds equal keys and equal bytes among many messages, without loops over small ones.

A key is topic, id and due. Keys are compared through a 64-bit mix of them: equal mixes are
suspects, which are then compared in full, so a caller that makes mixes collide gains nothing but a
little of our time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.frames.columns import Blob
from delaywheel_replica.cleaner.due.rows import Records, record_lengths_bytes

_ODD_1 = np.uint64(0x9E3779B97F4A7C15)
_ODD_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_ODD_3 = np.uint64(0x165667B19E3779F9)
_HALF = np.uint64(32)
KEY: Final = ("topic", "due_ms", "id_low", "id_high")
"""What makes records copies of one message."""
_COMPARED_AT_ONCE_BYTES = 1 << 17
"""Small messages are gathered for comparing, which takes 40 times their bytes in memory."""
_LARGE_BYTES = 1 << 12
"""From this length on, a pair of messages is compared alone, where its bytes lie."""
_PIECE_BYTES = 1 << 16
_SAME_IN_A_COPY = ("topic", "partition", "timestamp_ms", "key_length", "value_length")


def mix_keys(
    due_ms: NDArray[np.int64],
    id_low: NDArray[np.uint64],
    id_high: NDArray[np.uint64],
    topic: NDArray[np.int32],
) -> NDArray[np.uint64]:
    """Returns 64 well-spread bits of each key."""
    mixed = id_low * _ODD_1
    mixed ^= mixed >> _HALF
    mixed += id_high
    mixed *= _ODD_2
    mixed ^= mixed >> _HALF
    mixed += due_ms.view(np.uint64)
    mixed ^= topic.astype(np.uint64) << _HALF
    mixed *= _ODD_3
    mixed ^= mixed >> _HALF
    return mixed


def spread_ranges(
    first: NDArray[np.intp], end: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Returns all (range number, member) pairs of the half-open ranges [first[i], end[i])."""
    lengths = end - first
    numbers = np.repeat(np.arange(len(first)), lengths)
    before = np.cumsum(lengths) - lengths
    members = np.arange(len(numbers)) - np.repeat(before - first, lengths)
    return numbers, members


def equal_neighbours(sorted_values: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Marks sorted values that occur more than once."""
    repeated = np.zeros(len(sorted_values), np.bool_)
    same = sorted_values[1:] == sorted_values[:-1]
    repeated[1:] = same
    repeated[:-1] |= same
    return repeated


def first_of_equals(records: Records, order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Returns, for each record, the number of the one with the same key and the least rank."""
    columns = [records[name] for name in KEY]
    by_key = np.lexsort((order, *columns))
    starts = np.ones(len(records), np.bool_)
    starts[1:] = False
    for column in columns:
        along = column[by_key]
        starts[1:] |= along[1:] != along[:-1]
    group = np.cumsum(starts) - 1
    first = np.empty(len(records), np.intp)
    first[by_key] = by_key[np.flatnonzero(starts)][group]
    return first


def contents_differ(left: Records, right: Records, blobs: Sequence[Blob]) -> NDArray[np.bool_]:
    """Marks pairs of messages that would differ in Kafka in any way."""
    differ = np.zeros(len(left), np.bool_)
    for name in (*_SAME_IN_A_COPY, "headers_length"):
        differ |= left[name] != right[name]
    alike = np.flatnonzero(~differ)
    lengths = record_lengths_bytes(left.take(alike))
    is_large = lengths >= _LARGE_BYTES
    for pair, length in zip(alike[is_large].tolist(), lengths[is_large].tolist(), strict=True):
        differ[pair] = _large_differ(left[pair], right[pair], length, blobs)
    alike, lengths = alike[~is_large], lengths[~is_large]
    # Chunks of whole pairs, so that the indexes made on the way stay small.
    chunk_of = np.cumsum(lengths) // _COMPARED_AT_ONCE_BYTES
    bounds = np.flatnonzero(np.diff(chunk_of, prepend=-1)).tolist()
    for begin, end in pairwise([*bounds, len(alike)]):
        pairs = alike[begin:end]
        differ[pairs] = _bytes_differ(
            left.take(pairs), right.take(pairs), lengths[begin:end], blobs
        )
    return differ


def _large_differ(left: np.void, right: np.void, length_bytes: int, blobs: Sequence[Blob]) -> bool:
    """Compares two messages' bytes piece by piece, without a copy."""
    one = np.frombuffer(blobs[left["blob"]], np.uint8, length_bytes, int(left["start"]))
    other = np.frombuffer(blobs[right["blob"]], np.uint8, length_bytes, int(right["start"]))
    return any(
        (one[at : at + _PIECE_BYTES] != other[at : at + _PIECE_BYTES]).any()
        for at in range(0, length_bytes, _PIECE_BYTES)
    )


def _bytes_differ(
    left: Records, right: Records, lengths: NDArray[np.int64], blobs: Sequence[Blob]
) -> NDArray[np.bool_]:
    """Compares the blobs' bytes of pairs with equal lengths."""
    unequal = _gather(left, lengths, blobs) != _gather(right, lengths, blobs)
    counted = np.concatenate(([0], np.cumsum(unequal)))
    ends = np.cumsum(lengths)
    result: NDArray[np.bool_] = counted[ends] != counted[ends - lengths]
    return result


def _gather(
    records: Records, lengths: NDArray[np.int64], blobs: Sequence[Blob]
) -> NDArray[np.uint8]:
    """Concatenates the messages' bytes; loops over blobs."""
    ends = np.cumsum(lengths)
    gathered = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    by_blob = np.argsort(records["blob"], kind="stable")
    numbers, bounds = np.unique(records["blob"][by_blob], return_index=True)
    for number, of_blob in zip(numbers.tolist(), np.split(by_blob, bounds[1:]), strict=True):
        first, size = records["start"][of_blob], lengths[of_blob]
        _, source = spread_ranges(first, first + size)
        _, target = spread_ranges(ends[of_blob] - size, ends[of_blob])
        gathered[target] = np.frombuffer(blobs[number], np.uint8)[source]
    return gathered
