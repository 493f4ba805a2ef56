"""An admin client that asks a broker which is there.

Any broker answers about topics, and makes them. Kafka names one of those that live, by chance, as
its controller, and the client library takes that one for five minutes: while it is away each
question ends after its time-out, and the library tries to connect thousands of times a second. So
the client looks first who it is by now, which is asked of any broker to which it has a connection.

A broker that was killed is named for its session's time-out (9 s): what it is asked until then ends
in a time-out, and may be asked again, perhaps of another. Whoever knows that one does not answer
says so: then another is looked for.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined] # its stubs re-export without saying so
    AdminClient,
    BrokerMetadata,
    ResourceType,
)

_KNOWN_S: Final = 0.5
"""So long is believed what was seen: questions come together."""
_LOOK_S: Final = 5.0
_LOOKS: Final = 20
"""So often another one is looked for: each may be named a third of the times."""
_AVOIDED_S: Final = 10.0
"""So long a broker that does not answer may be named."""
_FIRST_TRY_S: Final = 1.5
"""While one is avoided, a question may wait for it all the same: then another is asked so soon."""
_CONNECT_S: Final = 1.0
_TRIED_AT_ONCE: Final = 16

WAITED_FOR_S: Final = 20.0
"""Since it was first found away. Kafka would have missed it, were it so for all."""

FORGOTTEN_S: Final = 5.0
"""Who was not looked for all the time may have been back meanwhile."""


def takes_connection(broker: BrokerMetadata | None) -> bool:
    """Whether a broker, if Kafka names one, is there; one whose machine is away takes a second."""
    if broker is None:
        return False
    try:
        socket.create_connection((broker.host, broker.port), _CONNECT_S).close()
    except OSError:
        return False
    return True


class KafkaAdmin(AdminClient):
    """The admin client; what it asks about never makes a topic."""

    def __init__(self, settings: dict[str, Any], **options: Any) -> None:
        """Connects when first asked."""
        super().__init__({**settings, "allow.auto.create.topics": False}, **options)
        self._known_until_s = self._avoided_until_s = 0.0
        self._avoided: frozenset[int] = frozenset()

    def avoid(self, brokers: frozenset[int]) -> None:
        """Asks others than these for a while, if there are any: these do not answer."""
        self._avoided = brokers
        self._avoided_until_s = time.monotonic() + _AVOIDED_S
        if brokers:
            self._known_until_s = 0.0

    # What the client's own stubs say of these they do not keep to themselves.

    def describe_topics(self, topics: Any, **options: Any) -> Any:  # type: ignore[override]
        """Asks as the client does, but a broker that is there; raises the client's error."""
        ask = partial(super().describe_topics, topics)
        return self._asked(ask, next(iter(topics.topic_names), None), options)

    def describe_configs(self, resources: Any, **options: Any) -> Any:  # type: ignore[override]
        """Likewise; a broker itself is asked for its own."""
        names = (one.name for one in resources if one.restype is ResourceType.TOPIC)
        return self._asked(partial(super().describe_configs, resources), next(names, None), options)

    def create_topics(self, new_topics: Any, **options: Any) -> Any:  # type: ignore[override]
        """Likewise."""
        ask = partial(super().create_topics, new_topics)
        return self._asked(ask, next((one.topic for one in new_topics), None), options)

    def _asked(self, ask: Callable[..., Any], topic: str | None, options: dict[str, Any]) -> Any:
        """Asks; again while a broker is avoided: the library may have come to name that one."""
        self._look(topic, options)
        timeout_s = options.get("request_timeout", _LOOK_S)
        until_s = time.monotonic() + timeout_s
        if topic is None or not self._avoided or time.monotonic() >= self._avoided_until_s:
            return ask(**options)
        answers = ask(**options | {"request_timeout": min(_FIRST_TRY_S, timeout_s)})
        if not any(map(_is_timed_out, answers.values())):
            return answers
        self._known_until_s = 0.0
        self._look(topic, options)
        left_s = until_s - time.monotonic()
        return ask(**options | {"request_timeout": max(min(_FIRST_TRY_S, timeout_s), left_s)})

    def _look(self, topic: str | None, options: dict[str, Any]) -> None:
        if topic is None or time.monotonic() < self._known_until_s:
            return
        timeout_s = options.get("request_timeout", _LOOK_S)
        is_avoiding = time.monotonic() < self._avoided_until_s
        for _ in range(_LOOKS):
            named = self.list_topics(topic, timeout=timeout_s).controller_id
            if not is_avoiding or named not in self._avoided:
                break
        self._known_until_s = time.monotonic() + _KNOWN_S


def _is_timed_out(answer: Future[Any]) -> bool:
    error = answer.exception()
    return isinstance(error, KafkaException) and error.args[0].code() == KafkaError._TIMED_OUT


class MissedBrokers:
    """Brokers that are away, and that Kafka has not missed yet. For one thread, but for `note`.

    One that was killed is believed to live until its session has ended. Its copies count as in sync
    until then, so no partition that has one there answers a transaction's records, whoever leads
    it, and with three brokers these are all; what it led or coordinated, nobody does. Any other
    client would wait alike. That it takes no connection tells it from a topic that is silent. One
    that cannot be reached from here alone is never missed: it is waited for once.
    """

    def __init__(
        self,
        takes: Callable[[BrokerMetadata], bool] = takes_connection,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Knows of none."""
        self._takes = takes
        self._monotonic = monotonic
        self._named: Mapping[int, BrokerMetadata] = {}
        self._away_since_s: dict[int, float] = {}
        self._looked_s = float("-inf")

    def note(self, brokers: Mapping[int, BrokerMetadata]) -> None:
        """Notes whom Kafka believes to live."""
        self._named = brokers

    def look(self) -> bool:
        """Tries each; returns whether one is away, and to be waited for."""
        named = self._named
        with ThreadPoolExecutor(min(_TRIED_AT_ONCE, max(1, len(named)))) as threads:
            are_there = [*threads.map(self._takes, named.values())]
        now_s = self._monotonic()
        before = self._away_since_s if now_s - self._looked_s < FORGOTTEN_S else {}
        self._looked_s = now_s
        away = (one for one, is_there in zip(named, are_there, strict=True) if not is_there)
        self._away_since_s = {one: before.get(one, now_s) for one in away}
        return any(now_s - since_s < WAITED_FOR_S for since_s in self._away_since_s.values())
