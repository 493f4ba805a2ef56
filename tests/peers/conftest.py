"""Patience: on a busy machine whoever is kept waiting is not to be taken for dead or refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaywheel_replica.peers import accepting, dialling, peer, sockets

_PATIENCE_S = 600
_SILENCE_S, _UNTAKEN_MS = sockets.SILENCE_S, sockets._UNTAKEN_MS


@pytest.fixture(autouse=True, scope="module")
def _patience() -> Iterator[None]:
    """Nobody is found out by silence, and no refusal is over by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, "SILENCE_S", _PATIENCE_S)
        patch.setattr(sockets, "_UNTAKEN_MS", _PATIENCE_S * 1_000)
        patch.setattr(accepting, "HELLO_S", _PATIENCE_S)
        patch.setattr(dialling, "_ANSWER_S", _PATIENCE_S)
        patch.setattr(peer, "REFUSAL_FRESH_S", _PATIENCE_S)
        yield


@pytest.fixture
def pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is silent, or takes nothing, is found out, as between real nodes."""
    monkeypatch.setattr(sockets, "SILENCE_S", _SILENCE_S)
    monkeypatch.setattr(sockets, "_UNTAKEN_MS", _UNTAKEN_MS)
