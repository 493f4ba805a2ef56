from pathlib import Path
from typing import Any

import pytest

from delaywheel_replica.config import Config
from delaywheel_replica.config_sources import ConfigError, load_config

FLAGS = {"cluster_id": "c", "node_id": "n1", "data_dir": "/d", "kafka.bootstrap.servers": "k:1"}


def load(**flags: Any) -> Config:
    return load_config(flags={**FLAGS, **flags})


def test_flags_win_over_environment_and_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        'cluster_id = "c"\nnode_id = "n1"\ndata_dir = "/d"\n'
        "span_seconds = 1\nlate_window_seconds = 1\nmax_message_bytes = 1\n"
        '[kafka]\nbootstrap.servers = "file:1"\n"client.id" = "file"\nsecurity.protocol = "SSL"\n'
    )
    monkeypatch.setenv("DELAYWHEEL_SPAN_SECONDS", "2")
    monkeypatch.setenv("DELAYWHEEL_LATE_WINDOW_SECONDS", "2")
    monkeypatch.setenv("DELAYWHEEL_KAFKA__CLIENT_ID", "environment")
    config = load_config(
        file=file, flags={"span_seconds": "3", "kafka.bootstrap.servers": "flag:1"}
    )
    assert (config.span_seconds, config.late_window_seconds, config.max_message_bytes) == (3, 2, 1)
    assert config.kafka == {
        "bootstrap.servers": "flag:1",
        "client.id": "environment",
        "security.protocol": "SSL",
    }


@pytest.mark.parametrize("spelt", ['"bootstrap.servers"', "bootstrap.servers", "bootstrap_servers"])
def test_the_winner_does_not_hang_on_how_a_kafka_setting_is_spelt(
    spelt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        f'cluster_id = "c"\nnode_id = "n1"\ndata_dir = "/d"\n[kafka]\n{spelt} = "file:1"\n'
    )
    monkeypatch.setenv("DELAYWHEEL_KAFKA__BOOTSTRAP_SERVERS", "environment:1")
    flags = {"kafka.bootstrap.servers": "flag:1"}
    assert load_config(file=file).kafka == {"bootstrap.servers": "environment:1"}
    assert load_config(file=file, flags=flags).kafka == {"bootstrap.servers": "flag:1"}


def test_names_of_the_client_with_real_underscores_stay() -> None:
    assert load(**{"kafka.log_level": 7}).kafka["log_level"] == "7"
    with pytest.raises(ConfigError, match="on_delivery"):
        load(**{"kafka.on_delivery": "x"})


@pytest.mark.parametrize(
    "setting",
    [
        {"kafka.client.id": "a\0b"},
        {"kafka.client.i\0d": "a"},
        {"kafka.sasl.password": "secret\0"},
        {"data_dir": "/d\0ata"},
        {"ledger_uri": "s3://bucket/\0"},
        {"levels": {"a\0": 5}},
    ],
)
def test_no_text_has_the_character_at_which_libraries_in_c_end_it(
    setting: dict[str, object],
) -> None:
    with pytest.raises(ConfigError, match=r"has the character U\+0000") as caught:
        load(**setting)
    assert "secret" not in str(caught.value)


def test_what_the_processes_inherit_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(**{"kafka.sasl.password": "secret", "levels": {"soon": 50}})
    monkeypatch.setenv("DELAYWHEEL_RESOLVED", config.resolved())
    monkeypatch.setenv("DELAYWHEEL_SPAN_SECONDS", "5")
    assert Config.inherited() == config


def test_a_node_is_alone_unless_set_otherwise() -> None:
    config = load(listen="127.0.0.1:7")
    assert (config.members, config.min_insync_members) == ({"n1": "127.0.0.1:7"}, 1)
    three = load(members={"n1": "a:1", "n2": "b:1", "n3": "c:1"})
    assert three.min_insync_members == 2


def test_peers_are_accepted_at_the_own_member_address_unless_set_otherwise() -> None:
    members = {"n1": "a:1", "n2": "b:1"}
    assert load(members=members).listens_for_peers == "a:1"
    assert load(members=members, peer_listen="0.0.0.0:1").listens_for_peers == "0.0.0.0:1"


