"""Hides secrets in settings and places that are shown."""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "********"

_SECRET = re.compile(r"password|secret|token|jaas|ssl\.key\.pem|sasl\.oauthbearer\.config")


def is_secret(name: str) -> bool:
    """Whether the value of a Kafka client setting must not be shown."""
    return _SECRET.search(name.lower()) is not None


def shown(uri: str) -> str:
    """Returns a URI without any secrets in it."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    authority, slash, path = re.split("[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
