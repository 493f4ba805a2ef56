"""A further listener of a broker, with TLS, where users say who they are."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from local.loopback.kafka import KafkaBroker, free_ports

_REQUEST: Final = (
    *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
    *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
)
_SECURITY: Final = "org.apache.kafka.common.security"
PASSWORDS: Final = {"PLAIN": "plain.Plain", "SCRAM-SHA-512": "scram.Scram"}
TOKENS: Final = {"OAUTHBEARER": "oauthbearer.OAuthBearer"}


def make_certificate(folder: Path) -> Path:
    """Makes a self-signed certificate of 127.0.0.1; beside it `both.pem` has the key, too."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    made = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run((*_REQUEST, *made), check=True, capture_output=True)
    (folder / "both.pem").write_text(key.read_text() + certificate.read_text())
    return certificate


def listen_safely(broker: KafkaBroker, certificate: Path, logins: Mapping[str, str]) -> str:
    """Gives a broker that does not run yet the listener; returns its address.

    Args:
        broker: The broker.
        certificate: As `make_certificate` makes it.
        logins: The options of each mechanism's login module.
    """
    address = f"127.0.0.1:{free_ports(1)[0]}"
    own = broker._properties()
    broker._settings |= {
        "listeners": f"{own['listeners']},SAFE://{address}",
        "advertised.listeners": f"{own['advertised.listeners']},SAFE://{address}",
        "listener.security.protocol.map": f"{own['listener.security.protocol.map']},SAFE:SASL_SSL",
        "listener.name.safe.sasl.enabled.mechanisms": ",".join(logins),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificate.with_name("both.pem")),
    }
    for mechanism, options in logins.items():
        module = f"{_SECURITY}.{(PASSWORDS | TOKENS)[mechanism]}LoginModule required {options};"
        broker._settings[f"listener.name.safe.{mechanism.lower()}.sasl.jaas.config"] = module
    return address
