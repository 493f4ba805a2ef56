"""How gRPC is set up between nodes. Times in milliseconds, lengths in bytes.

A peer that hangs (stopped, or its machine is cut off) keeps its connections: pings find that out,
after `_PING_MS + _PING_TIMEOUT_MS` at most, and the streams break. Elections do not wait for that:
a leader is not heard any more when its beats stay away for a second.
"""

from typing import Final

Options = list[tuple[str, int]]

_LEAST_FRAME_BYTES: Final = 64 << 20
"""Room for frames of before, which were made with greater settings than today's."""

_BESIDE_FRAME_BYTES: Final = 16 << 20
"""What a message carries beside a frame's rows: topics, the wheel's card. No other message is as
long: many frames go in one as far as they are short, beats tell some bytes of each wheel."""

_ANSWER_BYTES: Final = 4 << 20
"""All that comes back on a stream: an identity or a refusal."""

_PING_MS: Final = 1_000
_PING_TIMEOUT_MS: Final = 2_000
_CONNECT_MS: Final = 1_000
_LEAST_PAUSE_MS: Final = 50
_MOST_PAUSE_MS: Final = 200

_BOTH: Final[Options] = [
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    # The one above does not shorten this one, whose default is a minute (seen with 1.85).
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Pings of the other side are never too many.
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
]


def server_options(frame_bytes: int) -> Options:
    """Of the server that peers reach.

    Whoever reaches the port can send a message of the greatest length before it says who it is, and
    it is held in memory: so that length follows from the settings, and is no more than it must be.

    Args:
        frame_bytes: the greatest frame that a node may make: `transaction_bytes`.
    """
    return [
        *_BOTH,
        (
            "grpc.max_receive_message_length",
            max(frame_bytes, _LEAST_FRAME_BYTES) + _BESIDE_FRAME_BYTES,
        ),
        # Or a server that was left behind would share the port with its successor.
        ("grpc.so_reuseport", 0),
    ]


CHANNEL_OPTIONS: Final[Options] = [
    *_BOTH,
    ("grpc.max_receive_message_length", _ANSWER_BYTES),
    # Peers are dialled, not what an operator's http_proxy names.
    ("grpc.enable_http_proxy", 0),
    # Each channel has a connection of its own: frames never stand before a beat.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", _LEAST_PAUSE_MS),
    ("grpc.max_reconnect_backoff_ms", _MOST_PAUSE_MS),
    # In spite of its name: how long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
    # A peer that comes back with another address is found: the default asks every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.service_config_disable_resolution", 1),
    # A stream that broke is opened anew by us, with a Hello.
    ("grpc.enable_retries", 0),
]
