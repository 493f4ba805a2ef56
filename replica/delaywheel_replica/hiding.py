"""What is shown of settings and places holds no secret."""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "********"

_SECRET = re.compile(r"password|secret|token|jaas|ssl\.key\.pem|sasl\.oauthbearer\.config")


def is_secret(name: str) -> bool:
    """Whether the value of a Kafka client setting may be shown to nobody."""
    return _SECRET.search(name.lower()) is not None


def shown(uri: str) -> str:
    """A URI as it may be shown: without the secrets that it may hold."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    authority, slash, path = re.split("[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
