"""Three brokers for all tests of this folder, which also let users in behind TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from local.loopback.brokers import Brokers
from support.kafka.safe_listener import listen_safely, make_certificate

LOGINS = {"SCRAM-SHA-512": "", "OAUTHBEARER": 'unsecuredLoginStringClaim_sub="broker"'}


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def guarded(certificate: Path) -> Iterator[tuple[Brokers, str]]:
    """The brokers, and the addresses where users are let in."""
    authorizer = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
    rules = {"authorizer.class.name": authorizer, "super.users": "User:ANONYMOUS"}
    brokers = Brokers(3, settings=rules)
    safe = [listen_safely(broker, certificate, LOGINS) for broker in brokers.each]
    with brokers:
        yield brokers, ",".join(safe)


@pytest.fixture(scope="session")
def brokers(guarded: tuple[Brokers, str]) -> Brokers:
    """Started by the first test that wants them."""
    return guarded[0]


@pytest.fixture(autouse=True)
def all_come_back(brokers: Brokers) -> Iterator[None]:
    """A test that has failed leaves none away for those after it."""
    yield
    away = [broker for broker in brokers.each if not broker.running]
    for broker in away:
        broker.begin()
    for broker in away:
        broker.wait_until_ready()
