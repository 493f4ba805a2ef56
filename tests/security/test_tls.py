"""A node's TLS on real ports: who gets in, and files that change while callers are there."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from delaywheel import Client, Tls
from delaywheel.client.exchange.channel import tls_fault
from delaywheel.errors import RefusedError, TimedOutError
from delaywheel_replica.server.access.faults import certificate_faults
from delaywheel_replica.server.certificates import (
    CertificateError,
    Certificates,
    NodeCertificates,
)
from local.loopback.kafka import free_ports
from support.peers.authority import Authority
from support.server.server_process import ServerProcess, config_for
from support.services.waiting import wait_to_be_told, wait_until

HANDLE = "n1.1:1800000000:" + 32 * "0" + ":orders"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("good"), "good")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "other")


def tls_settings(good: Authority, *, wants_certificates: bool = True) -> dict[str, str]:
    cert, key = good.sign("node", "127.0.0.1", "localhost")
    asked = {"tls_client_ca": str(good.file)} if wants_certificates else {}
    return {"tls_cert": str(cert), "tls_key": str(key), **asked}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, good: Authority) -> Iterator[ServerProcess]:
    """A node that wants certificates of its callers."""
    data = tmp_path_factory.mktemp("tls") / "n1"
    with ServerProcess(data, **tls_settings(good)) as running:
        yield running


def outcome_for(
    node: ServerProcess, tls: Tls | None, host: str = "127.0.0.1", *, timeout_s: float = 1.5
) -> str:
    """Makes a call; returns "in", or why the client was kept out."""
    assert node.address is not None
    address = node.address.replace("127.0.0.1", host)
    with Client(address, tls=tls, timeout=timeout_s) as client:
        try:
            client.cancel(HANDLE)
        except TimedOutError as error:
            return str(error)
        except RefusedError as error:
            return f"in: {error}"
    return "in"


def assert_kept_out(
    why: str, node: ServerProcess, tls: Tls | None, host: str = "127.0.0.1"
) -> None:
    """A call ends with its time-out, so a short one comes first; a busy machine may need more."""
    told = outcome_for(node, tls, host)
    assert why in told or why in outcome_for(node, tls, host, timeout_s=30), told


def test_a_caller_with_a_certificate_gets_in(node: ServerProcess, good: Authority) -> None:
    cert, key = good.sign("shop", "shop@example.org")
    assert outcome_for(node, Tls(good.file, cert, key), timeout_s=30).startswith("in")


def test_who_is_kept_out_is_told_why(
    node: ServerProcess, good: Authority, other: Authority
) -> None:
    cert, key = good.sign("shop", "shop@example.org")
    others = Tls(good.file, *other.sign("shop", "shop@example.org"))
    expired = Tls(good.file, *good.sign("old", "old@example.org", days=-1))
    assert_kept_out("the node wants TLS", node, None)
    assert_kept_out("the node wants a certificate", node, Tls(good.file))
    assert_kept_out("does not accept this program's certificate", node, others)
    assert_kept_out("it has expired", node, expired)
    assert_kept_out("signed by nobody whom tls.ca names", node, Tls(other.file, cert, key))
    assert_kept_out("by no public authority: give tls.ca", node, Tls())


def test_files_that_somebody_is_writing_only_fail_the_attempt(
    node: ServerProcess, good: Authority, other: Authority
) -> None:
    """Looking for what keeps it out, the client reads them: that raised what no caller expects."""
    cert, key = other.sign("writing", "shop@example.org")
    assert node.address is not None
    with Client(node.address, tls=Tls(good.file, cert, key), timeout=1) as client:
        key.write_text("-----BEGIN")
        wait_to_be_told(r"not in order now: tls.cert .*writing", lambda: client.cancel(HANDLE))


def test_a_name_that_the_certificate_lacks_is_told(good: Authority, tmp_path: Path) -> None:
    cert, key = good.sign("elsewhere", "elsewhere.example.org")
    with ServerProcess(tmp_path / "n1", tls_cert=str(cert), tls_key=str(key)) as node:
        assert_kept_out("not for 127.0.0.1", node, Tls(good.file))


def test_a_host_that_refuses_on_one_of_its_addresses_is_told_what_is_wrong_on_the_other(
    node: ServerProcess, other: Authority
) -> None:
    """The node listens at 127.0.0.1, not at ::1, which localhost is as well."""
    for _ in range(3):  # gRPC's own words are those of either
        assert_kept_out("the node wants TLS", node, None, "localhost")
        assert_kept_out("signed by nobody", node, Tls(other.file), "localhost")


def test_an_address_of_a_family_that_the_machine_lacks_is_passed_over(
    node: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of IPv6 addresses, say, where the kernel was started without."""
    assert node.address is not None
    real, no_family = socket.getaddrinfo, 9_999
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *given, **named: (
            [(no_family, *rest) for _, *rest in real(*given, **named)] + real(*given, **named)
        ),
    )
    assert "the node wants TLS" in (tls_fault(node.address, None, 30) or "")


