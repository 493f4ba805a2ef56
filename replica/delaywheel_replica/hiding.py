"""Hides secrets in settings and places that are shown."""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "********"

_HARMLESS = re.compile(
    r"(socket|broker|metadata|topic|queued?|message|batch|compression|fetch|linger|reconnect|retry"
    r"|api|connections|statistics|log|enable|check|allow|auto|session|heartbeat|max|receive"
    r"|isolation|group|transaction|transactional|request|delivery|sticky)(\.[a-z]+)+"
    r"|acks|retries|partitioner|debug|log_level|bootstrap\.servers|security\.protocol"
    r"|client\.(id|rack|dns\.lookup)|sasl\.(mechanisms?|username)"
    r"|sasl\.oauthbearer\.(method|client\.id|scope)"
    r"|sasl\.kerberos\.(service\.name|principal|keytab|min\.time\.before\.relogin)"
    r"|(ssl|https)\.(ca|certificate|crl|key|keystore|truststore)\.location"
    r"|ssl\.(cipher\.suites|curves\.list|sigalgs\.list|endpoint\.identification\.algorithm)"
)


def is_secret(name: str) -> bool:
    """Whether the value of a Kafka client setting must not be shown: all but what is harmless."""
    return _HARMLESS.fullmatch(name.lower()) is None


def shown(uri: str) -> str:
    """Returns a URI without any secrets in it."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    authority, slash, path = re.split("[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
