"""One set of Kafka settings, for both clients: librdkafka's, which asks, and Java's, which reads.

Nodes have librdkafka's settings. What decides how Kafka is reached is translated for the connector,
and refused where Java has nothing like it; what only tunes librdkafka is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delaywheel_audit.kafka.errors import KafkaSourceError, Reason
from delaywheel_replica.hiding import HIDDEN, is_secret

TIMEOUT_S = 60.0
"""How long Kafka may show no progress."""

_SAME = frozenset(
    {
        "bootstrap.servers",
        "client.id",
        "client.rack",
        "ssl.key.password",
        "ssl.keystore.password",
    }
)
_LOGINS = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_DECIDES = re.compile(r"(enable\.)?(ssl|sasl|https)\..*")
"""Settings without which another broker would be trusted, or nobody be let in."""

_SPARKS = "spark."
"""Settings that begin so are Java's, and go to the connector as they are."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How to reach Kafka; no text made by this package contains its secrets.

    Attributes:
        values: Settings of librdkafka, and of Java's client behind `spark.`.
        timeout_s: How long Kafka may show no progress.
    """

    values: Mapping[str, str] = field(repr=False)
    timeout_s: float = TIMEOUT_S

    @property
    def bootstrap(self) -> str:
        """Where Kafka is.

        Raises:
            KafkaSourceError: OPTION_INVALID, it is not said.
        """
        if not (address := self.values.get("bootstrap.servers")):
            raise KafkaSourceError(Reason.OPTION_INVALID, "bootstrap.servers is missing")
        return address

    def admin(self) -> dict[str, Any]:
        """Returns the settings of a client that asks about topics."""
        own = {n: value for n, value in self.values.items() if not n.startswith(_SPARKS)}
        return {"client.id": "delaywheel-audit", "log_level": 0, **own}

    def java(self) -> dict[str, str]:
        """Returns what makes Java's client reach the same Kafka in the same way.

        Raises:
            KafkaSourceError: CLIENT_REFUSED, naming the setting that Java has nothing for.
        """
        given = dict(self.values)
        own = {n.removeprefix(_SPARKS): given.pop(n) for n in [*given] if n.startswith(_SPARKS)}
        made = {name: given.pop(name) for name in [*given] if name in _SAME}
        if protocol := given.pop("security.protocol", None):
            made["security.protocol"] = protocol.upper()
        made |= _trust(given) | _own_certificate(given) | _login(given)
        if given.pop("ssl.endpoint.identification.algorithm", "https") == "none":
            made["ssl.endpoint.identification.algorithm"] = ""
        unknown = sorted(name for name in given if _DECIDES.fullmatch(name))
        if unknown and not own:
            raise KafkaSourceError(
                Reason.CLIENT_REFUSED,
                f"{', '.join(unknown)}: not known how to say that to Spark's Kafka client, which "
                "is Java's; say it in Java's own settings, each behind spark. "
                "(spark.sasl.jaas.config)",
            )
        return {**made, **own}

    def masked(self, text: str) -> str:
        """Returns the text without any secret value."""
        secrets = {
            value
            for name, value in self.values.items()
            if is_secret(name.removeprefix(_SPARKS)) and value
        }
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return text


def _trust(given: dict[str, str]) -> dict[str, str]:
    """Takes out whom to trust."""
    if file := given.pop("ssl.ca.location", None):
        return {"ssl.truststore.type": "PEM", "ssl.truststore.location": file}
    if text := given.pop("ssl.ca.pem", None):
        return {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": text}
    return {}


def _own_certificate(given: dict[str, str]) -> dict[str, str]:
    """Takes out our certificate and key, which Java wants as texts or in one file."""
    if file := given.pop("ssl.keystore.location", None):
        return {"ssl.keystore.type": "PKCS12", "ssl.keystore.location": file}
    chain, key = _text_of(given, "ssl.certificate"), _text_of(given, "ssl.key")
    if chain is None or key is None:
        return {}
    if re.search(r"BEGIN (RSA|EC) PRIVATE KEY", key):
        raise KafkaSourceError(
            Reason.CLIENT_REFUSED,
            "ssl.key: Spark's Kafka client reads PKCS 8 only (BEGIN PRIVATE KEY); "
            "convert it: openssl pkcs8 -topk8 -nocrypt -in OLD -out NEW",
        )
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": chain,
        "ssl.keystore.key": key,
    }


def _text_of(given: dict[str, str], name: str) -> str | None:
    """Takes out a text that is in a setting, or in a file that a setting names."""
    text, file = given.pop(f"{name}.pem", None), given.pop(f"{name}.location", None)
    if text is not None or file is None:
        return text
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise KafkaSourceError(
            Reason.CLIENT_REFUSED, f"{name}.location: {file} cannot be read: {error}"
        ) from None


def _login(given: dict[str, str]) -> dict[str, str]:
    """Takes out name and password."""
    mechanism = given.pop("sasl.mechanism", None) or given.pop("sasl.mechanisms", None)
    if mechanism is None:
        return {}
    made = {"sasl.mechanism": mechanism}
    if (module := _LOGINS.get(mechanism)) is not None:
        name, password = given.pop("sasl.username", ""), given.pop("sasl.password", "")
        who = f"username={_quoted(name)} password={_quoted(password)}"
        made["sasl.jaas.config"] = f"{module} required {who};"
    else:
        given["sasl.mechanism"] = mechanism  # refused, unless Java's own settings are given
    return made


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
