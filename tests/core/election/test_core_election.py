"""The election machine alone, with its tables."""

from collections.abc import Callable
from typing import Any

import pytest

from delaywheel_replica.core.election.events import (
    CANDIDATE,
    ENDINGS,
    IN_TERM,
    TRANSITIONS,
    BecomeLeader,
    CommitMark,
    ControlRead,
    DestroyProducers,
    ElectionPhase,
    ElectionTick,
    EndReason,
    Event,
    IdleCommit,
    InitFailed,
    InitProducers,
    InitsDone,
    MarkReport,
    ReadControl,
    ReadFailed,
    StartForwarding,
    Stop,
    TransactionReport,
)
from delaywheel_replica.core.election.machine import (
    IDLE_COMMIT_MS,
    LASTING_MS,
    MAX_SILENCE_MS,
    MIN_SILENCE_MS,
    RANK_MS,
    Election,
    ElectionConfig,
)
from delaywheel_replica.core.protocol.control import (
    ControlState,
    LeftOut,
    leader_record,
    left_out_record,
)
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import Role
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState

WALL_MS = 1_000_000
START_MS = 5_000
ENDED = (
    TransactionState.COMMITTED,
    TransactionState.COMMITTED_LOOSE,
    TransactionState.ABORTED,
    TransactionState.ABANDONED,
    TransactionState.UNKNOWN,
    TransactionState.FENCED,
)
UNFIT = (EndReason.CLOCK_OFF, EndReason.HANDED_OVER, EndReason.TAKEN_OUT)


def tick(
    now_ms: int,
    *,
    server_fresh: bool = True,
    holds_progress: bool = True,
    due_ms: int | None = 0,
    wall_ms: int | None = None,
    **more: Any,
) -> ElectionTick:
    wall_ms = WALL_MS + now_ms if wall_ms is None else wall_ms
    return ElectionTick(now_ms, wall_ms, server_fresh, holds_progress, due_ms, **more)


def control(token: str, *, due_ms: int | None = 0, tokens: int = 2) -> ControlState:
    state = ControlState(progress=None if due_ms is None else Progress(due_ms, None))
    for index in range(tokens):
        state = state.apply(*leader_record(index, "a", token), 40 + index)
    return state


def standby(*, nodes: int = 1, required: int | None = None, rank: int = 0) -> Election:
    required = nodes // 2 + 1 if required is None else required
    return Election(ElectionConfig(run="r", nodes=nodes, required=required, rank=rank))


def asking() -> Election:
    """The first of three nodes, whose turn has come."""
    election = standby(nodes=3)
    election.step(tick(START_MS - 2 * MIN_SILENCE_MS))
    election.step(tick(START_MS - RANK_MS))
    assert election.step(tick(START_MS)) == []
    assert election.phase is ElectionPhase.ASKING
    return election


def with_votes(election: Election, now_ms: int, *nodes: str) -> ElectionTick:
    request = election.prevote_request
    round_ = 0 if request is None else request.round
    return tick(now_ms, votes=frozenset(nodes), vote_round=round_)


def initialising() -> Election:
    election = standby()
    assert election.step(tick(START_MS)) == [InitProducers("r-1")]
    return election


def marking() -> Election:
    election = initialising()
    assert election.step(InitsDone(START_MS, "r-1")) == [CommitMark("r-1", 0)]
    return election


def reading() -> Election:
    election = marking()
    assert election.step(MarkReport(START_MS, "r-1", 0, TransactionState.COMMITTED)) == [
        CommitMark("r-1", 1)
    ]
    assert election.step(MarkReport(START_MS, "r-1", 1, TransactionState.COMMITTED)) == [
        ReadControl("r-1")
    ]
    return election


def resting() -> Election:
    election = reading()
    state = control("r-1")
    assert election.step(ControlRead(START_MS, "r-1", state)) == [BecomeLeader(41, state)]
    return election


def leading() -> Election:
    election = resting()
    assert election.step(tick(START_MS)) == [StartForwarding()]
    return election


def stopped() -> Election:
    election = standby()
    assert election.step(Stop(0)) == []
    return election


IN_PHASE: dict[ElectionPhase, Callable[[], Election]] = {
    ElectionPhase.STANDBY: standby,
    ElectionPhase.ASKING: asking,
    ElectionPhase.INITIALISING: initialising,
    ElectionPhase.MARKING: marking,
    ElectionPhase.READING: reading,
    ElectionPhase.RESTING: resting,
    ElectionPhase.LEADING: leading,
    ElectionPhase.STOPPED: stopped,
}


