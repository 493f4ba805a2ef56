"""Errors in how messages are handled whose topics are in trouble, or that expire."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel_replica.cleaner.candidacy import Candidacy
from delaywheel_replica.cleaner.delivery import dead_letters
from delaywheel_replica.cleaner.delivery.bisection import Trial, TrialResult, _Lane
from delaywheel_replica.cleaner.delivery.dead_letters import DeadLetters, _Questions
from delaywheel_replica.cleaner.delivery.deferring import Patience
from delaywheel_replica.cleaner.delivery.expiring import find_expired
from delaywheel_replica.cleaner.delivery.forward import Forwarder
from delaywheel_replica.cleaner.delivery.troubles import (
    PATIENCE_S,
    Allowance,
    Troubles,
    sample_of,
    spread,
)
from delaywheel_replica.cleaner.due.rows import DueRows
from delaywheel_replica.core.protocol.progress import Progress
from sim.mutants.mutant import Mutant, Patch, everywhere, instead


def patience_after_patience() -> list[Patch]:
    real = Troubles.has_patience

    def has_patience(self: Troubles, name: str, now: float) -> bool:
        waiting = [n for n, each in self._of.items() if not (each.is_over or each.given_up)]
        if waiting and name != waiting[0]:
            self._of[name].since = now
        elif waiting and not real(self, name, now):
            self.give_up(name)
        return real(self, name, now)

    return [instead(Troubles, "has_patience", has_patience), *patience_for_each()]


def patience_begins_anew() -> list[Patch]:
    def left_ms(self: Patience, rows: DueRows, _now_ms: int) -> NDArray[np.int64]:
        return np.full(len(rows), self._of_ms(rows))

    return [instead(Patience, "left_ms", left_ms)]


def defers_whole_topics() -> list[Patch]:
    return [instead(Troubles, "is_partial", lambda *_: False)]


def patience_for_each() -> list[Patch]:
    return [instead(Allowance, "suffices", property(lambda _self: True))]


def believes_an_earlier_term() -> list[Patch]:
    return [instead(DeadLetters, "begin_term", lambda *_: None)]


def believes_old_answers() -> list[Patch]:
    return [instead(_Questions, "is_answered", lambda *_: True)]


def probes_go_anywhere() -> list[Patch]:
    return [everywhere(spread, lambda rows, _partitions: sample_of(rows))]


def new_leaders_try_first() -> list[Patch]:
    return [instead(dead_letters, "OVERDUE_S", 1e9)]


def new_leaders_look_at_their_first_step() -> list[Patch]:
    real = DeadLetters._suspected

    def suspected(self: DeadLetters, rows: DueRows, names: set[str], now: float) -> set[str]:
        return set() if self._searched else real(self, rows, names, now)

    return [instead(DeadLetters, "_suspected", suspected)]


def outages_are_failures() -> list[Patch]:
    real = DeadLetters.begin_term

    def begin_term(self: DeadLetters, progress: Progress | None) -> None:
        real(self, progress)
        self._lost_s = PATIENCE_S

    return [instead(DeadLetters, "begin_term", begin_term)]


def failures_cost_nothing() -> list[Patch]:
    return [instead(Allowance, "charge", lambda *_: None)]


def refused_guards_blame() -> list[Patch]:
    real = _Lane._try_with

    def try_with(self: _Lane, *trial: Any) -> Trial:
        ended = real(self, *trial)
        is_refused = ended.answer is TrialResult.UNGUARDED and ended.cause
        return Trial(TrialResult.REFUSED, ended.cause) if is_refused else ended

    return [instead(_Lane, "_try_with", try_with)]


def looks_at_its_topics_now_and_then() -> list[Patch]:
    return [instead(Candidacy, "look_soon", lambda _self: None)]


def unreadable_is_not_late() -> list[Patch]:
    return [instead(Forwarder, "oldest_waiting_ms", Forwarder.next_due_ms)]


def forwards_what_has_expired() -> list[Patch]:
    return [everywhere(find_expired, lambda *_: {})]


def lives_from_the_acceptance() -> list[Patch]:
    def find(rows: DueRows, now_ms: int, ttl_header: str) -> dict[int, str]:
        records = rows.records.copy()
        records["timestamp_ms"] = records["accepted_at_ms"]
        return find_expired(replace(rows, records=records), now_ms, ttl_header)

    return [everywhere(find_expired, find)]


def lives_by_the_usual_header() -> list[Patch]:
    return [everywhere(find_expired, lambda rows, now_ms, _: find_expired(rows, now_ms, "ttl"))]


TOPICS = {
    "looks at its topics now and then": Mutant(
        "a leader whose transactions fail does not look whether a topic of ours is the reason",
        looks_at_its_topics_now_and_then,
        "not which topic of ours",
        ("compacted_letters",),
    ),
    "unreadable is not late": Mutant(
        "messages that cannot be read are not overdue",
        unreadable_is_not_late,
        "reports no lateness",
        ("unread_for_long",),
    ),
    "probes go anywhere": Mutant(
        "a topic is used again once a probe went to another partition than what had failed",
        probes_go_anywhere,
        "held up the others",
        ("one_silent_partition",),
    ),
    "new leaders try first": Mutant(
        "a new leader tries what is overdue, though its predecessor may have failed with that",
        new_leaders_try_first,
        "held up the others",
        ("one_silent_topic",),
    ),
    "new leaders look at their first step": Mutant(
        "a new leader tries what was overdue, unless its first step holds it",
        new_leaders_look_at_their_first_step,
        "held up the others",
        ("silent_in_a_later_step",),
    ),
    "outages are failures": Mutant(
        "a topic that is late after an outage pays for it, and is given up at once",
        outages_are_failures,
        "which is well",
        ("late_after_an_outage",),
    ),
    "failures cost nothing": Mutant(
        "the wait for a topic begins when it is found, whatever others have waited until then",
        failures_cost_nothing,
        "held up the others",
        ("shrunk_at_a_due",),
    ),
    "refused guards blame": Mutant(
        "a search takes the refusal of its guard for one of the messages that it tried",
        refused_guards_blame,
        "which is well",
        ("refused_outcomes",),
    ),
    "forwards what has expired": Mutant(
        "nobody looks whether a message has expired",
        forwards_what_has_expired,
        "has expired",
        ("expired_meanwhile",),
    ),
    "lives from the acceptance": Mutant(
        "the time to live counts from the acceptance",
        lives_from_the_acceptance,
        "has not expired",
        ("expired_meanwhile",),
    ),
    "lives by the usual header": Mutant(
        "the time to live is read from `ttl`, whatever the setting names",
        lives_by_the_usual_header,
        "has not expired",
        ("expired_by_another_header",),
    ),
    "patience after patience": Mutant(
        "each topic's patience begins when that of the one before has ended",
        patience_after_patience,
        "held up everything",
        ("many_topics",),
    ),
    "patience begins anew": Mutant(
        "each time that a message is deferred, its patience begins again",
        patience_begins_anew,
        "is deferred as if for the first time",
        ("patience_ends",),
    ),
    "defers whole topics": Mutant(
        "one partition that takes nothing defers the messages for all others of its topic",
        defers_whole_topics,
        "and its topic is well",
        ("one_partition_away",),
    ),
    "patience for each": Mutant(
        "topics have no patience in common",
        patience_for_each,
        "held up everything",
        ("one_topic_after_another",),
    ),
    "believes an earlier term": Mutant(
        "a leader makes dead letters by what it learnt before another one led",
        believes_an_earlier_term,
        "which is well",
        ("mended_meanwhile",),
    ),
    "believes old answers": Mutant(
        "Kafka's word on a topic counts however old it is",
        believes_old_answers,
        "which is well",
        ("missing_for_a_moment",),
    ),
}
