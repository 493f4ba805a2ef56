"""Opens the SDK's channels: their gRPC options and addresses.

gRPC's defaults do not suit this service: a reconnect backoff that grows to two minutes, an HTTP
proxy taken from the environment, subchannels (and their backoff) shared between clients, a limit of
4 MiB per message, and internal retries that would hide an unknown outcome.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

RECONNECT_BACKOFF_MS: Final = 200
CONNECT_TIMEOUT_MS: Final = 2_000
KEEPALIVE_TIME_MS: Final = 10_000
"""Keepalive interval while calls are open; servers must permit pings this often."""
KEEPALIVE_TIMEOUT_MS: Final = 5_000

CHANNEL_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    ("grpc.max_send_message_length", -1),  # the service's own limits refuse with a reason
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_MS // 4),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS),
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # how long one connect may take
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),  # the SDK retries, and knows what each attempt may have done
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
)

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:,/]+):(?P<port>[0-9]{1,5})")
_WILDCARDS: Final = frozenset({"0.0.0.0", "[::]"})  # noqa: S104  nothing is bound to them


def parse_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Parses `"host:port,host:port"`, or a sequence of `"host:port"`; removes duplicates.

    Example:
        >>> parse_addresses("a:7420, b:7420")
        ('a:7420', 'b:7420')

    Raises:
        TypeError: It is neither a text nor a sequence of texts.
        ValueError: There is none, or one is not `host:port` (IPv6: `[::1]:7420`).
    """
    listed = addresses.split(",") if isinstance(addresses, str) else addresses
    if not isinstance(listed, Sequence) or not all(isinstance(one, str) for one in listed):
        raise TypeError(f"addresses {addresses!r}: 'host:port,host:port', or a sequence of texts")
    cleaned = tuple(dict.fromkeys(address.strip() for address in listed))
    for address in cleaned:
        if not _is_address(address):
            raise ValueError(f"address {address!r}: not host:port, such as delay-1:7420")
    if not cleaned:
        raise ValueError("no address: give at least one host:port")
    return cleaned


def leads_elsewhere(address: str) -> bool:
    """Whether an address that a node advertises is usable on another machine.

    Example:
        >>> leads_elsewhere("10.0.0.7:7420"), leads_elsewhere("0.0.0.0:7420")
        (True, False)
    """
    return _is_address(address) and address.rpartition(":")[0] not in _WILDCARDS


def _is_address(text: str) -> bool:
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match["port"]) < 65_536