def test_nodes_agree_on_what_is_in_force_not_on_how_it_is_written() -> None:
    members = {"n1": "a:1", "n2": "b:1", "n3": "c:1"}
    one = load(members=members).agreed
    elsewhere = {"n3": "c.inside:1", "n2": "b:1", "n1": "a:1"}
    assert load(members=elsewhere, node_id="n2", min_insync="2").agreed == one
    for name, value in (
        ("members", {"n1": "a:1", "n2": "b:1"}),
        ("min_insync", "3"),
        ("span_seconds", "1"),
        ("late_window_seconds", "1"),
        ("max_clock_skew_ms", "1"),
        ("transaction_messages", "1"),
        ("transaction_bytes", "1000000"),
    ):
        other = load(**{"members": members, name: value}).agreed
        assert [key for key in one if one[key] != other[key]] == [name]


@pytest.mark.parametrize(
    ("name", "is_shown"),
    [
        *(("sasl.password", False), ("ssl.key.password", False), ("ssl.key.pem", False)),
        ("sasl.oauthbearer.assertion.private.key.passphrase", False),
        *(("sasl.oauthbearer.assertion.private.key.pem", False), ("https.ca.pem", False)),
        *(("sasl.oauthbearer.extensions", False), ("sasl.kerberos.kinit.cmd", False)),
        *(("what.nobody.knows", False), ("sasl.oauthbearer.token.endpoint.url", False)),
        *(("sasl.username", True), ("security.protocol", True), ("ssl.key.location", True)),
        *(("queue.buffering.max.kbytes", True), ("client.id", True), ("linger.ms", True)),
        *(("enable.ssl.certificate.verification", True), ("debug", True)),
    ],
)
def test_of_kafka_settings_only_the_harmless_are_shown(name: str, is_shown: bool) -> None:
    config = load(**{f"kafka.{name}": "x"})
    for shown in (config.shown(), config.shown_changes()):
        assert shown["kafka"] == {"bootstrap.servers": "k:1", name: "x" if is_shown else "********"}


@pytest.mark.parametrize(
    ("settings", "are_taken"),
    [
        ({}, True),
        ({"halves": "false"}, False),
        ({"halves": "true"}, True),
        ({"ingress": "false"}, False),
        ({"ingress": "false", "ingress_topics": "mine"}, False),
        ({"ingress_destinations": {"delaywheel-c-ingress": ["orders"]}}, False),
        ({"ingress_destinations": {"mine": ["orders"]}, "ingress_topics": "mine"}, True),
    ],
)
def test_halves_are_taken_where_answers_can_come(
    settings: dict[str, Any], *, are_taken: bool
) -> None:
    config = load(**settings)
    assert (config.takes_halves, config.kafka_settings.halves) == (are_taken, are_taken)


@pytest.mark.parametrize(
    ("limited", "are_taken"), [("mine", True), ("delaywheel-c-ingress", False)]
)
def test_a_topic_that_refuses_answers_asks_checkers_for_none(
    limited: str, *, are_taken: bool
) -> None:
    """Groups may still have letters of before it was limited."""
    config = load(ingress_topics="mine", ingress_destinations={limited: ["orders"]})
    limits = config.kafka_settings.ingress_limits
    assert limits is not None
    assert limits.takes_answers == are_taken


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        ({"spam": "1"}, "spam"),
        ({"ledger_uri": "ftp://books"}, "ftp://"),
        ({"ttl_header": "dw-life"}, "ttl_header 'dw-life': no message can have"),
        ({"ingress_topics": "delaywheel-c-dead"}, "delaywheel-c-dead: the service's own"),
        ({"ingress_topics": "delaywheel-c-trace"}, "delaywheel-c-trace: the service's own"),
        ({"ingress_topics": "delaywheel-c-counts"}, "delaywheel-c-counts: the service's own"),
        ({"ledger_retention_hours": "192"}, "ledger_retention_hours 192: at least 193"),
        (
            {"ledger_retention_hours": "26", "span_seconds": "7200"},
            "ledger_retention_hours 26: at least 27",
        ),
        (
            {
                "halves": "true",
                "ingress_destinations": {"delaywheel-main-ingress": ["orders"]},
                "cluster_id": "main",
            },
            "ingress_destinations.delaywheel-main-ingress: half messages that are committed",
        ),
        ({"kafka.acks": "1"}, "acks"),
        ({"kafka.transactional.id": "mine"}, "transactional.id"),
        ({"kafka.bootstrap.servers": ""}, "bootstrap.servers is missing"),
        ({"node_id": "N 1"}, "node_id"),
        ({"listen": "7420"}, "not host:port"),
        ({"members": {"n2": "a:1"}}, "not among them"),
        ({"min_insync": "2"}, "only 1 members"),
        ({"members": {"n1": "a:1", "n2": "b"}}, "'b' is not host:port"),
        ({"members": {"n1": "a:1", "n2": "b:1"}, "listen": "a:1"}, "peer_listen a:1: listen "),
        ({"metrics_listen": "127.0.0.1:7420"}, "metrics_listen 127.0.0.1:7420: listen already"),
        (
            {"metrics_listen": "0.0.0.0:1", "members": {"n1": "a:1", "n2": "b:1"}},
            "metrics_listen 0.0.0.0:1: peer_listen already",
        ),
        ({"peer_listen": "7421"}, "not host:port"),
        ({"span_seconds": "0"}, "span_seconds"),
        ({"max_message_bytes": "20000000"}, "max_message_bytes is above"),
        ({"flush": "never"}, "flush"),
    ],
)
def test_a_setting_at_fault_is_named(flags: dict[str, Any], reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        load(**flags)


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags={"span_seconds": "-1"})
    for name in ("cluster_id", "node_id", "data_dir", "kafka", "span_seconds"):
        assert name in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load(members={"n1": "a", "n2": "b:2", "N 3": "c:3", "n4": "d"})
    faults = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert faults == ["members.n1", "members.N 3", "members.n4"]


