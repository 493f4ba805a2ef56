"""Clients whose program does not say which nodes to ask; test_cli_reaching.py has the order."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from delaywheel import AsyncClient, Client, Tls
from delaywheel.client.profiles import ProfileInvalidError, reached
from delaywheel.testing import MemoryService
from delaywheel.trace import Trace


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("SERVER", "PROFILE", "CLIENT_TLS", "CLIENT_CA", "CLIENT_TOKEN_FILE"):
        monkeypatch.delenv(f"DELAYWHEEL_{name}", raising=False)
    path = tmp_path / "delaywheel" / "profiles.toml"
    path.parent.mkdir()
    path.touch(0o600)
    return path


def put_profile(path: Path, server: str) -> None:
    path.write_text(f'[prod]\nserver = "{server}"\n')


async def test_a_client_asks_the_nodes_of_its_profile_or_of_the_environment(
    profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemoryService() as service:
        put_profile(profiles, service.address)
        with Client(profile="prod") as client:
            assert client.produce("orders", b"1", delay="1h").slot
        monkeypatch.setenv("DELAYWHEEL_PROFILE", "prod")
        async with AsyncClient() as other:
            assert (await other.produce("orders", b"2", delay="1h")).slot


def test_what_the_program_gives_wins(
    profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(ca)
    profiles.write_text(f'[prod]\nserver = "a:1"\ntls_ca = "{ca}"\n')
    assert reached(None, None, "prod") == ("a:1", Tls(str(ca)), None)
    assert reached(["b:1"], None, "prod") == (["b:1"], Tls(str(ca)), None)
    assert reached(None, Tls(), "prod") == ("a:1", Tls(), None)
    monkeypatch.setenv("DELAYWHEEL_PROFILE", "prod")
    monkeypatch.setenv("DELAYWHEEL_CLIENT_TLS", "1")
    assert reached("b:1", None, None) == ("b:1", None, None), "nothing is left open"


def test_a_wrong_profile_is_told_when_the_client_is_made(profiles: Path) -> None:
    profiles.write_text("[test]\n")
    with pytest.raises(ProfileInvalidError, match=r"no table \[prod\]; it has test"):
        Client(profile="prod")


TRACE = """
[prod]
server = "a:1"
[prod.trace]
key = "hash"
secret = "of all programs"
sample = 0.5
[prod.trace.kafka]
"bootstrap.servers" = "127.0.0.1:9"
"client.id" = "web"
"""


def test_a_profile_may_have_a_trace(profiles: Path) -> None:
    profiles.write_text(TRACE)
    _, _, trace = reached(None, None, "prod")
    assert isinstance(trace, Trace)
    with MemoryService() as service:
        own = service.trace()
        assert reached(None, None, "prod", own)[2] is own
    assert reached("b:1", None, None) == ("b:1", None, None)


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ('key = "hash"', 'key = "clear"', "the trace of the profile: key 'clear'"),
        ("sample", "smaple", "smaple"),
        ('"client.id"', '"client.name"', "client.name"),
        ('"bootstrap.servers" = "127.0.0.1:9"', "", "bootstrap.servers"),
    ],
)
def test_a_wrong_trace_is_told_when_the_client_is_made(
    profiles: Path, right: str, wrong: str, says: str
) -> None:
    profiles.write_text(TRACE.replace(right, wrong))
    with pytest.raises(ProfileInvalidError, match=says):
        Client(profile="prod")
    profiles.write_text('[prod]\ntrace = "on"\n')
    with pytest.raises(ProfileInvalidError, match="trace is a table"):
        Client(profile="prod")
