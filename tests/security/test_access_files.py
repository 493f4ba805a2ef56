"""Files of grants and tokens: what is taken of them, and when. On real ports: test_grants.py."""

from __future__ import annotations

import errno
import os
import time
import tracemalloc
from hashlib import sha256
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.config import Config
from delaywheel_replica.patterns import Pattern
from delaywheel_replica.rights import Right
from delaywheel_replica.server.access.callers import Access
from delaywheel_replica.server.access.files import WatchedFile
from delaywheel_replica.server.access.grants import Grants
from delaywheel_replica.server.access.tokens import parse_tokens
from delaywheel_replica.server.node.refusals import RequestRefusedError
from delaywheel_replica.server.shown_certificate import shown_certificate
from support.peers.authority import Authority

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
who = ["token:shop-*"]
may = ["produce"]
topics = ["orders*"]
[[grant]]
who = ["token:shop-1"]
may = ["change"]
""")
    assert grants.rights_of("token:shop-2") is grants.rights_of("token:shop-3")
    assert grants.rights_of("token:shop-1").may(Right.CHANGE, "bills")
    assert not grants.rights_of("token:shop-2").may(Right.CHANGE, "bills")
    assert grants.rights_of("token:bakery").are_none


@pytest.mark.parametrize("has_grants", [False, True])
@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer t0ken"),)])
def test_who_shows_a_certificate_is_out_once_it_has_expired(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    metadata: tuple[tuple[str, str], ...],
    *,
    has_grants: bool,
) -> None:
    """On connections that are open, and where TLS took up an earlier one without a look."""
    authority = Authority(tmp_path, "callers")
    cert, _ = authority.sign("shop", "shop.example.org", days=1)
    grants, tokens = tmp_path / "grants.toml", tmp_path / "tokens.toml"
    for file in (grants, tokens):
        file.touch(0o600)
    grants.write_text('[[grant]]\nwho = ["*"]\nmay = ["produce"]\n')
    tokens.write_text(f'{sha256(b"t0ken").hexdigest()} = "shop"\n')
    access = Access(
        Config(
            cluster_id="c",
            node_id="n",
            data_dir=tmp_path,
            kafka={},
            tls_client_ca=authority.file,
            grants=grants if has_grants else None,
            tokens=tokens if has_grants else None,
        )
    )

    class Call:
        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return metadata

        def auth_context(self) -> dict[str, list[bytes]]:
            return {"x509_pem_cert": [cert.read_bytes()]}

    on_a_stream = access.admit("DelayProduceStream", Call())
    assert on_a_stream.rights.may(Right.PRODUCE, "orders")
    tomorrow_s = time.time() + 86_400
    monkeypatch.setattr(time, "time", lambda: tomorrow_s)
    with pytest.raises(RequestRefusedError, match="CERTIFICATE_EXPIRED"):
        access.admit("DelayProduce", Call())
    with pytest.raises(RequestRefusedError, match="CERTIFICATE_EXPIRED"):
        on_a_stream.rights.may(Right.PRODUCE, "orders")


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ({"dns": "shop.example.org", "uri": "spiffe://shop/a"}, "spiffe://shop/a"),
        ({"uri": "spiffe://shop/admin\0.evil"}, None),
        ({"uri": "spiffe://shop/admin\n"}, None),
        ({"uri": "spiffe://shop/" + "a" * 2_048}, None),
        ({"common_name": "spiffe://shop/admin"}, None),
        ({}, None),
    ],
)
def test_a_name_is_that_in_the_certificate_as_a_whole(
    tmp_path: Path, names: dict[str, str], shown: str | None
) -> None:
    """gRPC ends names at a U+0000: who was signed as `admin<NUL>.evil` came as `admin`."""
    cert, _ = Authority(tmp_path, "callers").sign_names("shop", **names)  # type: ignore[arg-type]
    certificate = shown_certificate({"x509_pem_cert": [cert.read_bytes()]})
    assert certificate is not None
    assert certificate.names.get("uri") == shown


def test_what_callers_show_beside_their_certificates_is_bounded_in_memory(tmp_path: Path) -> None:
    """A handshake takes 100 KB of certificates, and its caller chooses others each time."""
    cert, _ = Authority(tmp_path, "callers").sign("shop", "shop.example.org")
    leaf = cert.read_bytes()
    tracemalloc.start()
    try:
        for number in range(400):
            chain = b"#%03d" % number + bytes(100_000)
            shown = shown_certificate({"x509_pem_cert": [leaf], "x509_pem_cert_chain": [chain]})
            assert shown is not None
            assert shown.names["dns"] == "shop.example.org"
        assert tracemalloc.get_traced_memory()[0] < 20 << 20
    finally:
        tracemalloc.stop()


def test_a_kind_of_name_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    """Each call of its holder was a defect of the node."""
    cert, _ = Authority(tmp_path, "callers").sign_names("shop", common_name="shop", party=True)
    certificate = shown_certificate({"x509_pem_cert": [cert.read_bytes()]})
    assert certificate is not None
    assert certificate.expires_s > time.time()
    assert certificate.names == {}


def test_a_certificate_expires_with_those_that_have_signed_it(tmp_path: Path) -> None:
    """On an open connection that of an authority between counted for as long as its holder's."""
    authority = Authority(tmp_path, "callers")
    leaf, _ = authority.sign("shop", "shop.example.org", days=20)
    between, _ = authority.sign("between", "between", days=2)
    chain = {"x509_pem_cert_chain": [between.read_bytes()]}
    certificate = shown_certificate({"x509_pem_cert": [leaf.read_bytes()], **chain})
    assert certificate is not None
    assert certificate.expires_s < time.time() + 3 * 86_400


