"""`delaywheel doctor`: what it says, and that no secret is in its bundle."""

from __future__ import annotations

import json
import os
import socket
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from delaywheel_replica.cli.doing.doctor.cluster import read_metrics
from delaywheel_replica.cli.doing.doctor.redacting import Redactor
from delaywheel_replica.cli.doing.loading import load
from delaywheel_replica.config import Config
from delaywheel_replica.hiding import HIDDEN
from support.clients.command import Command
from support.clients.fake_service import answer
from support.clients.scripted_node import ScriptedNode, describe_cluster

HEX = "5f" * 32
PEM = (
    "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEISECRETnPEM\nAwEHoUQDQgAEsecret\n"
    "-----END EC PRIVATE KEY-----"
)
IN_SETTINGS = {
    "sasl.password": "s3cret-01",
    "ssl.key.password": "s3cret-02",
    "sasl.oauthbearer.client.secret": 's3cret-"03',
    "sasl.oauthbearer.extensions": "a=s3cret-04",
    "sasl.oauthbearer.config": "principal=s3cret-05",
    "sasl.oauthbearer.token.endpoint.url": "https://idp/token?code=s3cret-06",
}
IN_ENVIRONMENT = {
    "DELAYWHEEL_KAFKA__SSL_KEYSTORE_PASSWORD": "s3cret-07",
    "AWS_SECRET_ACCESS_KEY": "s3cret/08+x",
    "AWS_SESSION_TOKEN": "s3cret-09",
    "DB_PASSWORD": "s3cret 10",
    "AZURE_STORAGE_KEY": "s3cret-11==",
    "SOME_CREDENTIALS": "s3cret-12",
}
IN_LOG = [
    "kafka: password=s3cret-13 refused",
    "kafka: sasl.password = 's3cret 14'",
    '{"event": "x", "sasl.password": "s3cret \\"15"}',
    '{"event": "said {\\"password\\": \\"s3cret-16\\"}"}',
    "dialled https://user:s3cret-17@host/path",
    "get https://host/path?sig=s3cret-18&x=1",
    "s3://s3cret-19:s3cret-20@bucket/ledger",
    "authorization: Bearer s3cret-21",
    "Authorization: Basic czNjcmV0LTIy",
    "{'token': 's3cret-23'}",
    "client_secret=s3cret-24&grant_type=x",
    "x-api-key: s3cret-25",
    "ran with --password s3cret-26",
    "jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJzM2NyZXQifQ.s3cret-27",
    "access AKIASECRETSECRET2828 refused",
    f"token digest {HEX}",
    PEM,
    json.dumps({"pem": PEM}),
    'sasl.jaas.config=org.apache.kafka.PlainLoginModule required password="s3cret-31";',
    "the environment has s3cret-07, s3cret/08+x and s3cret%2F08%2Bx",
    'repeated: "s3cret 10"; s3cret-\\"03',
    '{"key": "s3cret-32", "value": "s3cret-33", "headers": {"trip": "s3cret-34"}}',
    "message key=s3cret-35 value=b's3cret 36' headers=[('a', b's3cret-37')]",
    "passphrase is: passphrase='s3cret-38'",
]
IN_KAFKAS_ERROR = "refused: password=s3cret-39 of https://u:s3cret-40@idp"
IN_METRICS = 'delaywheel_x{error="secret=s3cret-41 at https://a/?t=s3cret-42"} 1\n'
PLANTED = [
    *("s3cret", "SECRET", "czNjcmV0", HEX, "AwEHoUQDQgAE", "eyJzdWIi"),
    *("s3cret%2F08", "czNjcmV0LTIy"),
]


@pytest.fixture
def metrics() -> Iterator[str]:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"{IN_METRICS}delaywheel_loop_lag_max_seconds 0.7\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def file(tmp_path: Path, metrics: str) -> Path:
    (tmp_path / "data").mkdir(0o750)
    settings = {"bootstrap.servers": "127.0.0.1:1", **IN_SETTINGS}
    rows = "".join(
        f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in settings.items()
    )
    path = tmp_path / "node.toml"
    path.write_text(
        f'cluster_id = "c1"\nnode_id = "n1"\ndata_dir = "{tmp_path / "data"}"\n'
        'ledger_uri = "s3://s3cret-43:s3cret-44@bucket/ledger?token=s3cret-45"\n'
        f'metrics_listen = "{metrics}"\n[kafka]\n{rows}'
    )
    return path