def events(election: Election, token: str, mark: int) -> list[Event]:
    """Every kind of event in every variant that a table distinguishes."""
    now_ms = START_MS + 1
    return [
        tick(now_ms),
        with_votes(election, now_ms, "b"),
        tick(now_ms, heard_ms=now_ms),
        *(tick(now_ms, unfit=reason) for reason in UNFIT),
        tick(now_ms, server_fresh=False),
        tick(now_ms, holds_progress=False),
        tick(now_ms, hears_enough=False),
        tick(now_ms, overtaken=True),
        tick(now_ms, wall_ms=0),
        tick(now_ms + MAX_SILENCE_MS),
        InitsDone(now_ms, token),
        *(
            InitFailed(now_ms, token, verdict)
            for verdict in (TransactionState.UNKNOWN, TransactionState.FENCED)
        ),
        InitFailed(now_ms, token, TransactionState.UNKNOWN, touched=False),
        *(MarkReport(now_ms, token, mark, verdict) for verdict in ENDED),
        *(ControlRead(now_ms, token, control(t)) for t in ("r-1", "other")),
        ControlRead(now_ms, token, control(token, tokens=1)),
        ControlRead(now_ms, token, control(token), incomplete=True),
        ReadFailed(now_ms, token),
        *(TransactionReport(now_ms, token, verdict) for verdict in ENDED),
        Stop(now_ms),
    ]


def test_every_phase_takes_every_event_as_the_table_says() -> None:
    seen: dict[tuple[ElectionPhase, type[Event]], set[ElectionPhase]] = {
        key: set() for key in TRANSITIONS
    }
    makers = [*IN_PHASE.items(), (ElectionPhase.STANDBY, ready)]
    for phase, make in makers:
        for mark in (0, 1):
            for event in events(make(), "r-1", mark):
                election = make()
                if mark == 1 and phase is ElectionPhase.MARKING:
                    election.step(MarkReport(START_MS, "r-1", 0, TransactionState.COMMITTED))
                assert election.phase is phase
                effects = election.step(event)
                if (phase, type(event)) in TRANSITIONS:
                    seen[phase, type(event)].add(election.phase)
                else:
                    assert (election.phase, effects) == (phase, [])
    assert seen == {key: set(phases) for key, phases in TRANSITIONS.items()}


@pytest.mark.parametrize(
    "phase", [phase for phase in ElectionPhase if phase is not ElectionPhase.STOPPED]
)
def test_another_candidacys_events_change_nothing(phase: ElectionPhase) -> None:
    for event in events(IN_PHASE[phase](), "r-0", 0):
        if not isinstance(event, ElectionTick | Stop):
            election = IN_PHASE[phase]()
            assert election.step(event) == []
            assert election.phase is phase


def test_a_mark_that_is_not_the_next_changes_nothing() -> None:
    election = marking()
    assert election.step(MarkReport(START_MS, "r-1", 1, TransactionState.COMMITTED)) == []
    assert election.phase is ElectionPhase.MARKING


def test_leaving_term_or_candidacy_destroys_the_producers_once() -> None:
    for phase in (*CANDIDATE, *IN_TERM):
        for event in events(IN_PHASE[phase](), "r-1", 0):
            election = IN_PHASE[phase]()
            effects = election.step(event)
            destroyed = sum(isinstance(effect, DestroyProducers) for effect in effects)
            assert destroyed == (election.phase in {ElectionPhase.STANDBY, ElectionPhase.STOPPED})


def test_epoch_and_role_are_reported_only_in_term() -> None:
    for phase, make in IN_PHASE.items():
        election = make()
        assert election.epoch == (
            41 if phase in {ElectionPhase.RESTING, ElectionPhase.LEADING} else None
        )
    assert [phase.role for phase in ElectionPhase] == [
        Role.STANDBY,
        Role.STANDBY,
        Role.CANDIDATE,
        Role.CANDIDATE,
        Role.CANDIDATE,
        Role.RESTING,
        Role.LEADING,
        Role.STANDBY,
    ]


def test_whoever_was_overtaken_before_says_nothing_of_the_topic() -> None:
    read = ControlRead(START_MS, "r-1", control("other"), incomplete=True)
    assert reading().step(read) == [DestroyProducers(EndReason.MARK_OVERWRITTEN)]


