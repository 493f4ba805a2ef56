"""One broker for tests in several processes, each with a proxied listener of its own."""

from __future__ import annotations

from local.loopback.kafka import JVM_OPTIONS, KafkaBroker, free_ports

BROKER_VARIABLE = "DELAYWHEEL_TEST_BROKER"
"""The environment variable with the listeners of the broker that a process of tests joins."""

# For a broker of some minutes the JVM's slower compiler costs more than it gains: the tests of
# nodes joining and leaving took 38 CPU seconds of their broker with it, and 22 without. The quick
# one gains by an earlier begin: a fifth of the first 300 transactions, for a tenth of a start.
TEST_JVM = f"{JVM_OPTIONS} -XX:TieredStopAtLevel=1 -XX:CompileThresholdScaling=0.3"


class SharedBroker(KafkaBroker):
    """The broker, in the process that starts the others.

    Attributes:
        listeners: For each of the others, what its environment says.
    """

    def __init__(self, processes: int) -> None:
        """Prepares a broker for so many processes; nothing runs before `start`."""
        super().__init__()
        ports = free_ports(2 * processes)
        self._pairs = list(zip(ports[::2], ports[1::2], strict=True))
        self.listeners = [f"{self._port} {there} {here}" for there, here in self._pairs]

    def _properties(self) -> dict[str, str]:
        properties = super()._properties()
        for number, (there, here) in enumerate(self._pairs):
            name = f"PROXIED{number}"
            properties["listeners"] += f",{name}://127.0.0.1:{there}"
            properties["advertised.listeners"] += f",{name}://127.0.0.1:{here}"
            properties["listener.security.protocol.map"] += f",{name}:PLAINTEXT"
        return properties


class JoinedBroker(KafkaBroker):
    """The same broker in another process, which knows its addresses but does not run it."""

    def __init__(self, listener: str) -> None:
        """Takes one of the `listeners`."""
        self._port, self.proxied_port, self.proxy_port = map(int, listener.split())
