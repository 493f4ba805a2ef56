"""One broker for tests in several processes.

Each process has a proxied listener, and a user whose rights it gives and takes; on all other
listeners clients may do anything.
"""

from __future__ import annotations

from local.loopback.kafka import JVM_OPTIONS, KafkaBroker, free_ports

BROKER_VARIABLE = "DELAYWHEEL_SHARED_KAFKA"
"""The environment variable with the listeners of the broker that a process of tests joins."""

# For a broker of some minutes the JVM's slower compiler costs more than it gains: the tests of
# nodes joining and leaving took 38 CPU seconds of their broker with it, and 22 without. The quick
# one gains by an earlier begin: a fifth of the first 300 transactions, for a tenth of a start.
TEST_JVM = f"{JVM_OPTIONS} -XX:TieredStopAtLevel=1 -XX:CompileThresholdScaling=0.3"

PASSWORD = "only-here"  # noqa: S105 - nobody else reaches loopback
_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"


class SharedBroker(KafkaBroker):
    """The broker, in the process that starts the others.

    Attributes:
        listeners: For each of the others, what its environment says.
    """

    def __init__(self, processes: int) -> None:
        """Prepares a broker for so many processes; nothing runs before `start`."""
        super().__init__()
        self._guarded_port, *ports = free_ports(1 + 2 * processes)
        self._pairs = list(zip(ports[::2], ports[1::2], strict=True))
        self.listeners = [
            f"{self._port} {there} {here} {self._guarded_port} {_user(number)}"
            for number, (there, here) in enumerate(self._pairs)
        ]

    def _properties(self) -> dict[str, str]:
        properties = super()._properties()
        at = {f"PROXIED{number}": pair for number, pair in enumerate(self._pairs)}
        at["GUARDED"] = (self._guarded_port, self._guarded_port)
        for name, (there, here) in at.items():
            properties["listeners"] += f",{name}://127.0.0.1:{there}"
            properties["advertised.listeners"] += f",{name}://127.0.0.1:{here}"
            protocol = "SASL_PLAINTEXT" if name == "GUARDED" else "PLAINTEXT"
            properties["listener.security.protocol.map"] += f",{name}:{protocol}"
        users = [f'user_{_user(number)}="{PASSWORD}"' for number in range(len(self._pairs))]
        return {
            **properties,
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.guarded.plain.sasl.jaas.config": f"{_LOGIN} {' '.join(users)};",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }


class JoinedBroker(KafkaBroker):
    """The same broker in another process, which knows its addresses but does not run it.

    Attributes:
        guarded_address: Where only users are let in.
        user: This process's own.
    """

    def __init__(self, listener: str) -> None:
        """Takes one of the `listeners`."""
        *ports, self.user = listener.split()
        self._port, self.proxied_port, self.proxy_port, guarded = map(int, ports)
        self.guarded_address = f"127.0.0.1:{guarded}"


def _user(number: int) -> str:
    return f"user{number}"