@pytest.mark.parametrize(
    "content", [b"-", b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----"]
)
def test_what_is_no_certificate_has_expired(content: bytes) -> None:
    assert shown_certificate({"x509_pem_cert": [content]}) == (-inf, {})


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


def test_a_file_without_grants_is_not_complete() -> None:
    """Who empties the file to write it again would deny everybody everything meanwhile."""
    for content in (b"", b'[[topic_quota]]\ntopics = ["*"]\npending_messages = 1\n'):
        with pytest.raises(ValueError, match="no \\[\\[grant\\]\\]"):
            Grants.parse(content)


@pytest.mark.parametrize(
    "metadata", [("authorization", "Bearer wrong"), ("dw-passed", "00")], ids=["token", "node"]
)
def test_who_shows_something_wrong_is_known_by_the_certificate(
    tmp_path: Path, metadata: tuple[str, str]
) -> None:
    """The audit log named nobody."""
    cert, _ = Authority(tmp_path, "callers").sign("shop", "shop.example.org")
    grants = tmp_path / "grants.toml"
    grants.touch(0o600)
    grants.write_text('[[grant]]\nwho = ["*"]\nmay = ["change"]\n')
    config = Config(cluster_id="c", node_id="n", data_dir=tmp_path, kafka={}, grants=grants)

    class Call:
        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return (metadata,)

        def auth_context(self) -> dict[str, list[bytes]]:
            return {"x509_pem_cert": [cert.read_bytes()]}

    with pytest.raises(RequestRefusedError) as refused:
        Access(config).admit("Cancel", Call())
    assert refused.value.refusal.principal == "dns:shop.example.org"


HALVES = """
[[grant]]
who = ["token:shop"]
may = ["produce"]

[[grant]]
who = ["token:shop"]
may = ["half"]
topics = ["orders*"]
groups = ["shop-*", "common"]
"""


def test_half_messages_are_granted_by_topic_and_group() -> None:
    rights = Grants.parse(HALVES.encode()).rights_of("token:shop")
    assert rights.may_begin("orders", "shop-1")
    assert rights.may_begin("orders.eu", "common")
    assert not rights.may_begin("orders", "payments")
    assert not rights.may_begin("bills", "shop-1")
    assert not Grants.parse(HALVES.encode()).rights_of("token:other").may_begin("orders", "common")


@pytest.mark.parametrize("given", ['may = ["half"]', 'may = ["produce"]\ngroups = ["*"]'])
def test_groups_go_with_the_right_for_halves(given: str) -> None:
    with pytest.raises(ValueError, match="grant 1: groups: of checkers, with the right 'half'"):
        Grants.parse(f'[[grant]]\nwho = ["*"]\n{given}\n'.encode())