def test_no_secret_is_in_a_bundle(
    command: Command,
    node: ScriptedNode,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in IN_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    cluster = describe_cluster()
    cluster.members[0].report.kafka_error = IN_KAFKAS_ERROR
    node.describe = answer(cluster)
    log, bundle = tmp_path / "node.log", tmp_path / "report.tar.gz"
    log.write_text("\n".join(IN_LOG) + "\nthe last line says more\n")
    asked = ("doctor", "--config", str(file), "--log", str(log), "--bundle", str(bundle))
    ended = command(*asked)
    with tarfile.open(bundle) as archive:
        members = archive.getmembers()
        texts = {
            member.name.removeprefix("report/"): (archive.extractfile(member) or log.open("rb"))
            .read()
            .decode()
            for member in members
        }
    for name, text in texts.items():
        assert [secret for secret in PLANTED if secret in text] == [], (name, text)
        listed = [line.split() for line in ended.out.splitlines()]
        assert [name, f"{len(text.encode()):,}"] in listed
        if name.endswith(".json"):
            json.loads(text)
    assert texts.keys() == {
        *("report.json", "settings.json", "versions.json", "folder.txt", "status.json"),
        *("metrics-1.txt", "metrics-2.txt", "log.txt"),
    }
    assert "the last line says more" in texts["log.txt"]
    assert "https://" in texts["log.txt"]
    assert json.loads(texts["settings.json"])["cluster_id"] == "c1"
    assert bundle.stat().st_mode & 0o777 == 0o600
    assert command(*asked).err.startswith("error: FILES_EXIST: ")


@pytest.mark.parametrize(
    "line",
    [
        "Cookie: lang=de; delaywheel-7423=s3cret",
        "Authorization: Token s3cret",
        "{'Authorization': 'ApiKey s3cret'}",
        "Bearer: s3cret",
        "x-auth-key: s3cret",
        "user=u pass=s3cret",
        "sid=s3cret",
        "password%3Ds3cret",
        "SharedAccessSignature sr=x&sig=s3cret",
        "dialled https://user:pa/s3cret@host/path",
        "dialled user:s3cret@host:9092",
        f"{'M' * 64}\ns3cretMM\n-----END EC PRIVATE KEY-----",
        "the password is s3cret",
        "`sasl.password` was: s3cret, it says",
        'the token is now "a s3cret"',
        'the api key is set: api_key is set to s3cret"; more',
        "the password is\ns3cret",
        "password:\n\n  s3cret\\x",
        "client.secret =\r\ns3cret\r\nnext",
        '"password":\n  "a s3cret",',
        "password: |-\n  s3cret",
        "tokens:\n  password:\n    s3cret",
        r'{"event": "said {\"password\":\n\"a s3cret\"\n}"}',
        '{"event": "refused: password:\\n  s3cret\\nof node n1"}',
        "said 'password:\\r\\ns3cret' to n1",
        "Authorization:\n  Token s3cret",
        "password for bob is s3cret",
        "the password for user 'bob' at https://idp/x was: s3cret, it says",
        "secret of the shop: s3cret",
        "the token for topic orders is\ns3cret\nmore",
        "ran with --password\ns3cret\n--verbose",
        "args:\n  - --password\n  - s3cret\n",
        '["--password", "s3cret"]',
        '"--client-secret",\n  "a s3cret",',
        '{"event": "ran\\n--password\\ns3cret\\nof node n1"}',
    ],
)
def test_secrets_in_odd_places_of_a_log_are_hidden(tmp_path: Path, line: str) -> None:
    config = Config(cluster_id="c", node_id="n", data_dir=tmp_path, kafka={})
    assert "s3cret" not in Redactor(config).log(f"{line}\n")


@pytest.mark.parametrize(
    "text",
    [
        "the password is wrong, and the token is expired",
        "Broker: Delegation Token is not found on server",
        "a client.secret is mandatory: password is required. Its signature was invalid",
        "a password isolated; the token is: missing",
        "sign in with a token:\n2030-01-01 INFO started",
        'no token:\n{"event":"started"}',
        '{"event": "no token:\\nTraceback (most recent call last):"}',
        "no cookie:\nnode n1 started",
        "the password for bob is required, the token for topic orders was refused",
        "no password for bob: missing",
        "give --token-file\n--verbose",
        "sign in with a token for bob:\n2030-01-01 INFO started",
    ],
)
def test_harmless_lines_of_a_log_are_shown(tmp_path: Path, text: str) -> None:
    config = Config(cluster_id="c", node_id="n", data_dir=tmp_path, kafka={})
    assert Redactor(config).log(text) == text


@pytest.mark.parametrize(
    "part",
    [
        *("z", "-", "z.", "z-", "z:", "z://", "M\n", "z@", ": ", "token:\n", "token"),
        *("pass is a ", "pass for a "),
    ],
)
def test_a_long_word_in_a_log_is_read_but_once(tmp_path: Path, part: str) -> None:
    """One of 20,000 characters took a minute: it was looked at from each of its places."""
    config = Config(cluster_id="c", node_id="n", data_dir=tmp_path, kafka={})
    word = part * (20_000 // len(part))
    shown = Redactor(config).log(f"{word} {word}password=s3cret")
    assert shown == f"{word} {word}password={HIDDEN}"


def test_it_judges_the_cluster_and_says_what_to_do(
    command: Command, node: ScriptedNode, file: Path
) -> None:
    cluster = describe_cluster()
    cluster.now_ms = 1_900_000_000_000
    cluster.members[0].report.version = "0.2.0"
    cluster.members[0].report.now_ms = cluster.now_ms
    cluster.members[0].report.dead_letters = 3
    cluster.members[0].settings_differ = "span_seconds"
    other = cluster.members.add(node="n2", reachable=True, accepting=True)
    other.report.version = "0.1.0"
    other.report.now_ms = cluster.now_ms + 9_000
    node.describe = answer(cluster)
    ended = command("doctor", "--config", str(file), "--json")
    assert ended.code == 1  # something that is no node has its port
    found = {(one["what"], one["level"]): one for one in ended.document["items"]}
    assert "span_seconds" in found["cluster", "warning"]["text"]
    assert found["versions", "warning"]["text"] == "n1 0.2.0, n2 0.1.0"
    assert found["clocks", "warning"]["text"] == "n2 is 9 s ahead of n1"
    assert found["dead letters", "warning"]["advice"].startswith("delaywheel dead list")
    assert "700 ms late" in found["server", "warning"]["text"]
    assert found["kafka", "away"]


def test_this_machines_metrics_are_read_past_its_proxy(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert "delaywheel_loop_lag" in read_metrics(load(file, ()))


def test_what_has_the_port_of_the_metrics_is_no_node(tmp_path: Path) -> None:
    """The doctor ended with a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        thread = threading.Thread(target=_greet, args=[other])
        thread.start()
        config = Config(
            cluster_id="c", node_id="n", data_dir=tmp_path, kafka={}, metrics_listen=listen
        )
        with pytest.raises(OSError, match="no HTTP"):
            read_metrics(config)
        thread.join()


def _greet(listening: socket.socket) -> None:
    caller, _ = listening.accept()
    with caller:
        caller.recv(1_000)
        caller.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")


def test_what_is_missing_is_named(command: Command, file: Path, tmp_path: Path) -> None:
    with_node = ("--server", "127.0.0.1:1", "--set", "metrics_listen=127.0.0.1:1")
    log, bundle = tmp_path / "node.log", tmp_path / "report.tar.gz"
    log.write_text("early\n" + "x" * 4_000_000 + "\nlate\n")
    (tmp_path / "data" / os.fsdecode(b"\xff.slot")).touch()
    written = ("--log", str(log), "--bundle", str(bundle))
    ended = command("doctor", "--config", str(file), *with_node, "--verify", "--json", *written)
    assert ended.code == 1
    with tarfile.open(bundle) as archive:
        shown = archive.extractfile("report/log.txt")
        assert shown is not None
        assert shown.read()[-6:] == b"\nlate\n"
        listed = archive.extractfile("report/folder.txt")
        assert listed is not None
        assert b"?.slot 0" in listed.read()
    found = {(one["what"], one["level"]): one for one in ended.document["items"]}
    assert "127.0.0.1:1" in found["cluster", "fault"]["text"]
    assert found["metrics", "warning"]
    assert "no node's data folder" in found["folder", "fault"]["text"]
    nowhere = str(tmp_path / "none" / "report.tar.gz")
    ended = command("doctor", "--config", str(file), *with_node, "--bundle", nowhere)
    assert "NOT_WRITTEN" in ended.err


def test_every_frame_is_checked_if_asked(command: Command, file: Path) -> None:
    golden = Path(__file__).parents[2] / "golden" / "node-3"
    ended = command("doctor", "--config", str(file), "--set", f"data_dir={golden}", "--verify")
    assert f"every frame of {golden} is in order" in ended.out
