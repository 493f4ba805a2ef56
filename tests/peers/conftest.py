"""Patience: on a busy machine a waiting peer must not be taken for dead or refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaywheel_replica.peers import accepting, dialling, peer, sockets

_PATIENCE_S = 600
_SILENCE_S, _UNTAKEN_MS = sockets.SILENCE_S, sockets._UNTAKEN_MS


@pytest.fixture(autouse=True, scope="module")
def _patience() -> Iterator[None]:
    """Silence reveals no peer, and no refusal ends on its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, "SILENCE_S", _PATIENCE_S)
        patch.setattr(sockets, "_UNTAKEN_MS", _PATIENCE_S * 1_000)
        patch.setattr(accepting, "HELLO_S", _PATIENCE_S)
        patch.setattr(dialling, "_ANSWER_S", _PATIENCE_S)
        patch.setattr(peer, "REFUSAL_FRESH_S", _PATIENCE_S)
        yield


@pytest.fixture
def pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that are silent, or take nothing, are detected, as between real nodes."""
    monkeypatch.setattr(sockets, "SILENCE_S", _SILENCE_S)
    monkeypatch.setattr(sockets, "_UNTAKEN_MS", _UNTAKEN_MS)