@pytest.mark.parametrize(
    ("variables", "reported"),
    [
        (
            {"KAFKA": '{"sasl.password": "hush"', "KAFKA__CLIENT_ID": "x"},
            "kafka: must be a table; as text, in JSON (DELAYWHEEL_KAFKA)",
        ),
        ({"KAFKA": ""}, "kafka: must be a table; as text, in JSON (DELAYWHEEL_KAFKA)"),
        (
            {"MEMBERS": "n1=a:1", "MEMBERS__N1": "a:1"},
            "members: must be a table; as text, in JSON (DELAYWHEEL_MEMBERS)",
        ),
        (
            {"INGRESS_DESTINATIONS": "x=y", "INGRESS_DESTINATIONS__X": "y"},
            "ingress_destinations: must be a table; as text, in JSON (DELAYWHEEL_INGRESS_DEST",
        ),
        ({"LEVELS": "[5]"}, "levels: must be a table; as text, in JSON (DELAYWHEEL_LEVELS)"),
        ({"LEVELS": "null"}, "levels: must be a table; as text, in JSON (DELAYWHEEL_LEVELS)"),
        (
            {"KAFKA": '{"ssl.ca.location": null}'},
            "kafka.ssl.ca.location: Input should be a valid string (DELAYWHEEL_KAFKA)",
        ),
        (
            {"KAFKA": '{"debug": {"of": ["broker", "topic"]}}'},
            "kafka.debug.of: Input should be a valid string (DELAYWHEEL_KAFKA)",
        ),
        ({"INGRESS_TOPICS": "[" * 100_000}, "ingress_topics: Input should be a valid list (DEL"),
        ({"INGRESS_TOPICS__0": "a"}, "ingress_topics: is no table (DELAYWHEEL_INGRESS_TOPICS__0)"),
        ({"LISTEN__X": "a"}, "listen: is no table (DELAYWHEEL_LISTEN__X)"),
        ({"NODE_ID__X": "a"}, "node_id: is no table (DELAYWHEEL_NODE_ID__X)"),
        ({"INGRESS_TOPICS": ""}, "ingress_topics: Input should be a valid list (DELAYWHEEL_INGR"),
        ({"INGRESS_TOPICS": '["a"'}, "ingress_topics: Input should be a valid list (DELAYWHEEL_"),
        ({"PRINCIPAL_FROM": " , "}, "principal_from: Input should be a valid list (DELAYWHEEL_PR"),
        (
            {"INGRESS_DESTINATIONS__T": ""},
            "ingress_destinations.t: Input should be a valid list (DELAYWHEEL_INGRESS_DESTINATION",
        ),
    ],
)
def test_a_text_that_is_no_table_or_list_is_a_fault_of_its_own_place(
    variables: dict[str, str], reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is given: a table would be lost but for one entry."""
    file = tmp_path / "node.toml"
    file.write_text('ingress_topics = ["a", "b"]\n')
    for name, value in variables.items():
        monkeypatch.setenv(f"DELAYWHEEL_{name}", value)
    with pytest.raises(ConfigError) as caught:
        load_config(file=file, flags=FLAGS)
    (fault,) = str(caught.value).splitlines()
    assert fault.startswith(reported)
    assert "hush" not in fault


def test_a_setting_with_such_a_fault_has_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DELAYWHEEL_KAFKA", '{"bootstrap.servers": "k:1"')
    monkeypatch.setenv("DELAYWHEEL_KAFKA__CLIENT_ID", "x")
    monkeypatch.setenv("DELAYWHEEL_CLUSTER_ID__X", "c")
    with pytest.raises(ConfigError) as caught:
        load_config(flags={"node_id": "n1", "data_dir": "/d"})
    assert str(caught.value).splitlines() == [
        "cluster_id: is no table (DELAYWHEEL_CLUSTER_ID__X)",
        "kafka: must be a table; as text, in JSON (DELAYWHEEL_KAFKA)",
    ]


@pytest.mark.parametrize(
    ("text", "topics"),
    [("20261127", ["20261127"]), ("null", ["null"]), ("true", ["true"]), ("[]", [])],
)
@pytest.mark.parametrize("given_as", ["flag", "variable"])
def test_a_list_is_json_only_where_it_begins_as_one(
    given_as: str, text: str, topics: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if given_as == "variable":
        monkeypatch.setenv("DELAYWHEEL_INGRESS_TOPICS", text)
        assert load().ingress_topics == topics
    else:
        assert load(ingress_topics=text).ingress_topics == topics


def test_each_entry_of_a_table_is_a_fault_of_the_place_that_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[levels]\nbad = -1\nworse = -1\n")
    monkeypatch.setenv("DELAYWHEEL_LEVELS__SOON", "5")
    monkeypatch.setenv("DELAYWHEEL_LEVELS__WORSE", "-2")
    monkeypatch.setenv("DELAYWHEEL_KAFKA__ACKS", "1")
    with pytest.raises(ConfigError) as caught:
        load_config(file=file, flags={**FLAGS, "levels.late": "x"})
    bad, worse, late, acks = str(caught.value).splitlines()
    assert bad.startswith("levels.bad: ")
    assert bad.endswith(f" ({file})")
    assert worse.startswith("levels.worse: ")
    assert worse.endswith(" (DELAYWHEEL_LEVELS__WORSE)")
    assert late.startswith("levels.late: ")
    assert late.endswith(" (--set)")
    assert acks.startswith("kafka: acks: ")
    assert acks.endswith("with them (DELAYWHEEL_KAFKA__ACKS)"), "and not the flag of the servers"


def test_a_table_may_be_given_as_a_whole_in_json() -> None:
    assert load(levels='{"soon": 250}', **{"levels.late": "5"}).levels == {"soon": 250, "late": 5}


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(file=tmp_path / "nope.toml", flags=FLAGS)
    broken = tmp_path / "broken.toml"
    broken.write_text("= 1")
    with pytest.raises(ConfigError):
        load_config(file=broken, flags=FLAGS)


def test_what_is_kept_of_the_ledger_outlives_what_is_pending() -> None:
    assert load(ledger_retention_hours="193").ledger_kept_hours == 193
    assert load(ledger_retention_hours="0").ledger_kept_hours == 0
    short = load(ledger_retention_hours="27", span_seconds="7200")
    assert short.ledger_kept_hours == 27


def test_the_ledger_does_not_fill_the_data_folder_for_good() -> None:
    assert load(span_seconds="7200").ledger_kept_hours == 7 * 24
    assert load().ledger_kept_hours == 8 * 24 + 1
    assert load(ledger_uri="s3://bucket/books").ledger_kept_hours == 0


def test_what_the_log_says_at_the_start_is_what_differs_from_the_defaults() -> None:
    config = load(**{"kafka.sasl.password": "x", "flush": "group", "span_seconds": "604800"})
    said = config.shown_changes()
    assert said.keys() == {"flush", "members", "kafka"}
    assert "x" not in said["kafka"].values()


def test_brokers_can_tell_our_clients_apart_unless_the_operator_names_them() -> None:
    settings = load().kafka_settings
    made = [
        settings.producer("id"),
        settings.producer("id", purpose="trial"),
        settings.consumer(),
        settings.ingress_consumer(),
        settings.admin(),
    ]
    assert [each["client.id"] for each in made] == [
        *("delaywheel-c-n1-leader", "delaywheel-c-n1-trial", "delaywheel-c-n1-control"),
        *("delaywheel-c-n1-ingress", "delaywheel-c-n1-admin"),
    ]
    named = load(**{"kafka.client.id": "mine"}).kafka_settings
    assert {named.producer("id")["client.id"], named.consumer()["client.id"]} == {"mine"}
