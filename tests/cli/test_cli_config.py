"""`config check` and `show`: flags win over the environment, the environment over the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.clients.command import Command, Ended


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "node.toml"
    path.write_text(
        f'cluster_id = "c1"\nnode_id = "n1"\ndata_dir = "{tmp_path}"\nspan_seconds = 100\n'
        '[kafka]\n"bootstrap.servers" = "127.0.0.1:9092"\n"sasl.password" = "hush"\n'
    )
    return path


@pytest.fixture
def check(command: Command, file: Path) -> Callable[..., Ended]:
    """Checks the file with these settings."""

    def checked(*settings: str) -> Ended:
        flags = (word for setting in settings for word in ("--set", setting))
        return command("config", "check", "--config", str(file), *flags)

    return checked


def test_file_in_order(check: Callable[..., Ended]) -> None:
    ended = check()
    assert (ended.code, ended.out) == (0, "settings in order: node n1 of cluster c1\n")


def test_all_faults_are_named_at_once_with_their_place_and_what_may_be_meant(
    check: Callable[..., Ended], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = file.read_text().replace("span_seconds", "span_second").replace('"n1"', '"N 1"')
    file.write_text(
        reported.replace("[kafka]", '[kafka]\n"sasl.passwort" = "x"\n"linger.msec" = 5')
    )
    monkeypatch.setenv("DELAYWHEEL_TOPIC_PARTITIONS", "0")
    ended = check("flush=never", "listen=0.0.0.0:7420", "min_insync=2", "kafkka.linger.ms=5")
    assert ended.code == 1
    head, *faults = ended.err.splitlines()
    assert head == "error: CONFIG_INVALID: "
    for fault in (
        f"span_second: there is no such setting: did you mean span_seconds? ({file})",
        "kafkka: there is no such setting: did you mean kafka? (--set)",
        "node_id: name 'N 1': 1 to 31 of a-z, 0-9 and '-', the first one not '-' (",
        f"({file})",
        "topic_partitions: Input should be greater than or equal to 1",
        "(DELAYWHEEL_TOPIC_PARTITIONS)",
        "flush: Input should be 'async' or 'group' (--set)",
        "listen 0.0.0.0:7420: callers would be given this address, which leads nowhere; set adv",
        'kafka: No such configuration property: "linger.msec": did you mean linger.ms?',
        'kafka: No such configuration property: "sasl.passwort": did you mean sasl.password?',
    ):
        assert any(fault in line for line in faults), fault
    assert len(faults) == 10
    assert any(line.startswith("  node_id: ") and line.endswith(f" ({file})") for line in faults)


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        (("listen=[::]:7420",), "listen [::]:7420"),
        (("listen=0.0.0.0:7420", "advertised=0.0.0.0:1"), "advertised 0.0.0.0:1: leads nowhere"),
        (("members.n1=a:1", "members.n2=0.0.0.0:1"), "members.n2 0.0.0.0:1: leads nowhere"),
        (("node_id=n", "members.n1=a:1", "members.n2=b:1"), "did you mean n"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(
    check: Callable[..., Ended], settings: tuple[str, ...], reported: str
) -> None:
    ended = check(*settings, "insecure=true")
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert reported in ended.err


@pytest.mark.parametrize(
    ("topics", "reported"),
    [
        ("a,b c", "ingress_topics 'b c': no name of a topic"),
        ("..", "ingress_topics '..': no name of a topic"),
        ("a, delaywheel-c1-dead", "ingress_topics delaywheel-c1-dead: the service's own"),
    ],
)
def test_an_ingress_topic_that_cannot_be_one_is_refused(
    check: Callable[..., Ended], topics: str, reported: str
) -> None:
    ended = check(f"ingress_topics={topics}")
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert reported in ended.err


def test_ingress_topics_are_a_list_however_they_are_given(
    command: Command, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = ("config", "show", "--json", "--config", str(file))

    def shown(*flags: str) -> object:
        ended = command(*show, *flags)
        return json.loads(ended.out)["ingress_topics"]

    assert shown() == []
    assert shown("--set", "ingress_topics=a, b") == ["a", "b"]
    monkeypatch.setenv("DELAYWHEEL_INGRESS_TOPICS", '["c"]')
    assert shown() == ["c"]
    monkeypatch.setenv("DELAYWHEEL_INGRESS_TOPICS", "c, d")
    assert shown() == ["c", "d"]
    monkeypatch.delenv("DELAYWHEEL_INGRESS_TOPICS")
    file.write_text(f'ingress_topics = ["d", "e"]\n{file.read_text()}')
    assert shown() == ["d", "e"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ("listen=0.0.0.0:7420", "advertised=node-1:7420"),
            "listen 0.0.0.0:7420: without tls_cert and grants whoever reaches",
        ),
        (
            ("members.n1=node-1:7421", "members.n2=node-2:7421"),
            'members node-1:7421: without peer_tls = "required" whoever reaches',
        ),
    ],
)
def test_whom_others_reach_needs_tls_unless_that_is_wanted(
    check: Callable[..., Ended], settings: tuple[str, ...], said: str
) -> None:
    refused = check(*settings)
    assert (refused.code, said in refused.err) == (1, True)
    assert check(*settings, "insecure=true").code == 0


def test_missing_file_is_named(command: Command, tmp_path: Path) -> None:
    ended = command("config", "check", "--config", str(tmp_path / "none.toml"))
    assert ended.code == 1
    assert "none.toml" in ended.err


def test_set_needs_a_name_and_a_value(check: Callable[..., Ended]) -> None:
    ended = check("span_seconds")
    assert ended.code == 2
    assert "NAME=VALUE" in ended.err


def test_flags_then_environment_then_file(
    command: Command, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def span(*flags: str) -> object:
        shown = command("config", "show", "--config", str(file), *flags, "--json").document
        return shown["span_seconds"]

    assert span() == 100
    monkeypatch.setenv("DELAYWHEEL_SPAN_SECONDS", "200")
    assert span() == 200
    assert span("--set", "span_seconds=300") == 300


def test_settings_of_tables(command: Command, file: Path) -> None:
    shown = command(
        *("config", "show", "--config", str(file), "--json"),
        *("--set", "kafka.linger.ms=3", "--set", "levels.soon=1000"),
    ).document
    assert shown["kafka"]["linger.ms"] == "3"
    assert shown["kafka"]["bootstrap.servers"] == "127.0.0.1:9092"
    assert shown["levels"]["soon"] == 1000


def test_what_is_shown_can_be_read_again(command: Command, file: Path, tmp_path: Path) -> None:
    odd = ('kafka.client.id=\x7f"\\\u00fc\n', "levels.in a while=5", "ingress_topics=a,b")
    flags = [word for setting in odd for word in ("--set", setting)]
    shown = command("config", "show", "--config", str(file), *flags).out
    again = tmp_path / "again.toml"
    again.write_text(shown, encoding="utf-8")
    assert command("config", "check", "--config", str(again)).code == 0
    assert command("config", "show", "--config", str(again)).out == "".join(
        line for line in shown.splitlines(keepends=True) if "sasl.password" not in line
    )
    (hidden,) = (line for line in shown.splitlines() if "sasl.password" in line)
    assert hidden.endswith("is not shown: give it as DELAYWHEEL_KAFKA__SASL_PASSWORD")


def test_secrets_are_masked(command: Command, file: Path) -> None:
    ledger = ("--set", "ledger_uri=s3://key:hush@books/a?secret_key=hush")
    for flags in ((), ("--json",)):
        reported = command("config", "show", "--config", str(file), *ledger, *flags).out
        assert "hush" not in reported
        assert "sasl.password" in reported
        assert "s3://books/a" in reported


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("security.protocol=SASL_SSL", "sasl.mechanism=SCRAM-SHA-512"), "sasl.password must be"),
        (("security.protocol=SSL", "ssl.ca.location=/no/ca.pem"), "/no/ca.pem: no such file or"),
        (("security.protocol=SSL", "ssl.key.location=/etc"), "ssl.key.location /etc: is a folder"),
        (("security.protocol=SASL",), 'Invalid value "SASL" for configuration property'),
    ],
)
def test_what_is_wrong_with_tls_and_passwords_is_said(
    check: Callable[..., Ended], file: Path, settings: tuple[str, ...], said: str
) -> None:
    file.write_text(file.read_text().replace('"sasl.password" = "hush"\n', ""))
    ended = check(*(f"kafka.{setting}" for setting in settings))
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert said in ended.err


def test_our_own_variables_are_no_settings(
    check: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    sources = [*root.glob("scripts/_*.sh"), *root.glob("*/delaywheel*/cli/**/*.py")]
    names = {
        name
        for source in sources
        for name in re.findall(r"DELAYWHEEL_[A-Z]+(?:_[A-Z]+)*", source.read_text())
    }
    drills = (root / "tests").glob("**/test_*.py")
    names |= {
        name for one in drills for name in re.findall(r"DELAYWHEEL_DRILL_[A-Z_]+", one.read_text())
    }
    assert {"DELAYWHEEL_CACHE", "DELAYWHEEL_TRACEBACK"} <= names
    for name in names - {"DELAYWHEEL_CONFIG"}:
        monkeypatch.setenv(name, "1")
    assert check().err == ""


def test_a_variable_that_looks_like_a_setting_is_a_fault(
    check: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAYWHEEL_SPAN_SECOND", "5")
    monkeypatch.setenv("DELAYWHEEL_LEVEL__SOON", "5")
    monkeypatch.setenv("DELAYWHEEL_OF_ANOTHER_PROGRAM", "5")
    ended = check("flush=never")
    for fault in (
        "flush: Input should be",
        "level: there is no such setting: did you mean levels? (DELAYWHEEL_LEVEL__SOON)",
        "span_second: there is no such setting: did you mean span_seconds? (DELAYWHEEL_SPAN_",
    ):
        assert fault in ended.err
    assert "OF_ANOTHER_PROGRAM" not in ended.err


def test_a_data_folder_that_cannot_be_written_is_a_fault(
    check: Callable[..., Ended], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(f"data_dir={tmp_path}/to/come").code == 0
    ended = check(f"data_dir={file}/below")
    assert (ended.code, "not a directory" in ended.err) == (1, True)
    assert f"{file} is not a folder" in check(f"data_dir={file}").err
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    ended = check(f"data_dir={tmp_path}/to/come")
    assert f"{tmp_path} cannot be written by this user" in ended.err


def test_serve_refuses_a_wrong_configuration(command: Command, file: Path) -> None:
    ended = command("serve", "--config", str(file), "--set", "node_id=NOT OK")
    assert ended.code == 78, "systemd does not start it again"
    assert ended.err.startswith("error: CONFIG_INVALID: node_id")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("linger.ms=20000", "`message.timeout.ms` must be greater than `linger.ms`"),
        ("fetch.max.bytes=1000", "`fetch.max.bytes` must be >= `message.max.bytes`"),
        ("queue.buffering.max.kbytes=512", "queue.buffering.max.kbytes=512: a record of ours"),
        ("error_cb=print", "expected error_cb property as a callable function"),
    ],
)
def test_what_one_kind_of_client_would_refuse_is_refused_before(
    check: Callable[..., Ended], setting: str, said: str
) -> None:
    """The node would end, and be restarted for ever."""
    ended = check(f"kafka.{setting}")
    assert ended.code == 1
    assert said in ended.err


def test_what_is_ours_to_set_hides_no_other_fault_of_kafkas(
    command: Command, tmp_path: Path
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        'cluster_id = "c"\nnode_id = "n1"\ndata_dir = "/d"\nlisten = "0.0.0.0:1"\n'
        '[kafka]\n"enable.idempotence" = false\n"lingr.ms" = "1"\n'
    )
    reported = command("config", "check", "--config", str(file)).err
    for fault in (
        "bootstrap.servers is missing",
        "enable.idempotence: set by delaywheel itself",
        '"lingr.ms": did you mean linger.ms?',
        "listen 0.0.0.0:1: callers would be given",
    ):
        (line,) = (line for line in reported.splitlines() if fault in line)
        assert line.endswith(f"({file})")
