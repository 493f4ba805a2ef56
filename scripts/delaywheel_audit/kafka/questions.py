"""Asks Kafka about topics: answers come in bounded time, or errors by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # it is there
    AdminClient,
    ConfigResource,
    OffsetSpec,
)

from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_audit.kafka.errors import (
    REFUSALS,
    TOPIC_CODES,
    KafkaSourceError,
    Reason,
    final_reason,
)

Place: TypeAlias = tuple[str, int]
"""A topic and a partition."""

_Key = TypeVar("_Key")

_PAUSE_S = 0.1
# The error text if no named error occurred before.
_VAGUE = (KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT)
_FRESH_S = 5.0
"""A topic that was just created may be known to one broker and not yet to another."""

_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"


@dataclass(frozen=True, slots=True)
class TopicNow:
    """A topic's present state in Kafka."""

    topic_id: str | None
    """None: created before Kafka gave topics ids."""
    partitions: tuple[int, ...]


class Heard:
    """What a client reported on its own, beside its answers."""

    def __init__(self, client: ClientSettings) -> None:
        self._client = client
        self._last: KafkaError | None = None
        self._final: KafkaSourceError | None = None

    def listen(self, error: KafkaError) -> None:
        """Takes an error; for the client's `error_cb`."""
        if self._last is None or error.code() not in _VAGUE:
            self._last = error
        reason = REFUSALS.get(error.code())
        if reason is not None and self._final is None:
            self._final = self.as_error(reason, error)

    def check(self) -> None:
        """Raises errors that waiting does not help."""
        if self._final is not None:
            raise self._final

    def as_error(self, reason: Reason, error: KafkaError, *, about: str = "") -> KafkaSourceError:
        """Returns the client's error under our name."""
        text = self._client.masked(error.str())
        return KafkaSourceError(reason, f"{about}{': ' * bool(about)}{text} ({error.name()})")

    def away(self, timeout_s: float) -> KafkaSourceError:
        """Returns the error for a lack of answers."""
        where = self._client.bootstrap
        last = f"; the last it said: {self._client.masked(self._last.str())}" if self._last else ""
        return KafkaSourceError(
            Reason.BROKER_AWAY,
            f"nothing from Kafka at {where} for {timeout_s:.0f} s{last}; see that it runs and that "
            "it is reached from here with these kafka. settings, then run this again",
        )


def made(client: ClientSettings, make: Callable[[], Any]) -> Any:
    """Creates a Kafka client; only the library knows all settings and their values."""
    try:
        return make()
    except (KafkaException, TypeError, ValueError) as error:
        inner = error.args[0] if error.args else error
        text = inner.str() if isinstance(inner, KafkaError) else str(inner)
    # Outside of the handler: the library's text, perhaps with a secret, must go no further.
    raise KafkaSourceError(Reason.CLIENT_REFUSED, client.masked(text))


