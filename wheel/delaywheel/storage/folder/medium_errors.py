"""Which errors come from the medium: the one place that decides it.

An error of the medium, or of the file system on it, concerns the bytes that were asked for: they
are damaged, or cannot be read for now, while others can be read. Any other error, such as a lack of
descriptors, memory or rights, says nothing about these bytes, and is raised to whoever asked.
"""

import errno
from typing import Final

MEDIUM_ERRORS: Final = frozenset(
    {
        errno.EIO,
        errno.EUCLEAN,  # EFSCORRUPTED: the file system's own structures are damaged
        errno.EBADMSG,  # EFSBADCRC: a checksum of the file system is wrong
        errno.ENODATA,  # a sector that the medium cannot read
        errno.EILSEQ,  # a block's protection data are wrong
        errno.EREMOTEIO,  # the target of a network disk failed
        errno.ETIMEDOUT,  # the device did not answer
        errno.ENXIO,  # the device is gone
    }
)


def is_medium_error(error: BaseException) -> bool:
    """Whether an error came from the medium or the file system on it."""
    return isinstance(error, OSError) and error.errno in MEDIUM_ERRORS
