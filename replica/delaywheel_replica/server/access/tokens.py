"""The file of bearer tokens: who shows which, as `<SHA-256 in hex> = "<name>"`.

The file has no token, so that who reads it cannot use one. Tokens must be long and random
(`openssl rand -hex 32`): of a short one the hash tells what it is.
"""

import re
import tomllib
from collections.abc import Mapping
from hashlib import sha256

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TOKEN_BYTES = 4_096


def parse_tokens(content: bytes) -> Mapping[str, str]:
    """Returns names by digest; a ValueError says what is wrong with the file."""
    names: dict[str, str] = {}
    for digest, name in tomllib.loads(content.decode()).items():
        if _DIGEST.fullmatch(digest.lower()) is None:
            raise ValueError(f"{digest[:8]}…: is no SHA-256 in 64 hex digits")
        if not (isinstance(name, str) and name):
            raise ValueError(f"{digest[:8]}…: name its owner as a text")
        if digest.lower() in names:
            raise ValueError(f"{digest[:8]}…: is there twice")
        names[digest.lower()] = name
    return names


def digest_of(token: str) -> str | None:
    """Returns the digest by which a token is known; None: it is none."""
    return sha256(token.encode()).hexdigest() if 0 < len(token) <= _TOKEN_BYTES else None
