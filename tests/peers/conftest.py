"""Patience: on a busy machine whoever is kept waiting is not to be taken for dead or refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaywheel_replica.peers import accepting, dialling, options, peer

_PATIENCE_S = 600
_PINGS = options._BOTH, options.CHANNEL_OPTIONS


def _patient(given: options.Options) -> options.Options:
    patience = {"grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
    return [(name, _PATIENCE_S * 1_000 if name in patience else value) for name, value in given]


def _use(patch: pytest.MonkeyPatch, both: options.Options, channel: options.Options) -> None:
    patch.setattr(options, "_BOTH", both)
    patch.setattr(dialling, "CHANNEL_OPTIONS", channel)


@pytest.fixture(autouse=True, scope="module")
def _patience() -> Iterator[None]:
    """Nobody is found out by pings, and no refusal is over by itself."""
    with pytest.MonkeyPatch.context() as patch:
        _use(patch, *[_patient(given) for given in _PINGS])
        patch.setattr(accepting, "HELLO_S", _PATIENCE_S)
        patch.setattr(peer, "REFUSAL_FRESH_S", _PATIENCE_S)
        yield


@pytest.fixture
def pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not answer them is found out, as between real nodes."""
    _use(monkeypatch, *_PINGS)
