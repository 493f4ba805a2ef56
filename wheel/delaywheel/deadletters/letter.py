"""A dead letter as it lies in its topic, and the record that it is sent again as.

A letter is the message, followed by headers that begin with `dw-dead-`; if several headers share a
name, the last counts. `dw-dead-topic` names its destination. A record of an ingress topic that
could not be delayed has none, but a `dw-dead-origin`: it goes back to where it came from.

| header | sent again |
|---|---|
| `dw-dead-…` | no |
| `dw-id`, `dw-due`, `dw-accepted`, `dw-wheel`, `dw-forwarded`, `dw-committed` | no: the copy is not an accepted message. To an ingress topic yes: a `dw-id` there was its sender's |
| `dw-half…`, of a letter that asks about a half message | no: sent elsewhere it is the message. To the group's retry topic yes: it is asked again; so is one that nobody could be asked with, and then the row above is a yes, too |
| any other | yes |
| `dw-dead-replayed` | added: `<topic>/<partition>/<offset>` of the letter |
| `dw-retry-root` | added where the replay is traced |

A letter of a consumer group that goes to the group's retry topic keeps all its own headers, and is
what its next retry would be: the attempt counts on, and the origin, its timestamp and the errors are
those of the record. A letter that lacks something (`dw-dead-omitted`) is made whole from its origin
first; `origin.py` has that.
"""  # noqa: E501 - rows of a table

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from delaywheel.headers import content_bytes
from delaywheel.record_headers import (
    DEAD_PREFIX,
    DELIVERED_HEADERS,
    HALF_GROUP,
    HALF_TOPIC,
    OMITTED_HEADER,
    RETRY_ATTEMPT,
    RETRY_FIRST_ERROR,
    RETRY_KEPT,
    RETRY_LAST_ERROR,
    RETRY_ORIGIN,
    RETRY_ORIGIN_TIMESTAMP,
    RETRY_ROOT,
    number_of,
    place_of,
)
from delaywheel.transactional import ANY_PARTITION, Outgoing
from delaywheel.ways.roots import own_root, root_in

LetterHeaders = tuple[tuple[str, bytes | None], ...]

REPLAYED_HEADER = "dw-dead-replayed"
_KEPT_BY_RETRIES = {
    "dw-dead-origin": RETRY_ORIGIN,
    "dw-dead-origin-timestamp": RETRY_ORIGIN_TIMESTAMP,
    "dw-dead-first-error": RETRY_FIRST_ERROR,
    "dw-dead-detail": RETRY_LAST_ERROR,
}
LONGEST_REASON = 64
"""How many characters of a reason count."""

_PLACE = re.compile(r"(\d{1,10}):(\d{1,19})")


