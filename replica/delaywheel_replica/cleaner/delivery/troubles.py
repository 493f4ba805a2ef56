"""Topics in trouble, which accept nothing, and how long they may delay other topics.

| a topic is in trouble | because | it is over when |
|---|---|---|
| by Kafka's word | it has no leader, too few replicas in sync, or is denied to us | Kafka says so |
| by a search | a trial transaction was not answered, or refused whatever was tried | a probe, which
              is such a trial, goes through, or Kafka says that the topic does not exist |

Where Kafka says which partitions take nothing, only messages for these are in trouble. To a search
a topic counts as a whole: one partition that does not answer is a trouble of its topic. So probes
write to every partition that the messages may go to; a message that happens to go to another
partition than those that failed ends nothing. (While it did, one silent partition made messages for
healthy topics up to 98 s late.)

Messages that can be deferred (deferring.py) hold up no others: they are, as soon as the trouble is
known. Where they cannot, two clocks bound the waiting:

* Each topic has `PATIENCE_S` from the moment at which its trouble was first seen: when Kafka said
  so, which may be before a message for it was due, or when the transaction began that failed, less
  the time in which others went through. Spells of one topic add up until it was well for
  `RECENT_S`, so one that comes and goes is waited for once.
* All topics together have an allowance of `PATIENCE_S`, which is regained within `REGAIN_S`. What
  failed transactions, elections and searches cost before a topic was found, by a search or in
  Kafka's answers, is taken from it; not what passed before a term if it was `PATIENCE_S` or more,
  as after an outage. So however many are in trouble, and whenever each begins, others are held up
  for 5 s, and from then on 5 s a minute at most, beside the time that it takes to find a topic.

When either is used up, the messages of a topic in trouble are dead letters. The topic counts as
*given up* as soon as they are, or are deferred. Only trials of this
term make dead letters: another leader may have mended the trouble meanwhile. Of the troubles of an
earlier term only the patience that they used up is remembered, and that for `RECENT_S`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from delaywheel_replica.cleaner.delivery.topics import Topic, TopicState
from delaywheel_replica.cleaner.due.rows import DueRows, join_rows
from delaywheel_replica.cleaner.outside.ports import ANY_PARTITION, NOW
from delaywheel_replica.core.protocol.status_files import UnavailableTopic

PATIENCE_S = 5.0
REGAIN_S = 60.0
LEAST_HOLD_S = 1.0
"""How much of the allowance must be there before others are delayed again."""
RECENT_S = 60.0
SHORT_S = 0.5
"""A spell that was shorter is not remembered."""
DOUBTED_S = 5.0
"""So long Kafka is not believed that a topic is well for which a transaction was just given up: its
brokers learn one after another that one has left, and each such transaction costs an id."""
UNNEEDED_S = 600.0
"""A topic without messages for this long is forgotten."""
FIRST_PROBE_S = 1.0
LAST_PROBE_S = 30.0
SAMPLE_KEY_BYTES = 4_096

TAKES_NOTHING = (TopicState.LEADERLESS, TopicState.SHRUNK, TopicState.DENIED)


class Allowance:
    """How long topics in trouble, all together, may still hold up others."""

    def __init__(self, now: float) -> None:
        self._left_s = PATIENCE_S
        self._at = now
        self._charged_to = now
        self._holding = False

    def pass_time(self, now: float) -> None:
        """Accounts for the time since the last call, in which other topics were held up or not."""
        passed_s, self._at = max(0.0, now - self._at), now
        if self._holding:
            self._left_s = max(0.0, self._left_s - passed_s)
            self._charged_to = now
        else:
            self._left_s = min(PATIENCE_S, self._left_s + passed_s * PATIENCE_S / REGAIN_S)

    def charge(self, since: float, now: float) -> None:
        """Accounts for time in which others were held up by topics that only now are known."""
        self._left_s = max(0.0, self._left_s - max(0.0, now - max(since, self._charged_to)))
        self._charged_to = now

    @property
    def suffices(self) -> bool:
        """Whether others may be held up now."""
        return self._left_s > 0 if self._holding else self._left_s >= LEAST_HOLD_S

    def hold(self, *, holding: bool) -> None:
        """Sets whether others are held up from now on."""
        self._holding = holding


@dataclass(slots=True)
class _Trouble:
    """A topic that accepts nothing, or recently did not.

    Attributes:
        since: When its trouble began, with all spells joined.
        needed_at: When a message for it was last examined.
        ended_at: When it recovered; None: it has not.
        sample: What to probe with; None: Kafka itself reports the end.
        by_kafka: Kafka also said that it accepts nothing.
        given_up: Messages for it are deferred, or dead letters.
        partitions: Those that take nothing by Kafka's word, and since when; none: that is not
            known.
        doubted_until: Until when Kafka is not believed that it is well.
    """

    since: float
    cause: str
    needed_at: float
    ended_at: float | None = None
    sample: DueRows | None = None
    by_kafka: bool = False
    given_up: bool = False
    partitions: Mapping[int, float] = field(default_factory=dict)
    deferred: int = 0
    doubted_until: float = 0.0
    probe_at: float = 0.0
    pause_s: float = FIRST_PROBE_S

    @property
    def is_over(self) -> bool:
        return self.ended_at is not None


class Troubles:
    """All topics in trouble, as known to one leader."""

    def __init__(self) -> None:
        self._of: dict[str, _Trouble] = {}

    def begin_term(self, now: float) -> set[str]:
        """Forgets what an earlier term has learnt; returns the topics that accepted nothing."""
        suspects = set()
        for name, trouble in self._of.items():
            if trouble.is_over:
                continue
            if trouble.sample is not None and now - trouble.needed_at < RECENT_S:
                suspects.add(name)
            trouble.ended_at, trouble.sample = max(trouble.since, trouble.needed_at), None
            trouble.partitions = {}
        self.prune(now)
        return suspects

    def look(self, topics: Mapping[str, Topic], now: float) -> None:
        """Takes Kafka's answers about topics that are needed now or soon."""
        for name, topic in topics.items():
            trouble = self._of.get(name)
            if topic.state in TAKES_NOTHING:
                begun = self._begin(name, topic.state.value, now, since=now)
                known, begun.by_kafka = begun.partitions, True
                begun.partitions = {each: known.get(each, now) for each in topic.troubled}
            elif trouble is not None and not trouble.is_over:
                trouble.needed_at = now
                if topic.state is TopicState.PRESENT and now < trouble.doubted_until:
                    continue
                if trouble.sample is None or topic.state is not TopicState.PRESENT:
                    self._end(name, now)
                elif trouble.by_kafka:  # Kafka has repaired something: see whether that was it
                    trouble.by_kafka, trouble.probe_at, trouble.pause_s = False, now, FIRST_PROBE_S

    def found(self, name: str, cause: str, sample: DueRows, now: float, since: float) -> None:
        """Notes that a search found a topic that accepts nothing."""
        trouble = self._begin(name, cause, now, since=since)
        trouble.cause, trouble.sample = cause, sample_of(sample)
        trouble.probe_at, trouble.pause_s = now + FIRST_PROBE_S, FIRST_PROBE_S

    def doubt(self, name: str, now: float) -> None:
        """Notes that a transaction is given up for a topic in trouble."""
        self._of[name].doubted_until = now + DOUBTED_S

    @property
    def are_there(self) -> bool:
        """Whether some topic is in trouble."""
        return any(not trouble.is_over for trouble in self._of.values())

    def cause(self, name: str) -> str | None:
        """Returns why a topic accepts nothing; None if, as far as is known, it works."""
        trouble = self._of.get(name)
        return None if trouble is None or trouble.is_over else trouble.cause

    def is_partial(self, name: str) -> bool:
        """Whether a topic in trouble may be well in part: all that is known is Kafka's word."""
        trouble = self._of.get(name)
        return trouble is not None and not trouble.is_over and trouble.sample is None

    def waited_ms(self, name: str, now: float) -> int:
        """Returns for how long a topic has taken nothing; 0: it is in no trouble.

        By Kafka's word that is one of the partitions which take nothing now: while brokers are
        restarted in turn, others did before.
        """
        trouble = self._of.get(name)
        if trouble is None or trouble.is_over:
            return 0
        is_partial = trouble.sample is None and trouble.partitions
        since = min(trouble.partitions.values()) if is_partial else trouble.since
        return round((now - max(since, now - UNNEEDED_S)) * 1000)

    def has_patience(self, name: str, now: float) -> bool:
        """Whether a topic is in trouble and may still be waited for."""
        trouble = self._of.get(name)
        if trouble is None or trouble.is_over or trouble.given_up:
            return False
        return now - trouble.since < PATIENCE_S

    def give_up(self, name: str) -> None:
        """Defers a topic's messages, or makes dead letters of them, until it works again."""
        if name in self._of:
            self._of[name].given_up = True

    def defer(self, messages: Mapping[str, int]) -> None:
        """Counts messages that were deferred, by topic."""
        for name in messages.keys() & self._of.keys():
            self._of[name].deferred += messages[name]

    def given_up(self, now: float, now_ms: int) -> tuple[UnavailableTopic, ...]:
        """Returns the topics whose messages are deferred, or become dead letters."""
        return tuple(
            UnavailableTopic(
                name,
                tuple(sorted(trouble.partitions)) if trouble.sample is None else (),
                now_ms - self.waited_ms(name, now),
                trouble.cause,
                trouble.deferred,
            )
            for name, trouble in sorted(self._of.items())
            if trouble.given_up and not trouble.is_over
        )

    def probes(self, now: float) -> DueRows | None:
        """Returns which topics to try, to see whether they work again; None if none."""
        due = [t for t in self._of.values() if t.sample is not None and t.probe_at <= now]
        samples = [t.sample for t in due if t.sample is not None]
        return join_rows(samples, samples[-1].wheels) if samples else None

    def probed(
        self, passed: Iterable[str], failed: Iterable[str], untold: Iterable[str], now: float
    ) -> None:
        """Takes the results of probes, by topics.

        Of those in `untold` the trial said nothing: Kafka did not take its guard.
        """
        for name in passed:
            self._end(name, now)
        for name in failed:
            trouble = self._of.get(name)
            if trouble is not None and trouble.sample is not None:
                trouble.pause_s = trouble.pause_s * 2 if trouble.given_up else FIRST_PROBE_S
                trouble.probe_at = now + min(trouble.pause_s, LAST_PROBE_S)
        for name in untold:
            trouble = self._of.get(name)
            if trouble is not None:
                trouble.probe_at = now + min(trouble.pause_s, LAST_PROBE_S)

    def prune(self, now: float) -> None:
        """Forgets troubles that are long over, or whose topics are no longer needed."""
        for name, trouble in list(self._of.items()):
            ended_at = trouble.ended_at
            is_past = ended_at is not None and now - ended_at > RECENT_S
            if is_past or now - trouble.needed_at > UNNEEDED_S:
                del self._of[name]

    def _begin(self, name: str, cause: str, now: float, *, since: float) -> _Trouble:
        trouble = self._of.get(name)
        if trouble is None:
            trouble = self._of[name] = _Trouble(since, cause, now)
        elif trouble.ended_at is not None:
            trouble.since += since - trouble.ended_at
            trouble.ended_at, trouble.cause, trouble.given_up = None, cause, False
            trouble.deferred = 0
        trouble.needed_at = now
        return trouble

    def _end(self, name: str, now: float) -> None:
        trouble = self._of.get(name)
        if trouble is None or trouble.is_over:
            return
        if now - trouble.since < SHORT_S:
            del self._of[name]
        else:
            trouble.ended_at, trouble.sample, trouble.by_kafka = now, None, False
            trouble.partitions = {}


