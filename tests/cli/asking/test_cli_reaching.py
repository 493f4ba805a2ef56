"""Which nodes a command asks, and by which TLS files."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from delaywheel import Tls
from delaywheel_replica.cli.failures import CommandFailure
from delaywheel_replica.cli.options import asking
from delaywheel_replica.cli.parsing import Command, Parser
from delaywheel_replica.cli.reaching import Nodes


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("SERVER", "PROFILE", "CLIENT_TLS", "CLIENT_CA", "CLIENT_CERT", "CLIENT_KEY"):
        monkeypatch.delenv(f"DELAYWHEEL_{name}", raising=False)
    (tmp_path / "delaywheel").mkdir()
    return tmp_path / "delaywheel"


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(path)
    return path


def read(*arguments: str) -> Nodes:
    parser = Parser("delaywheel x", Command("Does it.", "a:b", asking))
    named = parser.completed(parser.read(arguments))
    assert set(named) == {"server", "timeout_s"}
    nodes = named["server"]
    assert isinstance(nodes, Nodes)
    return nodes


def put_profiles(home: Path, text: str) -> None:
    path = home / "profiles.toml"
    path.touch(0o600)
    path.write_text(text)


def test_options_win_over_a_profile_and_a_profile_over_variables(
    home: Path, ca: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read() == Nodes("127.0.0.1:7420")
    monkeypatch.setenv("DELAYWHEEL_SERVER", "variable:1")
    monkeypatch.setenv("DELAYWHEEL_CLIENT_CA", str(ca))
    assert read() == Nodes("variable:1", Tls(str(ca)))
    put_profiles(home, '[prod]\nserver = "profile:1"\n[tls]\ntls = true\n')
    assert read("--profile", "prod") == Nodes("profile:1", Tls(str(ca)))
    assert read("--profile", "prod", "--server", "option:1").addresses == "option:1"
    monkeypatch.delenv("DELAYWHEEL_CLIENT_CA")
    assert read("--profile", "tls") == Nodes("variable:1", Tls())
    assert read("--tls") == Nodes("variable:1", Tls())
    monkeypatch.setenv("DELAYWHEEL_PROFILE", "prod")
    assert read() == Nodes("profile:1")


@pytest.mark.usefixtures("ca")
def test_paths_of_a_profile_are_relative_to_its_file(home: Path) -> None:
    put_profiles(home, '[prod]\nserver = ["a:1", "b:1"]\ntls_ca = "../ca.pem"\n')
    assert read("--profile", "prod") == Nodes("a:1,b:1", Tls(str(home / "../ca.pem")))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[test]\n", "has no table [prod]; it has test"),
        ("[prod]\nsrever = 1\n", "[prod] has srever, which is no option"),
        ("[prod\n", "profiles.toml: "),
        ("[prod]\nserver = 7420\n", "server = 7420: write a text"),
        ('[prod]\ntls = "yes"\n', "tls = 'yes': write true or false"),
        ("[prod]\nserver = []\n", "server names no address"),
        ('[prod]\ntls_ca = "~nobody-is-called-so/ca.pem"\n', "tls_ca = '~nobody-is-called-so/ca"),
    ],
)
def test_a_wrong_profile_is_told(home: Path, text: str, told: str) -> None:
    put_profiles(home, text)
    with pytest.raises(CommandFailure) as caught:
        read("--profile", "prod")
    assert told in str(caught.value)


@pytest.mark.usefixtures("home")
def test_a_word_that_may_mean_tls_never_means_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, tls in (("True", Tls()), ("on", Tls()), ("1", Tls()), ("off", None), ("", None)):
        monkeypatch.setenv("DELAYWHEEL_CLIENT_TLS", word)
        assert read().tls == tls
    monkeypatch.setenv("DELAYWHEEL_CLIENT_TLS", "required")
    with pytest.raises(CommandFailure, match="DELAYWHEEL_CLIENT_TLS=required: write 1 or 0"):
        read()


def test_files_that_everybody_may_read_are_refused(home: Path, ca: Path) -> None:
    with pytest.raises(CommandFailure, match="no such file"):
        read("--profile", "prod")
    put_profiles(home, "[prod]\n")
    (home / "profiles.toml").chmod(0o604)
    with pytest.raises(CommandFailure, match="everybody may read it"):
        read("--profile", "prod")
    signed = trustme.CA().issue_cert("a@example.org")
    cert, key = ca.with_name("cert.pem"), ca.with_name("key.pem")
    signed.cert_chain_pems[0].write_to_path(cert)
    signed.private_key_pem.write_to_path(key)
    key.chmod(0o644)
    with pytest.raises(CommandFailure, match="everybody may read it"):
        read("--tls-cert", str(cert), "--tls-key", str(key))


def test_files_that_do_not_fit_are_told(ca: Path) -> None:
    signed, other = (trustme.CA().issue_cert("a@example.org") for _ in range(2))
    cert, key = ca.with_name("cert.pem"), ca.with_name("key.pem")
    signed.cert_chain_pems[0].write_to_path(cert)
    key.touch(0o600)
    other.private_key_pem.write_to_path(key)
    for arguments, told in (
        (["--tls-ca", str(ca.with_name("none"))], "no such file"),
        (["--tls-cert", str(cert)], "belong together"),
        (["--tls-cert", str(cert), "--tls-key", str(key)], "not that of the certificate"),
        (["--tls-ca", str(key)], "tls.ca"),
    ):
        with pytest.raises(CommandFailure, match=told):
            read(*arguments)