class LetterPlace(NamedTuple):
    """The position of a letter in its topic; its text is `<partition>:<offset>`."""

    partition: int
    offset: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the text of a place; raises ValueError for any other."""
        match = _PLACE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not <partition>:<offset>")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


class Origin(NamedTuple):
    """Where a letter's record lies, and its timestamp; None: it has none."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int | None

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter.

    Attributes:
        timestamp_ms: When it became one, in Unix milliseconds.
        dw_headers: What the headers that begin with `dw-` say, the last of each name.
    """

    place: LetterPlace
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: LetterHeaders
    dw_headers: dict[str, bytes] = field(init=False)

    def __post_init__(self) -> None:
        """Reads the headers."""
        dw_headers = {name: value or b"" for name, value in self.headers if name.startswith("dw-")}
        object.__setattr__(self, "dw_headers", dw_headers)

    @property
    def reason(self) -> str:
        """Why the message became a dead letter; empty if the letter does not say."""
        return self._text("dw-dead-reason")[:LONGEST_REASON]

    @property
    def detail(self) -> str:
        """The reason in more detail; empty if there is none."""
        return self._text("dw-dead-detail")

    @property
    def id(self) -> str:
        """The message's id in hex; empty if it has none."""
        return self._text("dw-id").replace("-", "").lower()

    @property
    def due_ms(self) -> int | None:
        """When the message was due; None if the letter does not say."""
        return number_of(self.dw_headers.get("dw-due"))

    @property
    def is_of_ingress(self) -> bool:
        """Whether it is a record of an ingress topic that could not be delayed."""
        return "dw-dead-topic" not in self.dw_headers and "dw-dead-origin" in self.dw_headers

    @property
    def topic(self) -> str:
        """The topic that the message was meant for; empty if the letter does not say."""
        if self.is_of_ingress:
            return self._text("dw-dead-origin").partition("/")[0]
        return self._text("dw-dead-topic")

    @property
    def destination(self) -> str:
        """Where the message goes once all is well: for a half message, where its commit sends it.

        A letter about a half goes to the topic of the questions first: it is asked about again.
        """
        return self._text(HALF_TOPIC) or self.topic

    @property
    def is_of_group(self) -> bool:
        """Whether a consumer group has made it, of a record that it reads."""
        return "dw-dead-group" in self.dw_headers and not self.is_of_ingress

    @property
    def is_unasked(self) -> bool:
        """Whether it is a letter about a half message with which nobody could be asked."""
        return HALF_TOPIC in self.dw_headers and not self.is_of_group

    @property
    def group(self) -> str:
        """The consumer group that has made it; empty: none has."""
        return self._text("dw-dead-group")

    @property
    def root(self) -> bytes | None:
        """Where the way of its message began: the text of an id or of a place; None: unknown."""
        origin = self.dw_headers.get("dw-dead-origin")
        place = origin if place_of(origin) is not None else None
        # A group's letter has its record's headers as that was first read.
        before = None if self.is_of_group else root_in(self.dw_headers, is_retry=True)
        return before or own_root(self.dw_headers, place)

    @property
    def omitted(self) -> frozenset[str]:
        """What it lacks of its record: `value`, `headers`, `key`."""
        return frozenset(filter(None, self._text(OMITTED_HEADER).split(",")))

    @property
    def origin(self) -> Origin | None:
        """Where its record lies; None if the letter does not say."""
        place = place_of(self.dw_headers.get("dw-dead-origin"))
        timestamp_ms = number_of(self.dw_headers.get("dw-dead-origin-timestamp"))
        return None if place is None else Origin(*place, timestamp_ms)

    @property
    def topics(self) -> frozenset[str]:
        """The topics it is found by: where it goes, and of a group's letter where its record lies.

        The group's retry topic, where it goes, is no name that people look for.
        """
        found = {self.topic, self.destination}
        if self.is_of_group and self.origin is not None:
            found.add(self.origin.topic)
        return frozenset(found)

    @property
    def own_headers(self) -> list[tuple[str, bytes | None]]:
        """The headers that the message is sent again with."""
        is_whole = self.is_of_ingress or self.is_of_group
        left_out = frozenset() if is_whole else DELIVERED_HEADERS
        return [
            (name, value)
            for name, value in self.headers
            if not name.startswith(DEAD_PREFIX) and name not in left_out
        ]

    @property
    def length_bytes(self) -> int:
        """The size of key, value and headers."""
        return content_bytes(self.key, self.value, self.headers)

    def completed(self, record: Outgoing) -> Letter:
        """Returns the letter with what it lacks of its record."""
        headers = self.headers
        if "headers" in self.omitted:
            own = (each for each in record.headers if not each[0].startswith(DEAD_PREFIX))
            headers = (*own, *headers)
        return replace(
            self,
            key=record.key if "key" in self.omitted else self.key,
            value=record.value if "value" in self.omitted else self.value,
            headers=headers,
        )

    def again(
        self, of_topic: str, *, to: str | None, as_new: bool, is_traced: bool = False
    ) -> Outgoing:
        """Returns the record that sends the message again, to its own topic unless `to` is another.

        `as_new`: without the partition and timestamp that the message was given; `is_traced`: with
        the root of its way.
        """
        partition, timestamp_ms = None, None
        if not as_new:
            timestamp_ms = number_of(self.dw_headers.get("dw-dead-timestamp"))
            if to is None:
                partition = number_of(self.dw_headers.get("dw-dead-partition"), bits=31)
        replayed = f"{of_topic}/{self.place.partition}/{self.place.offset}".encode()
        return Outgoing(
            self.topic if to is None else to,
            self.key,
            self.value,
            [*self._sent(to, as_new=as_new, is_traced=is_traced), (REPLAYED_HEADER, replayed)],
            ANY_PARTITION if partition is None else partition,
            timestamp_ms or 0,
        )

    def _sent(
        self, to: str | None, *, as_new: bool, is_traced: bool
    ) -> list[tuple[str, bytes | None]]:
        """Returns the record's headers, and for its group what a retry says about itself."""
        if self.is_unasked and to is None:
            return [each for each in self.headers if not each[0].startswith(DEAD_PREFIX)]
        root = self.root if is_traced else None
        own = [*self.own_headers, *([] if root is None else [(RETRY_ROOT, root)])]
        if self.is_of_ingress:
            return own
        if not self.is_of_group or to is not None:
            return [
                each
                for each in own
                if each[0] not in DELIVERED_HEADERS and not each[0].startswith(HALF_GROUP)
            ]
        sent = [
            (f"{RETRY_KEPT}{name}" if name.startswith("dw-") else name, value)
            for name, value in own
        ]
        if not as_new and self.origin is not None:
            attempts = number_of(self.dw_headers.get("dw-dead-attempts"), bits=31) or 0
            sent.append((RETRY_ATTEMPT, b"%d" % (attempts + 1)))
            sent += [
                (retry, self.dw_headers[dead])
                for dead, retry in _KEPT_BY_RETRIES.items()
                if dead in self.dw_headers
            ]
        return sent

    def _text(self, name: str) -> str:
        return self.dw_headers.get(name, b"").decode(errors="replace")
