"""Files of grants and tokens: what is taken of them, and when. On real ports: test_grants.py."""

from __future__ import annotations

import errno
import os
import time
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.patterns import Pattern
from delaywheel_replica.server.access.files import WatchedFile
from delaywheel_replica.server.access.grants import Grants
from delaywheel_replica.server.access.rights import Right
from delaywheel_replica.server.access.tokens import parse_tokens

_PIECES = st.text("ab.\n", max_size=4)


@given(st.lists(_PIECES, min_size=1, max_size=5), st.text("ab.\n", max_size=12))
def test_a_pattern_fits_what_its_pieces_say(pieces: list[str], name: str) -> None:
    def stands_for(rest: list[str], left: str) -> bool:
        """Whether the pieces, each behind any characters, make up what is left."""
        if not rest:
            return not left
        return any(
            left[at:].startswith(rest[0]) and stands_for(rest[1:], left[at + len(rest[0]) :])
            for at in range(len(left) + 1)
        )

    first, *others = pieces
    expected = name.startswith(first) and stands_for(others, name[len(first) :])
    assert Pattern("*".join(pieces)).fits(name) == expected


def test_no_name_makes_a_pattern_slow() -> None:
    """A caller's: as a regular expression this one took minutes, on the thread that answers."""
    began_s = time.process_time()
    assert not Pattern("*a*a*a*a*a*b").fits("a" * 249)
    assert not Pattern("*.orders.*.eu.*.x").fits(".orders.eu." * 10_000)
    assert time.process_time() - began_s < 10


def test_principals_with_the_same_grants_share_what_is_known_of_topics() -> None:
    """Millions of names, each with thousands of topics, would fill the memory."""
    grants = Grants.parse(b"""
[[grant]]
who = ["shop-*"]
may = ["produce"]
topics = ["orders*"]
[[grant]]
who = ["shop-1"]
may = ["change"]
""")
    assert grants.rights_of("shop-2") is grants.rights_of("shop-3")
    assert grants.rights_of("shop-1").may(Right.CHANGE, "bills")
    assert not grants.rights_of("shop-2").may(Right.CHANGE, "bills")
    assert grants.rights_of("bakery").are_none


def test_a_token_has_one_owner() -> None:
    digest = sha256(b"t").hexdigest()
    with pytest.raises(ValueError, match="is there twice"):
        parse_tokens(f'{digest} = "a"\n{digest.upper()} = "b"\n'.encode())


def test_a_file_that_could_not_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not change any more: it was refused for good where descriptors were used up."""
    now_s = 0.0
    monkeypatch.setattr("delaywheel.client.exchange.channel.monotonic", lambda: now_s)
    path = tmp_path / "grants.toml"
    path.touch(0o600)
    file = WatchedFile("grants", path, bytes.decode)
    path.write_text("after")
    os.utime(path, (1, 1))
    with monkeypatch.context() as used_up:

        def fails(*_: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        used_up.setattr(Path, "open", fails)
        for _ in range(3):
            now_s += 2
            assert file.current == ""
        assert file.refused == f"grants {path}: too many open files"
    now_s += 2
    assert file.current == "after"
    assert not file.refused
