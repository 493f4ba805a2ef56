"""A consumer's health: what keeps it from its work now, each trouble under a name of its own.

| trouble | begins | ends |
|---|---|---|
| KAFKA_AWAY | a question is not answered | it is answered |
| COMMIT_FAILED | a transaction is not committed | one is, or the partitions are reassigned |
| HELD_UP | two transactions in a row fail as a topic does not answer what they write | the |
|   | partitions that wait for it are committed |
| NO_INGRESS | at the start there is no ingress topic | there is |
| NO_TOPIC | a topic is deleted, or a pattern matches none | it is there, or one |
| TOPIC_UNREAD | the group's topics for one that a pattern matches are refused | they are not |
|   | refused, or it is gone |
| UNSETTLED | a partition's first record is in hand for `stuck_after` | it is settled |
| HANDLER_HANGS | a record is taken back after `handler_timeout` | its handler ends all the same |
| BACKOFF_FAILED | a function of `retry` raises, or returns no delay | it is called and does not |
| CIRCUIT_OPEN | with `breaker`, so many attempts have failed | a record that is tried is done |
| RECORD_BY_RECORD | whoever had a partition before has died with records of it in hand | these |
|   | have outcomes |
| PARTITION_UNREAD | with `ordered`, a partition lacks its counterpart | it is assigned with that |
| NO_LEADER | a partition, or with `ordered` that of its order topic, has no leader when it is |
|   | assigned, and where to begin in it is not known without | it is begun with |
| ORDER_UNREAD | with `ordered`, reading the order topics takes longer than 5 s | they are read |
| PARTITIONS_DIFFER | `ordered` or `keep_partition`, and the topic of retries has fewer | it has |
|   | as many |
| TRANSACTION_OPEN | a partition stands still behind a producer's open transaction | it goes on |
| NOT_AUTHORIZED | with `wait_for_rights`, a right is missing | it is there |
| STOPPED | an error has ended the consumer | never |
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class ConsumerTrouble(StrEnum):
    """What keeps a consumer from its work; names are stable."""

    KAFKA_AWAY = "KAFKA_AWAY"
    """Kafka does not answer, or not now: the consumer goes on when it does."""
    COMMIT_FAILED = "COMMIT_FAILED"
    """The last transaction was not committed, or perhaps not: it is tried again."""
    HELD_UP = "HELD_UP"
    """A topic takes no outcomes now: partitions that have some for it wait, the others do not."""
    NO_INGRESS = "NO_INGRESS"
    """There is no ingress topic yet: a node of the cluster makes it, and the consumer waits."""
    NO_TOPIC = "NO_TOPIC"
    """A topic that is named was deleted, or a pattern matches none that can be read."""
    TOPIC_UNREAD = "TOPIC_UNREAD"
    """A topic that a pattern matches is not read: the group cannot have its own topics for it."""
    UNSETTLED = "UNSETTLED"
    """A record is in hand for longer than `stuck_after`, and holds up its partition's commits."""
    HANDLER_HANGS = "HANDLER_HANGS"
    """A handler goes on for longer than `handler_timeout`; its record has failed by that."""
    BACKOFF_FAILED = "BACKOFF_FAILED"
    """The program's function of delays has failed: records are retried by the default list."""
    CIRCUIT_OPEN = "CIRCUIT_OPEN"
    """So many attempts have failed that one record is tried at a time: see `CircuitBreaker`."""
    RECORD_BY_RECORD = "RECORD_BY_RECORD"
    """Records are handed out one by one, as one of them may have ended the process before."""
    PARTITION_UNREAD = "PARTITION_UNREAD"
    """With `ordered`: a partition is not read without that of retries, or the reverse."""
    NO_LEADER = "NO_LEADER"
    """A partition is not begun with before it, or that of its order topic, has a leader."""
    ORDER_UNREAD = "ORDER_UNREAD"
    """With `ordered`: what is away is still being read, and nothing is handled before."""
    PARTITIONS_DIFFER = "PARTITIONS_DIFFER"
    """The topic of retries has fewer partitions than its source, and `ordered` or `keep_partition`
    needs as many: add partitions to it."""
    TRANSACTION_OPEN = "TRANSACTION_OPEN"
    """A producer has left a transaction open in what is read: nobody reads what comes after it."""
    NOT_AUTHORIZED = "NOT_AUTHORIZED"
    """These credentials lack a right, which is waited for: see `wait_for_rights`."""
    STOPPED = "STOPPED"
    """An error has ended the consumer: it is raised where messages are taken."""


class ConsumerHealth:
    """The troubles of one consumer; any thread may ask for them."""

    def __init__(self) -> None:
        """Begins well."""
        self._troubles: Mapping[ConsumerTrouble, str] = {}

    @property
    def is_well(self) -> bool:
        """Whether nothing keeps the consumer from its work."""
        return not self._troubles

    @property
    def troubles(self) -> Mapping[ConsumerTrouble, str]:
        """What keeps it from its work now, each in words for people."""
        return self._troubles

    def note(self, trouble: ConsumerTrouble, text: str | None) -> None:
        """Notes what is known about one trouble now; None: it is over."""
        others = {name: said for name, said in self._troubles.items() if name is not trouble}
        self._troubles = others if text is None else {**others, trouble: text}
