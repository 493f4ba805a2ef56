"""How many files a process may have open."""

import resource
from typing import Final

WANTED_DESCRIPTORS: Final = 65_536


def raise_descriptor_limit() -> int:
    """Raises the soft limit towards what is needed, within the hard one; returns the result."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return wanted if soft == resource.RLIM_INFINITY else soft