def test_a_socket_that_cannot_speak_tls_is_closed(
    good: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate cannot be compared with a host that has no name."""
    made: list[socket.socket] = []

    class Noted(socket.socket):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    loopback = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: loopback)
    monkeypatch.setattr(socket, "socket", Noted)
    assert tls_fault(":1", Tls(good.file), 30) is None
    assert [one.fileno() for one in made] == [-1]


def test_a_plain_port_is_told(good: Authority, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "n1") as node:
        assert_kept_out("does not speak TLS", node, Tls(good.file))


def test_renewed_files_are_shown_to_new_callers_and_the_old_stay_connected(
    good: Authority, other: Authority, tmp_path: Path
) -> None:
    cert, key, ca = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"

    def put(authority: Authority) -> None:
        """Replaces the files one after the other: for a moment they do not fit."""
        for path, new in zip((cert, key), authority.sign("n", "127.0.0.1"), strict=True):
            half = path.with_suffix(".half")
            half.touch(0o600)
            half.write_bytes(new.read_bytes())
            os.replace(half, path)  # noqa: PTH105 - the same on all systems
            time.sleep(0.01)
        ca.write_bytes(authority.file.read_bytes())

    put(good)
    with ServerProcess(tmp_path / "n1", tls_cert=str(cert), tls_key=str(key)) as node:
        assert node.address is not None
        with Client(node.address, tls=Tls(good.file), timeout=60) as before:
            before.get(HANDLE)
            put(other)
            wait_until(
                "the new certificate is shown",
                lambda: outcome_for(node, Tls(other.file)).startswith("in"),
            )
            assert_kept_out("signed by nobody", node, Tls(good.file))
            cert.write_text("half")
            time.sleep(1.1)  # so often the files are looked at
            assert outcome_for(node, Tls(other.file), timeout_s=30).startswith("in")
            assert before.get(HANDLE) is None, "its connection goes on"


def test_who_was_revoked_makes_no_new_connection(
    good: Authority, other: Authority, tmp_path: Path
) -> None:
    """The connections that are there last for an hour at most: see SECURITY."""
    callers = tmp_path / "callers.pem"
    callers.write_bytes(good.file.read_bytes())
    cert, key = good.sign("node", "127.0.0.1")
    settings = {"tls_cert": cert, "tls_key": key, "tls_client_ca": callers, "tls_ca": good.file}
    mine = Tls(good.file, *good.sign("shop", "shop@example.org"))
    theirs = Tls(good.file, *other.sign("shop", "shop@example.org"))
    with ServerProcess(tmp_path / "n1", **{k: str(v) for k, v in settings.items()}) as node:
        assert outcome_for(node, mine, timeout_s=30).startswith("in")
        callers.write_bytes(other.file.read_bytes())
        wait_until("the other authority counts", lambda: outcome_for(node, theirs)[:2] == "in")
        assert_kept_out("does not accept this program's certificate", node, mine)


def test_a_client_takes_renewed_files(good: Authority, other: Authority, tmp_path: Path) -> None:
    """What it shows, and whom it trusts, may both change while it lives."""
    cert, key, ca = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    node_files = other.sign("node", "127.0.0.1")
    ca.write_bytes(good.file.read_bytes())
    for path, new in zip((cert, key), good.sign("c", "c@example.org"), strict=True):
        path.write_bytes(new.read_bytes())
    key.chmod(0o600)
    settings = dict(zip(("tls_cert", "tls_key"), map(str, node_files), strict=True))
    with ServerProcess(tmp_path / "n1", **settings, tls_client_ca=str(other.file)) as node:
        assert node.address is not None
        with Client(node.address, tls=Tls(ca, cert, key), timeout=1) as client:
            wait_to_be_told("signed by nobody", lambda: client.cancel(HANDLE))
            ca.write_bytes(other.file.read_bytes())
            for path, new in zip((cert, key), other.sign("c", "c@example.org"), strict=True):
                path.write_bytes(new.read_bytes())

            def gets_in() -> bool:
                try:
                    client.cancel(HANDLE)
                except TimedOutError:
                    return False
                except RefusedError:
                    pass
                return True

            wait_until("the new files are taken", gets_in)


def test_metrics_over_tls_show_a_renewed_certificate(
    good: Authority, other: Authority, tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    (port,) = free_ports(1)

    def put(authority: Authority) -> None:
        key.touch(0o600)
        for path, new in zip((cert, key), authority.sign("m", "127.0.0.1"), strict=True):
            path.write_bytes(new.read_bytes())

    def healthy(authority: Authority) -> bool:
        context = ssl.create_default_context(cafile=authority.file)
        try:
            with urlopen(f"https://127.0.0.1:{port}/healthz", context=context) as answer:
                return bool(answer.read() == b"ok\n")
        except URLError:
            return False

    put(good)
    files = {"tls_cert": str(cert), "tls_key": str(key)}
    listen = f"127.0.0.1:{port}"
    with ServerProcess(tmp_path / "n1", **files, metrics_listen=listen, metrics_tls="true"):
        wait_until("it answers", lambda: healthy(good))
        assert not healthy(other)
        put(other)
        wait_until("the new certificate is shown", lambda: healthy(other))
        assert not healthy(good)


def test_refused_files_are_named(good: Authority, tmp_path: Path) -> None:
    def faults(**settings: object) -> str:
        flags = {name: str(value) for name, value in settings.items()}
        config = config_for(tmp_path, **flags)
        return "; ".join(fault.text for fault in certificate_faults(config))

    cert, key = good.sign("node", "localhost")
    expired, its_key = good.sign("expired", "localhost", days=-1)
    early, early_key = good.sign("early", "localhost", days=90)
    junk = tmp_path / "junk.pem"
    junk.write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    junk.chmod(0o600)
    assert faults(tls_cert=cert, tls_key=key, tls_client_ca=good.file) == ""
    assert "both, or neither" in faults(tls_cert=cert)
    assert "needs tls_cert" in faults(metrics_tls="true")
    assert "no meaning without" in faults(tls_client_ca=good.file)
    assert "no such file" in faults(tls_cert=tmp_path / "none.pem", tls_key=key)
    assert "no certificate in PEM form" in faults(tls_cert=junk, tls_key=key)
    assert "no private key" in faults(tls_cert=cert, tls_key=junk)
    assert "not the key of the certificate" in faults(tls_cert=cert, tls_key=its_key)
    assert "expired" in faults(tls_cert=expired, tls_key=its_key)
    assert "not valid before" in faults(tls_cert=early, tls_key=early_key)
    assert f"tls_client_ca {junk}" in faults(tls_cert=cert, tls_key=key, tls_client_ca=junk)


def test_keys_that_nobody_could_connect_with_are_refused(tmp_path: Path) -> None:
    """gRPC offers none of these; a node began to listen, and no caller ever got in."""
    kinds = {
        "Ed25519": ("ed25519",),
        "secp521r1": ("ec", "-pkeyopt", "ec_paramgen_curve:P-521"),
        "RSA with 1024 bits": ("rsa:1024",),
    }
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for kind, options in kinds.items():
        files = ("-keyout", str(key), "-out", str(cert))
        request = ("openssl", "req", "-x509", "-nodes", "-subj", "/CN=n", "-newkey", *options)
        subprocess.run((*request, *files), check=True, capture_output=True)
        config = config_for(tmp_path, tls_cert=str(cert), tls_key=str(key))
        with pytest.raises(CertificateError, match=f"its key is {kind}"):
            Certificates.read(config, time.time())


def test_a_key_that_no_library_knows_leaves_the_earlier_pair(renewed: Renewed) -> None:
    """It ended the process, and soon the node: also that of each node that was given the pair."""
    certificates = renewed.certificates
    first = certificates.current
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:secp112r1")
    files = ("-keyout", str(renewed.key), "-out", str(renewed.cert))
    request = ("openssl", "req", "-x509", "-nodes", "-subj", "/CN=n", *curve)
    subprocess.run((*request, *files), check=True, capture_output=True)
    renewed.now_s += 2
    assert certificates.current is first
    assert "not supported" in (certificates.refused or "")


def test_comments_in_a_file_of_authorities_may_be_in_any_encoding(renewed: Renewed) -> None:
    ca = renewed.config.tls_ca
    assert ca is not None
    ca.write_bytes("# München\n".encode("latin-1") + "# Köln\n".encode() + ca.read_bytes())
    renewed.now_s += 2
    assert renewed.certificates.peer_context(is_dialled=True).cert_store_stats()["x509_ca"] == 1
    assert renewed.certificates.refused is None


def test_a_key_that_everybody_may_use_is_refused(good: Authority, tmp_path: Path) -> None:
    cert, key = good.sign("open", "localhost")
    key.chmod(0o644)
    config = config_for(tmp_path, tls_cert=str(cert), tls_key=str(key))
    with pytest.raises(CertificateError, match="chmod o="):
        Certificates.read(config, time.time())


class Renewed:
    """A node's files, and the clock by which they are looked at."""

    def __init__(self, authority: Authority, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        self.now_s, self.began_s = 0.0, time.time()
        self._authority = authority
        module = "delaywheel.client.exchange.channel"
        monkeypatch.setattr(f"{module}.monotonic", lambda: self.now_s)
        monkeypatch.setattr(f"{module}.time", lambda: self.began_s + self.now_s)
        self.put(20)
        ca = str(authority.file)
        self.config = config_for(folder, tls_cert=str(self.cert), tls_key=str(self.key), tls_ca=ca)
        self.certificates = NodeCertificates(self.config)

    def put(self, days: float) -> None:
        """Replaces both by a pair that expires then."""
        self.key.touch(0o600)
        signed = self._authority.sign("n", "localhost", days=days)
        for path, new in zip((self.cert, self.key), signed, strict=True):
            path.write_bytes(new.read_bytes())


@pytest.fixture
def renewed(good: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Renewed:
    return Renewed(good, tmp_path, monkeypatch)


def test_files_that_are_not_in_order_later_leave_the_earlier_ones(renewed: Renewed) -> None:
    certificates = renewed.certificates
    first = certificates.current
    assert first == Certificates.read(renewed.config, time.time())
    renewed.put(-1)
    renewed.now_s += 2
    assert certificates.current is first
    assert "expired" in (certificates.refused or "")
    renewed.put(25)
    assert certificates.current is first, "looked at once a second"
    renewed.now_s += 2
    assert certificates.current.not_after_s > first.not_after_s
    assert certificates.refused is None
    renewed.key.unlink()
    with pytest.raises(CertificateError, match="no such file"):
        NodeCertificates(renewed.config)


def test_files_that_are_just_being_written_are_looked_at_a_little_later(renewed: Renewed) -> None:
    """What is written in place is empty for a moment, and may fit the other file or not."""
    first = renewed.certificates.current
    renewed.now_s = 2.0
    renewed.put(25)
    os.utime(renewed.cert, (renewed.began_s + 1.99,) * 2)
    assert renewed.certificates.current is first
    renewed.now_s += 0.15
    assert renewed.certificates.current is not first


def test_a_certificate_that_is_not_valid_yet_is_taken_once_it_is(
    renewed: Renewed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files do not change any more: it was refused for good, until the old one expired."""
    certificates = renewed.certificates
    first, passed_s = certificates.current, 0.0
    clock = SimpleNamespace(
        time=lambda: time.time() + passed_s, gmtime=time.gmtime, strftime=time.strftime
    )
    monkeypatch.setattr("delaywheel_replica.server.certificates.time", clock)
    renewed.put(60 + 1e-3)
    for _ in range(3):
        renewed.now_s += 2
        assert certificates.current is first
    assert "not valid before" in (certificates.refused or "")
    passed_s = 200.0
    renewed.now_s += 2
    assert certificates.current is not first
    assert certificates.refused is None


def test_a_pair_that_is_refused_is_shown_nowhere(renewed: Renewed) -> None:
    """Python's TLS takes files: for a connection between nodes it read the ones just refused."""
    first = renewed.certificates.current
    renewed.put(-1)
    renewed.now_s += 2
    context = renewed.certificates.peer_context(is_dialled=True)
    assert renewed.certificates.refused
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    shown.check_hostname, shown.verify_mode = False, ssl.CERT_NONE
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(context.wrap_socket, ours, server_side=True)
        with suppress(ssl.SSLError), shown.wrap_socket(theirs) as line:
            certificate = line.getpeercert(binary_form=True)
        (expected, *_) = x509.load_pem_x509_certificates(first.chain)
        assert certificate == expected.public_bytes(serialization.Encoding.DER)
        accepting.exception(timeout=30)