def sample_of(rows: DueRows) -> DueRows:
    """Returns the smallest messages that test a topic as these rows do: a key, and partitions.

    There is one for each partition that callers named; if one of them named none, there is another
    one that goes anywhere, or everywhere (`spread`). They keep no map of a slot file alive, and are
    small whatever callers send.
    """
    shortest = int(rows.records["key_length"].argmin())
    sample = rows.take(slice(shortest, shortest + 1))
    (record,) = sample
    key = None if record.key is None else record.key[:SAMPLE_KEY_BYTES]
    partitions = np.unique(rows.partitions)
    records = sample.records.repeat(len(partitions))
    records["partition"] = partitions
    records["key_length"] = -1 if key is None else len(key)
    records["value_length"] = records["headers_length"] = 0
    records["topic"] = records["blob"] = records["start"] = 0
    records["timestamp_ms"] = NOW
    return replace(sample, records=records, topics=(record.topic,), blobs=[memoryview(key or b"")])


def spread(rows: DueRows, partitions: int) -> DueRows:
    """Returns samples of one topic's messages for every partition that these may go to.

    The topic has so many, or 0 if that is not known.
    """
    sample = sample_of(rows)
    anywhere = sample.partitions == ANY_PARTITION
    if not (anywhere.any() and partitions):
        return sample
    records = sample.records[:1].repeat(partitions)
    records["partition"] = np.arange(partitions)
    return replace(sample, records=records)
