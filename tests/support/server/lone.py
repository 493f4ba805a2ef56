"""What a look for many messages finds, given what it finds of each."""

from collections.abc import Sequence

import numpy as np

from delaywheel.storage.reading.ids import LoneIds
from delaywheel_replica.server.lookup.scan import Found


def lone_of(all_found: Sequence[Found], dues_ms: Sequence[int]) -> LoneIds:
    """Returns the columns of messages with these dues."""
    is_lone = [
        len(found.copies) == 1
        and len(found.cancels) <= 1
        and found.readable
        and found.rescheduled_to is None
        for found in all_found
    ]
    copies = [found.copies[0] if found.copies else None for found in all_found]
    cancels = [found.cancels[0] if found.cancels else None for found in all_found]
    return LoneIds(
        np.array(is_lone),
        np.array([not (found.copies or found.cancels) and found.readable for found in all_found]),
        np.array(dues_ms, np.int64),
        np.fromiter((copy and copy.wheel for copy in copies), np.object_),
        np.array([copy.seq if copy else 0 for copy in copies], np.int64),
        np.array([copy.row if copy else 0 for copy in copies], np.int64),
        np.fromiter((cancel and cancel.wheel for cancel in cancels), np.object_),
        np.array([cancel.seq if cancel else 0 for cancel in cancels], np.int64),
    )
