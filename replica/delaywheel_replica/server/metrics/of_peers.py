"""Metrics of replication: what this node and the other members hold."""

from collections.abc import Callable

from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.peers.states import Connection, Counters, PeerState
from delaywheel_replica.server.metrics.metric import (
    Spec,
    Values,
    by_label,
    counter,
    counters,
    gauge,
    gauges,
)
from delaywheel_replica.server.metrics.scrape import Scrape
from delaywheel_replica.server.node.node_view import missing_frames


def _wheels(scrape: Scrape) -> Values:
    if scrape.server is None:
        return []
    heartbeat = scrape.server.heartbeat
    own = [wheel for wheel in heartbeat.wheels if wheel.node == heartbeat.node]
    return [
        (("open",), float(heartbeat.open is not None)),
        (("spare",), float(heartbeat.spare is not None)),
        (("left",), len([wheel for wheel in own if wheel not in heartbeat.named])),
        (("mirror",), len(heartbeat.wheels) - len(own)),
    ]


def _peer_lags(scrape: Scrape) -> Values:
    """Returns how far each peer lags behind this node's open wheel."""
    reported, server = scrape.own_open, scrape.server
    if reported is None or server is None or server.heartbeat.open is None:
        return []
    lags = {}
    for peer, known in server.peers.items():
        theirs = known.heartbeat.wheels.get(server.heartbeat.open)
        lags[peer] = reported.applied - (
            0 if theirs is None else min(theirs.prefix, reported.applied)
        )
    return by_label(lags)


def _mirror_lags(scrape: Scrape) -> Values:
    """Returns how far this node lags behind each peer's open wheel."""
    server = scrape.server
    if server is None:
        return []
    return by_label(
        {peer: _behind(server.heartbeat, known.heartbeat) for peer, known in server.peers.items()}
    )


def _behind(own: Heartbeat, theirs: Heartbeat) -> float | None:
    if theirs.open is None or theirs.open not in theirs.wheels:
        return None
    mirror = own.wheels.get(theirs.open)
    return max(0, theirs.wheels[theirs.open].applied - (0 if mirror is None else mirror.prefix))


def _heard_ages(scrape: Scrape) -> Values:
    if scrape.server is None:
        return []
    return by_label(
        {
            peer: None
            if known.heard_ms is None
            else max(0, scrape.monotonic_ms - known.heard_ms) / 1e3
            for peer, known in scrape.server.peers.items()
        }
    )


def _of_each(value: Callable[[PeerState], float]) -> Callable[[Scrape], Values]:
    """Returns a value of the connection to each peer."""
    return lambda s: by_label({peer: value(state) for peer, state in s.peers.items()})


def _traffic(name: str, text: str, count: Callable[[Counters], int]) -> Spec:
    return counters(name, text, ("peer",), _of_each(lambda state: count(state.counters)))


PEER_METRICS: tuple[Spec, ...] = (
    gauges(
        "wheels",
        "Wheels with files here: own ones open, spare or left, and mirrors.",
        ("role",),
        _wheels,
    ),
    gauge(
        "high_watermark_lag_frames",
        "Frames of the open wheel that too few members are known to hold.",
        lambda s: None if (o := s.own_open) is None else o.applied - o.high_watermark,
    ),
    gauge(
        "missing_frames",
        "Frames that should be here and cannot be read; of many gaps, also what lies between.",
        lambda s: None if s.server is None else missing_frames(s.server.heartbeat),
    ),
    gauge("members", "Nodes of the cluster.", lambda s: len(s.sources.config.members)),
    gauge(
        "min_in_sync_members",
        "How many members must hold a message before it is acknowledged.",
        lambda s: s.sources.config.min_insync_members,
    ),
    gauge(
        "in_sync_members",
        "Members in sync with the open wheel, this node included.",
        lambda s: len(s.sources.view.in_sync()) or None,
    ),
    counter(
        "in_sync_changes",
        "Times that the set of them changed, as seen five times a second.",
        lambda s: s.sources.pulse.in_sync_changes,
    ),
    gauges(
        "peer_lag_frames",
        "Frames of this node's open wheel that a peer does not hold, as it said last.",
        ("peer",),
        _peer_lags,
    ),
    gauges(
        "mirror_lag_frames",
        "Frames of a peer's open wheel that this node does not hold.",
        ("peer",),
        _mirror_lags,
    ),
    gauges("peer_heard_age_seconds", "How long ago a peer was heard.", ("peer",), _heard_ages),
    gauges(
        "peer_connected",
        "1 while all streams to and from a peer are up, else 0.",
        ("peer",),
        _of_each(lambda state: state.connection is Connection.CONNECTED),
    ),
    gauges(
        "peer_refused",
        "1 for the reason for which one of the two nodes refuses the other.",
        ("peer", "reason"),
        lambda s: [
            ((peer, state.refusal.reason.value), 1)
            for peer, state in s.peers.items()
            if state.refusal is not None
        ],
    ),
    gauges(
        "peer_settings_differ",
        "1 while `members` or `min_insync` of a peer are not this node's.",
        ("peer",),
        _of_each(lambda state: state.rolling is not None),
    ),
    _traffic("peer_sent_messages", "Messages sent to a peer.", lambda c: c.sent),
    _traffic("peer_sent_bytes", "Bytes of them.", lambda c: c.sent_bytes),
    _traffic("peer_received_messages", "Messages received from a peer.", lambda c: c.received),
    _traffic("peer_received_bytes", "Bytes of them.", lambda c: c.received_bytes),
    _traffic(
        "peer_dropped_messages",
        "Messages not sent: no connection, or a full queue; what counts is sent again.",
        lambda c: c.dropped,
    ),
    _traffic(
        "peer_malformed_messages",
        "Messages of a peer that are unreadable or impossible; each closed its connection.",
        lambda c: c.malformed,
    ),
    counter(
        "implausible_beats",
        "Heartbeats that one peer relayed of another, and that cannot have been its own.",
        lambda s: None if s.server is None else s.server.implausible_heartbeats,
    ),
    _traffic("peer_breaks", "Times that the connection to a peer broke.", lambda c: c.breaks),
)