@pytest.mark.parametrize("make", [resting, leading])
def test_a_leader_that_hears_of_later_progress_leaves_term(make: Callable[[], Election]) -> None:
    effects = make().step(tick(START_MS + 1, overtaken=True))
    assert effects == [DestroyProducers(EndReason.OVERTAKEN)]


def end(election: Election, reason: EndReason, now_ms: int) -> None:
    """Ends a resting or leading machine for this reason."""
    match reason:
        case EndReason.FENCED:
            event: Event = TransactionReport(now_ms, election.token, TransactionState.FENCED)
        case EndReason.UNKNOWN_OUTCOME:
            event = TransactionReport(now_ms, election.token, TransactionState.UNKNOWN)
        case _:
            event = tick(now_ms, server_fresh=False)
    assert election.step(event) == [DestroyProducers(reason)]


def stands_at(election: Election, from_ms: int, **reported: Any) -> int:
    """When a machine, ticked every 10 ms, stands again; the nodes it asks agree at once."""
    for now_ms in range(from_ms, from_ms + 5 * MAX_SILENCE_MS, 10):
        request = election.prevote_request
        if request is not None:
            reported |= {"votes": frozenset("bcde"), "vote_round": request.round}
        if election.step(tick(now_ms, **reported)):
            return now_ms
    pytest.fail("it never stands")


def in_turn(found_ms: int, expected_ms: int, rank: int = 0) -> bool:
    """Whether the node asks when its turn comes and no other condition is left."""
    return 0 <= found_ms - expected_ms - rank * RANK_MS <= RANK_MS + 20


def keep_leading(election: Election, from_ms: int, to_ms: int, commit_ms: int = 20) -> None:
    for now_ms in range(from_ms, to_ms, 100):
        election.step(tick(now_ms))
        election.step(
            TransactionReport(now_ms, election.token, TransactionState.COMMITTED, commit_ms)
        )


def ready() -> Election:
    """The first of three, whose turn comes with the next tick."""
    election = standby(nodes=3)
    election.step(tick(START_MS - 2 * MIN_SILENCE_MS))
    election.step(tick(START_MS - RANK_MS))
    return election


def test_a_node_alone_stands_at_once_and_others_in_turn_after_the_silence() -> None:
    assert stands_at(standby(), 0) == 0
    assert [in_turn(stands_at(standby(nodes=3, rank=n), 0), MIN_SILENCE_MS, n) for n in range(3)]


def test_who_hands_over_alone_has_nobody_to_wait_for() -> None:
    election = leading()
    now_ms = START_MS + 10
    jumped = tick(now_ms, wall_ms=0)
    assert election.step(jumped) == [DestroyProducers(EndReason.CLOCK_JUMPED)]
    assert stands_at(election, now_ms) == now_ms + MIN_SILENCE_MS


@pytest.mark.parametrize(
    "what",
    [
        {"server_fresh": False},
        {"hears_enough": False},
        {"unfit": EndReason.CLOCK_OFF},
        {"unfit": EndReason.TAKEN_OUT},
    ],
)
@pytest.mark.parametrize("nodes", [1, 3])
def test_without_a_living_server_enough_peers_or_a_clock_nobody_stands(
    what: dict[str, Any], nodes: int
) -> None:
    election = standby(nodes=nodes)
    for now_ms in range(0, 9_000, 100):
        assert election.step(tick(now_ms, **what)) == []
        assert election.phase is ElectionPhase.STANDBY
    assert in_turn(stands_at(election, 9_000), 9_000)


def test_every_candidacy_has_a_token_of_its_own() -> None:
    election = initialising()
    election.step(InitFailed(START_MS, "r-1", TransactionState.UNKNOWN))
    stands_at(election, START_MS)
    assert election.token == "r-2"


def test_the_silence_doubles_with_failed_candidacies_up_to_its_most() -> None:
    election = standby(nodes=3)
    now_ms, silences = 0, []
    for _ in range(8):
        now_ms = stands_at(election, now_ms)
        election.step(InitFailed(now_ms, election.token, TransactionState.UNKNOWN))
        silences.append(election.silence_ms)
        found_ms = stands_at(election, now_ms)
        assert in_turn(found_ms, now_ms + election.silence_ms)
        now_ms = found_ms
        election.step(InitFailed(now_ms, election.token, TransactionState.UNKNOWN, touched=False))
    assert silences == [2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 64_000, 64_000]


