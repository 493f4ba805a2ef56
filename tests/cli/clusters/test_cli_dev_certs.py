"""`delaywheel init --dev-certs`: nodes and one caller have certificates, and nobody else can."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from local.loopback.kafka import KafkaBroker, free_ports
from local.loopback.node import Node
from support.clients.command import Command, Ended
from support.clients.page_user import OF_THE_PAGE
from support.kafka.read_committed import create_topic, read_all
from support.services.waiting import wait_until

SECURITY = Path(__file__).parents[3] / "docs" / "SECURITY.md"
HOSTS = {"n1": "127.0.0.1", "n2": "127.0.0.2", "n3": "127.0.0.3"}
NODES = ",".join(f"{node}={host}" for node, host in HOSTS.items())


@pytest.fixture(autouse=True)
def nothing_is_asked_of_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not there is waited for, for five seconds."""
    monkeypatch.setattr("delaywheel_replica.cli.doing.init.command.kafka_items", lambda *_: ())


def written(command: Command, out: Path, nodes: str, *others: str) -> Ended:
    asked = ("--kafka", "127.0.0.1:1", "--cluster", "shop", "--nodes", nodes)
    return command("init", *asked, "--dev-certs", "--out", str(out), *others)


def certificate(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def names(file: Path) -> list[object]:
    named = certificate(file).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [name.value for name in named.value]


@pytest.mark.parametrize("nodes", ["n1", NODES])
def test_the_settings_are_in_order_as_they_are(
    nodes: str, command: Command, tmp_path: Path
) -> None:
    assert written(command, tmp_path / "shop", nodes).code == 0
    for node in (pair.partition("=")[0] for pair in nodes.split(",")):
        file = tmp_path / "shop" / node / "node.toml"
        checked = command("config", "check", "--config", str(file))
        assert checked.out == f"settings in order: node {node} of cluster shop\n"
        settings = tomllib.loads(file.read_text())
        assert "insecure" not in settings
        assert settings["tls_client_ca"]


def test_each_certificate_names_its_holder(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "shop"
    assert written(command, out, "delay-1,n2=10.0.0.2,n3=[fd00::3]").code == 0
    assert names(out / "delay-1/tls/tls.crt") == ["delay-1"]
    assert names(out / "n2/tls/tls.crt") == [ip_address("10.0.0.2")]
    assert names(out / "n3/tls/tls.crt") == [ip_address("fd00::3")]
    assert names(out / "operator.tls/tls.crt") == ["operator"]


def test_they_end_after_thirty_days(command: Command, tmp_path: Path) -> None:
    ended = written(command, tmp_path, "n1")
    ends = {certificate(file).not_valid_after_utc for file in tmp_path.rglob("*.crt")}
    (until,) = ends
    assert timedelta(0) <= datetime.now(UTC) + timedelta(days=30) - until < timedelta(minutes=5)
    assert f"for development only, until {until:%Y-%m-%d %H:%M} UTC" in ended.out


def test_one_authority_has_signed_them_whose_key_is_not_there(
    command: Command, tmp_path: Path
) -> None:
    assert written(command, tmp_path, NODES).code == 0
    (authority,) = {certificate(file) for file in tmp_path.rglob("ca.crt")}
    keys = [load_pem_private_key(file.read_bytes(), None) for file in tmp_path.rglob("*.key")]
    signed = [certificate(file) for file in tmp_path.rglob("tls.crt")]
    assert len(keys) == len(signed) == 4
    for each in signed:
        each.verify_directly_issued_by(authority)
    assert authority.public_key() not in [key.public_key() for key in keys]


@pytest.mark.parametrize("purpose", ["sslserver", "sslclient"])
def test_they_are_as_the_strictest_clients_want_them(
    purpose: str, command: Command, tmp_path: Path
) -> None:
    """As Python's from 3.13 on, by default."""
    assert written(command, tmp_path, "n1=[::1]").code == 0
    folder = tmp_path / "n1/tls"
    asked = ("openssl", "verify", "-x509_strict", "-purpose", purpose, "-verify_ip", "::1")
    files = ("-CAfile", str(folder / "ca.crt"), str(folder / "tls.crt"))
    ended = subprocess.run([*asked, *files], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_one_of_another_authority_is_said_to_be_anothers(command: Command, tmp_path: Path) -> None:
    """Not to be forged, though both authorities have one name."""
    for cluster in ("a", "b"):
        assert written(command, tmp_path / cluster, "n1").code == 0
    ended = subprocess.run(
        [
            "openssl",
            "verify",
            "-CAfile",
            tmp_path / "a/n1/tls/ca.crt",
            tmp_path / "b/n1/tls/tls.crt",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "unable to get local issuer certificate" in ended.stderr


def test_their_owner_alone_may_read_keys_and_rights(command: Command, tmp_path: Path) -> None:
    assert written(command, tmp_path, NODES).code == 0
    for pattern in ("*.key", "grants.toml", "profiles.toml", "tokens.toml", "operator.token"):
        found = [*tmp_path.rglob(pattern)]
        assert found
        assert {stat.S_IMODE(file.stat().st_mode) for file in found} == {0o600}


def test_each_node_knows_the_token_of_the_page_and_each_trial_has_another(
    command: Command, tmp_path: Path
) -> None:
    tokens = set()
    for folder in ("shop", "other"):
        ended = written(command, tmp_path / folder, NODES)
        file = tmp_path / folder / "operator.token"
        assert f"the token in {file}\n" in ended.out
        token = file.read_text().strip()
        tokens.add(token)
        for node in HOSTS:
            known = tomllib.loads((tmp_path / folder / node / "tokens.toml").read_text())
            assert known == {sha256(token.encode()).hexdigest(): "operator"}
    assert len(tokens) == 2


def test_no_node_has_the_name_of_the_caller(command: Command, tmp_path: Path) -> None:
    """Its certificate would be the caller's, who may do more."""
    for nodes in ("operator", "n1=operator"):
        ended = written(command, tmp_path / "shop", nodes)
        assert ended.code == 2
        assert "operator is the name of the caller" in ended.err
        assert not (tmp_path / "shop").exists()
    assert written(command, tmp_path / "shop", "operator=10.0.0.1").code == 0


def test_their_owner_alone_may_exchange_them(command: Command, tmp_path: Path) -> None:
    """Whatever files may be made by everybody with the umask of here."""
    assert written(command, tmp_path / "shop", "n1").code == 0
    assert stat.S_IMODE((tmp_path / "shop").stat().st_mode) == 0o700


def test_they_are_renewed_as_the_docs_say(command: Command, tmp_path: Path) -> None:
    for folder in ("shop", "renewed"):
        assert written(command, tmp_path / folder, NODES).code == 0
    line = next(line for line in SECURITY.read_text().splitlines() if "cp renewed" in line)
    subprocess.run(["bash", "-e", "-c", line], cwd=tmp_path, check=True)
    for folder in ("n1/tls", "n2/tls", "n3/tls", "operator.tls"):
        for file in (tmp_path / "renewed" / folder).iterdir():
            assert (tmp_path / "shop" / folder / file.name).read_bytes() == file.read_bytes()


def test_a_unit_has_no_certificates_for_development(command: Command, tmp_path: Path) -> None:
    ended = written(command, tmp_path / "shop", "n1", "--systemd")
    assert ended.code == 2
    assert "--dev-certs with --systemd: " in ended.err
    assert not (tmp_path / "shop").exists()


@pytest.mark.kafka
def test_nodes_start_with_it_and_take_the_callers_messages(
    command: Command,
    kafka: KafkaBroker,
    cluster_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On ports that are free: those that it writes others may use here."""
    out = tmp_path / "shop"
    asked = ("--kafka", kafka.address, "--cluster", cluster_id, "--nodes", NODES)
    assert command("init", *asked, "--dev-certs", "--out", str(out)).code == 0
    profiles = tmp_path / "config" / "delaywheel"
    profiles.mkdir(parents=True)
    shutil.copy(out / "profiles.toml", profiles)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    topic = f"orders-{cluster_id}"
    create_topic(kafka.address, topic)
    free = free_ports(6)
    ports, peer_ports = (dict(zip(HOSTS, some, strict=True)) for some in (free[:3], free[3:]))
    members = {node: f"{host}:{peer_ports[node]}" for node, host in HOSTS.items()}
    with ExitStack() as held:
        for name, host in HOSTS.items():
            at = f"{host}:{ports[name]}"
            node = Node(name, out, port=0, peer_port=0, metrics_port=0)
            moved = {"listen": at, "advertised": at, "members": members, "metrics_listen": None}
            node.configure(tomllib.loads((out / name / "node.toml").read_text()) | moved)
            held.callback(node.stop)
            node.start()
        for name, host in HOSTS.items():
            where = ("--profile", cluster_id, "--server", f"{host}:{ports[name]}")
            wait_until(f"{name} takes a message", taken(command, topic, name, *where))
        found = read_all(kafka.address, topic, at_least=3)
        nodes = ",".join(f"{host}:{ports[name]}" for name, host in HOSTS.items())
        with page("--profile", cluster_id, "--server", nodes) as address:
            token = (out / "operator.token").read_text().strip()
            assert signed_in(address, token) == 200
            assert signed_in(address, token[::-1]) == 401
            who = Request(f"{address}api/v1/DelayWheel/WhoAmI", b"{}")
            who.add_header("Authorization", f"Bearer {token}")
            with urlopen(who, timeout=60) as answered:
                told = json.load(answered)
    assert told["principal"] == "token:operator"
    (grant,) = told["grants"]
    assert {*grant["may"]} == {"produce", "change", "inspect", "read", "operate"}
    assert {message.value() for message in found} == {name.encode() for name in HOSTS}


@contextmanager
def page(*words: str) -> Iterator[str]:
    """The address of a page, started as the docs say, on any free port."""
    started = [sys.executable, "-m", "delaywheel_replica.cli.app", "web", "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*started, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def signed_in(address: str, token: str) -> int:
    """The status of signing in."""
    shown = json.dumps({"token": token}).encode()
    try:
        with urlopen(Request(f"{address}api/v1/session", shown, OF_THE_PAGE), timeout=60) as done:
            return int(done.status)
    except HTTPError as error:
        return error.code


def taken(command: Command, *words: str) -> Callable[[], bool]:
    """Whether one was sent; of what became of an earlier try nothing may be known."""
    id_ = ("--id", words[1].encode().hex().rjust(32, "0"), "--at", "2020-01-01T00:00Z", "--past-ok")
    return lambda: command("produce", *words, *id_).code == 0