class KafkaQuestions:
    """Asks Kafka about topics."""

    def __init__(self, client: ClientSettings) -> None:
        self._timeout_s = client.timeout_s
        self._heard = Heard(client)
        settings = {**client.admin(), "error_cb": self._heard.listen}
        self._admin: AdminClient = made(client, lambda: AdminClient(settings))

    def describe(self, names: Collection[str]) -> dict[str, TopicNow | None]:
        """Returns the topics' present states; None for absent ones."""

        def ask(left: list[str], timeout_s: float) -> Mapping[str, Future[Any]]:
            return self._admin.describe_topics(TopicCollection(left), request_timeout=timeout_s)

        missing = TOPIC_CODES | {KafkaError.TOPIC_EXCEPTION}
        found: dict[str, TopicNow | None] = {}
        for name, answer in self._answers(names, ask, final_codes=missing).items():
            found[name] = None if isinstance(answer, KafkaError) else _topic_of(answer)
        return found

    def compacted(self, names: Collection[str]) -> set[str]:
        """Returns which topics are compacted, except those whose settings may not be read."""
        resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]

        def ask(
            left: list[ConfigResource], timeout_s: float
        ) -> Mapping[ConfigResource, Future[Any]]:
            return self._admin.describe_configs(left, request_timeout=timeout_s)

        unknown = TOPIC_CODES | {KafkaError.TOPIC_AUTHORIZATION_FAILED}
        return {
            resource.name
            for resource, answer in self._answers(resources, ask, final_codes=unknown).items()
            if not isinstance(answer, KafkaError)
            and "compact" in str(answer["cleanup.policy"].value).split(",")
        }

    def earliest(self, places: Iterable[Place]) -> dict[Place, int]:
        """Returns the first existing offsets."""
        return self._offsets(places, _spec("earliest"), IsolationLevel.READ_UNCOMMITTED)

    def stable_ends(self, places: Iterable[Place]) -> dict[Place, int]:
        """Returns where the first unfinished transaction begins, or else the end."""
        return self._offsets(places, _spec("latest"), IsolationLevel.READ_COMMITTED)

    def log_ends(self, places: Iterable[Place]) -> dict[Place, int]:
        """Returns the ends, including records of open transactions."""
        return self._offsets(places, _spec("latest"), IsolationLevel.READ_UNCOMMITTED)

    def latest(self, places: Iterable[Place]) -> dict[Place, int]:
        """Returns the offsets of the records with the greatest timestamps; -1: there is none."""
        return self._offsets(places, _spec("max_timestamp"), IsolationLevel.READ_UNCOMMITTED)

    def first_since(self, places: Iterable[Place], timestamp_ms: int) -> dict[Place, int | None]:
        """Returns the first offset with this timestamp or a later one; None if there is none."""
        spec = _spec("for_timestamp", timestamp_ms)
        found = self._offsets(places, spec, IsolationLevel.READ_COMMITTED)
        return {place: None if offset < 0 else offset for place, offset in found.items()}

    def times_since(self, places: Iterable[Place], timestamp_ms: int) -> dict[Place, int | None]:
        """Returns the timestamp of the first record with this one or a later one; None: none."""
        spec = _spec("for_timestamp", timestamp_ms)
        found = self._listed(places, spec, IsolationLevel.READ_UNCOMMITTED)
        return {place: one.timestamp if one.offset >= 0 else None for place, one in found.items()}

    def _offsets(
        self, places: Iterable[Place], spec: OffsetSpec, isolation: IsolationLevel
    ) -> dict[Place, int]:
        return {place: one.offset for place, one in self._listed(places, spec, isolation).items()}

    def _listed(
        self, places: Iterable[Place], spec: OffsetSpec, isolation: IsolationLevel
    ) -> dict[Place, Any]:
        is_again = False

        def ask(left: list[Place], timeout_s: float) -> Mapping[Place, Future[Any]]:
            nonlocal is_again
            if is_again:  # after an election it asks with the former epoch until it has looked
                with suppress(KafkaException):
                    self._admin.list_topics(timeout=timeout_s)
            is_again = True
            futures = self._admin.list_offsets(
                {TopicPartition(*place): spec for place in left},
                isolation_level=isolation,
                request_timeout=timeout_s,
            )
            return {(key.topic, key.partition): future for key, future in futures.items()}

        return self._answers(places, ask)

    def _answers(
        self,
        keys: Iterable[_Key],
        ask: Callable[[list[_Key], float], Mapping[_Key, Future[Any]]],
        *,
        final_codes: Collection[int] = (),
    ) -> dict[_Key, Any]:
        """Returns answers to all; an error with one of `final_codes` counts as an answer."""
        left = list(keys)
        began = time.monotonic()
        answers: dict[_Key, Any] = {}
        while left:
            timeout_s = max(1.0, began + self._timeout_s - time.monotonic())
            for key, future in self._done(ask(left, timeout_s)).items():
                try:
                    answers[key] = future.result()
                except KafkaException as exception:
                    error: KafkaError = exception.args[0]
                    if error.code() in final_codes:
                        answers[key] = error
                    else:
                        self._judge(error, key, time.monotonic() - began)
            left = [key for key in left if key not in answers]
            if left:
                time.sleep(_PAUSE_S)
        return answers

    def _done(self, futures: Mapping[_Key, Future[Any]]) -> Mapping[_Key, Future[Any]]:
        """Waits as long as the client allows; errors that it reports may end the wait."""
        while wait(futures.values(), timeout=_PAUSE_S).not_done:
            self._admin.poll(0)
            self._heard.check()
        self._admin.poll(0)
        self._heard.check()
        return futures

    def _judge(self, error: KafkaError, about: object, waited_s: float) -> None:
        """Raises unless asking again makes sense."""
        self._refuse(error, about)
        if error.code() in TOPIC_CODES and waited_s >= min(_FRESH_S, self._timeout_s):
            raise KafkaSourceError(
                Reason.TOPIC_GONE, f"{about}: was there, and Kafka does not know it any more"
            )
        if waited_s >= self._timeout_s:
            self._heard.listen(error)
            raise self._heard.away(self._timeout_s)

    def _refuse(self, error: KafkaError, about: object = "") -> None:
        self._admin.poll(0)
        self._heard.check()
        if (reason := final_reason(error)) is not None:
            raise self._heard.as_error(reason, error, about=str(about))


def _topic_of(description: Any) -> TopicNow:
    topic_id = str(description.topic_id)
    return TopicNow(
        topic_id=None if topic_id == _NO_ID else topic_id,
        partitions=tuple(sorted(partition.id for partition in description.partitions)),
    )


def _spec(name: str, *arguments: int) -> OffsetSpec:
    spec: OffsetSpec = getattr(OffsetSpec, name)(*arguments)
    return spec