def test_kafka_away_leaves_the_silence_as_it_is() -> None:
    election = standby()
    for now_ms in range(0, 30_000, MIN_SILENCE_MS):
        assert stands_at(election, now_ms) == now_ms
        election.step(InitFailed(now_ms, election.token, TransactionState.UNKNOWN, touched=False))
    assert election.silence_ms == MIN_SILENCE_MS


def test_a_node_alone_waits_the_silence_out_only_where_rivals_showed() -> None:
    fenced, failed = leading(), leading()
    end(fenced, EndReason.FENCED, START_MS)
    end(failed, EndReason.UNKNOWN_OUTCOME, START_MS)
    assert stands_at(fenced, START_MS) == START_MS + 2_000
    assert stands_at(failed, START_MS) == START_MS + 1_000


@pytest.mark.parametrize("lasted_ms", [LASTING_MS - 100, LASTING_MS])
def test_a_leader_that_lasted_stands_again_at_once_after_an_unknown_outcome(lasted_ms: int) -> None:
    election = leading()
    now_ms = START_MS + lasted_ms
    keep_leading(election, START_MS, now_ms)
    end(election, EndReason.UNKNOWN_OUTCOME, now_ms)
    wait_ms = 0 if lasted_ms >= LASTING_MS else MIN_SILENCE_MS
    assert stands_at(election, now_ms) == now_ms + wait_ms


def test_the_silence_falls_under_a_leader_that_lasts() -> None:
    election = standby()
    for now_ms in (0, 1_000, 2_000):
        election.step(tick(now_ms))
        election.step(InitFailed(now_ms, election.token, TransactionState.UNKNOWN))
    assert election.silence_ms == 8_000
    election.step(tick(3_000))
    token = election.token
    election.step(InitsDone(3_000, token))
    for index in (0, 1):
        election.step(MarkReport(3_000, token, index, TransactionState.COMMITTED))
    election.step(ControlRead(3_000, token, control(token)))
    keep_leading(election, 3_000, 3_000 + LASTING_MS, commit_ms=400)
    assert election.silence_ms == 8_000
    keep_leading(election, 13_000, 13_100, commit_ms=400)
    assert election.silence_ms == 1_600
    keep_leading(election, 13_100, 15_000, commit_ms=20)
    assert election.silence_ms == MIN_SILENCE_MS
    keep_leading(election, 15_000, 16_000, commit_ms=5_000)
    assert election.silence_ms == MIN_SILENCE_MS


@pytest.mark.parametrize(("every_ms", "silence_ms"), [(100, MIN_SILENCE_MS), (900, 8_000)])
def test_the_silence_falls_under_another_leader_heard_without_a_break(
    every_ms: int, silence_ms: int
) -> None:
    election = standby(nodes=3)
    now_ms = 0
    for _ in range(3):
        now_ms = stands_at(election, now_ms)
        election.step(InitFailed(now_ms, election.token, TransactionState.UNKNOWN))
    assert election.silence_ms == 8_000
    for at_ms in range(now_ms, now_ms + LASTING_MS, 100):
        election.step(tick(at_ms, heard_ms=at_ms - at_ms % every_ms))
    assert election.silence_ms == silence_ms


def test_idle_commits_keep_a_leader_in_term() -> None:
    election = leading()
    assert election.step(tick(START_MS + IDLE_COMMIT_MS - 1)) == []
    assert election.step(tick(START_MS + IDLE_COMMIT_MS)) == [IdleCommit("r-1")]
    election.step(TransactionReport(START_MS + 310, "r-1", TransactionState.COMMITTED))
    assert election.step(tick(START_MS + 600)) == []
    assert election.step(tick(START_MS + 610)) == [IdleCommit("r-1")]


@pytest.mark.parametrize("make", [resting, leading])
@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (tick(START_MS + MIN_SILENCE_MS + 1), EndReason.COMMITS_TOO_OLD),
        (tick(START_MS + 1, server_fresh=False), EndReason.SERVER_STALE),
        (tick(START_MS + 1, hears_enough=False), EndReason.UNHEARD),
        (tick(START_MS + 1, unfit=EndReason.CLOCK_OFF), EndReason.CLOCK_OFF),
        (tick(START_MS + 1, unfit=EndReason.HANDED_OVER), EndReason.HANDED_OVER),
        (tick(START_MS + 1, unfit=EndReason.TAKEN_OUT), EndReason.TAKEN_OUT),
        (tick(START_MS, wall_ms=WALL_MS + START_MS + 501), EndReason.CLOCK_JUMPED),
        (tick(START_MS, wall_ms=WALL_MS + START_MS - 501), EndReason.CLOCK_JUMPED),
    ],
)
def test_what_ends_a_term(make: Callable[[], Election], event: Event, reason: EndReason) -> None:
    election = make()
    assert election.step(event) == [DestroyProducers(reason)]
    assert election.phase is ElectionPhase.STANDBY


def test_the_time_for_which_kafka_throttles_is_no_silence() -> None:
    election = leading()
    until_ms = START_MS + 30_000
    assert election.step(tick(until_ms - 1, answered_ms=until_ms)) == [IdleCommit("r-1")]
    late_ms = until_ms + MIN_SILENCE_MS
    assert election.waits_until_ms == late_ms
    assert election.step(tick(late_ms, answered_ms=until_ms)) == [IdleCommit("r-1")]
    ended = election.step(tick(late_ms + 1, answered_ms=until_ms))
    assert ended == [DestroyProducers(EndReason.COMMITS_TOO_OLD)]


@pytest.mark.parametrize("verdict", [TransactionState.ABORTED, TransactionState.ABANDONED])
def test_what_is_not_committed_is_no_commit(verdict: TransactionState) -> None:
    election = leading()
    now_ms = START_MS + MIN_SILENCE_MS
    assert election.step(TransactionReport(now_ms, "r-1", verdict)) == []
    assert election.step(tick(now_ms + 1)) == [DestroyProducers(EndReason.COMMITS_TOO_OLD)]


def test_a_mark_whose_end_was_perhaps_sent_twice_is_a_mark() -> None:
    election = standby()
    election.step(tick(START_MS))
    election.step(InitsDone(START_MS, "r-1"))
    loose = TransactionState.COMMITTED_LOOSE
    assert election.step(MarkReport(START_MS, "r-1", 0, loose)) == [CommitMark("r-1", 1)]


def test_a_leader_goes_on_when_w_was_set_back() -> None:
    election = resting()
    now_ms = WALL_MS + START_MS
    assert election.step(tick(START_MS + 100, due_ms=now_ms + 86_400_000)) == []
    assert election.step(tick(START_MS + 200, due_ms=now_ms + 150)) == [StartForwarding()]


def test_the_first_leader_of_an_empty_cluster_has_nothing_to_wait_for() -> None:
    election = reading()
    election.step(ControlRead(START_MS, "r-1", control("r-1", due_ms=None)))
    first = tick(START_MS, due_ms=None, holds_progress=False)
    assert election.step(first) == [StartForwarding()]


def test_every_ending_is_in_the_table_but_the_asked_one() -> None:
    assert set(ENDINGS) == set(EndReason) - {EndReason.STOPPED}


@pytest.mark.parametrize("left_out", [frozenset[int](), frozenset({1})])
def test_a_candidate_does_without_an_id_that_is_left_out(left_out: frozenset[int]) -> None:
    """Its broker is away, perhaps for long; who left it out uses it no more."""
    election = initialising()
    election.step(InitsDone(START_MS, "r-1", without=frozenset({1})))
    assert election.step(MarkReport(START_MS, "r-1", 0, TransactionState.COMMITTED)) == [
        ReadControl("r-1")
    ]
    before = control("r-0").apply(*left_out_record(LeftOut(left_out)), 50)
    state = before.apply(*leader_record(0, "a", "r-1"), 51)
    effects = election.step(ControlRead(START_MS, "r-1", state))
    if left_out:
        assert effects == [BecomeLeader(51, state)]
    else:
        assert effects == [DestroyProducers(EndReason.INIT_FAILED)]


@pytest.mark.parametrize("token", ["r-0", "other"])
def test_a_candidate_does_without_what_its_process_was_the_last_to_mark(token: str) -> None:
    """Nobody else has come to use it since; and nobody had said that it is left out."""
    election = initialising()
    election.step(InitsDone(START_MS, "r-1", frozenset({1}), last_marks={0: "r-0", 1: token}))
    election.step(MarkReport(START_MS, "r-1", 0, TransactionState.COMMITTED))
    state = control("r-0").apply(*leader_record(0, "a", "r-1"), 51)
    effects = election.step(ControlRead(START_MS, "r-1", state))
    if token == "r-0":
        assert effects == [BecomeLeader(51, state)]
    else:
        assert effects == [DestroyProducers(EndReason.INIT_FAILED)]
