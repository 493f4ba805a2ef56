"""Checks which messages of peers are plausible.

Members are trusted in what they report of themselves: which frames they hold, what they promised. A
mistake or a damaged process must not be able to claim more than that, least of all anything that
deletes messages on other nodes.

| a message says | what is done |
|---|---|
| something impossible (`check`) | it is malformed: the connection is closed |
| a floor | nothing is deleted because of it, only because of what the own cleaner reads |
| progress that Kafka does not have | no node leads while it is reported (`witnesses.py`) |
| a relayed heartbeat with more starts, or heartbeats, than possible | it is ignored (see there) |
| a relayed heartbeat that its node, heard directly, does not reach | likewise, a second later |
| a seal or floor above the own clock less the late window | it is lowered to that (`tempered`) |
| pushed frames of another node's wheel | malformed: only an origin pushes |
| frames with a card that is not the wheel's | they are dropped (`mirrors.py`) |
| it heard of more saves than this node knows of | this node stands aside; nothing is saved |
| fetched frames of a wheel that this node does not mirror | they are dropped (`mirrors.py`) |
| frames without content at or above the floor | they are dropped (`mirrors.py`) |
| a fence for unknown wheels | it is ignored until they are known (`member.py`) |

Tempering weakens: a seal (s, q) says the same of every slot below s, and so does a floor. So a
clock that was set back makes this node believe less, and later; it never cuts it off from the
others, nor makes it delete anything sooner.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import lt
from typing import Final

from delaywheel.identity import NameInvalidError, WheelId, check_name
from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.core.protocol.heartbeat import (
    MAX_MISSING,
    Fence,
    FenceAnswer,
    Heartbeat,
    WheelHeartbeat,
)
from delaywheel_replica.core.protocol.messages import (
    Applied,
    Fetch,
    Frames,
    Gossip,
    Lacks,
    PeerMessage,
    PrevoteRequest,
    Promise,
    Refused,
    Vote,
    WheelCard,
)
from delaywheel_replica.core.protocol.progress import Reached

MOST: Final = 1 << 53
"""No counter grows beyond this; every reader of the JSON handles it exactly."""

MOST_SLOT: Final = (1 << 32) - 1
"""Slots are 32 bits wide in frames and index rows."""

MOST_NUMBER: Final = 10**18 - 1
"""A wheel's number: its name has at most 18 digits for it."""

MOST_STARTS: Final = 10**9
"""A node's starts: one a second for thirty years."""

MOST_BEATS: Final = 10**13
"""Heartbeats since a start: ten a millisecond for thirty years."""

MOST_VERSION: Final = 10**6

MOST_WHEELS: Final = 1 << 16
"""The most entries in one heartbeat or promise."""

MOST_MEMBERS: Final = 1_000
MOST_TEXT: Final = 256
MOST_SPAN_SECONDS: Final = 366 * 86_400


def check(sender: str, message: PeerMessage) -> None:  # noqa: C901 - one for each message
    """Refuses a message that no node can send, whatever its state.

    Raises:
        MalformedError: The message must not be processed any further.
    """
    match message:
        case Gossip():
            if message.heartbeat.node != sender:
                raise MalformedError(f"a heartbeat of {message.heartbeat.node!r} as {sender}'s own")
            _at_most("heartbeats of others", len(message.others), MOST_MEMBERS)
            for heartbeat in (message.heartbeat, *message.others):
                _check_heartbeat(heartbeat)
        case Frames():
            _check_frames(sender, message)
        case Applied():
            _check_texts(message.storage, message.boot)
            _check_number("prefix", message.prefix)
        case Refused():
            _check_fence(Fence(message.origin, message.upto))
        case Fetch():
            _check_asked_for(message)
        case Lacks():
            _check_texts(message.storage)
            _check_asked_for(message)
        case Promise():
            _check_answer(sender, message.answer)
        case PrevoteRequest():
            _check_number("silence", message.silence_ms)
        case Vote():
            _check_number("round", message.round)


def tempered(heartbeat: Heartbeat, most_slot: int) -> Heartbeat:
    """Returns the heartbeat without seals or floors that cannot have been promised by now.

    Args:
        heartbeat: As received.
        most_slot: The own clock less the late window.
    """
    too_late = {
        wheel: replace(reported, seal_slot=most_slot)
        for wheel, reported in heartbeat.wheels.items()
        if reported.seal_slot > most_slot
    }
    floor = heartbeat.floor
    if not too_late and (floor is None or floor <= most_slot):
        return heartbeat
    return replace(
        heartbeat,
        wheels={**heartbeat.wheels, **too_late},
        floor=None if floor is None else min(floor, most_slot),
    )


def known_number(
    origin: str,
    registered: Iterable[WheelId],
    held: Iterable[WheelId],
    heartbeats: Mapping[str, Heartbeat],
) -> int:
    """Returns the greatest number of a node's wheels that is known here; 0: none.

    Args:
        origin: The node.
        registered: Wheels of the control topic, as far as it was read.
        held: Wheels that have files here.
        heartbeats: The newest ones of the other nodes.
    """
    reported = heartbeats.get(origin)
    numbers = [0 if reported is None else reported.last_number]
    for wheels in (registered, held, *(heartbeat.wheels for heartbeat in heartbeats.values())):
        numbers += [wheel.number for wheel in wheels if wheel.node == origin]
    return max(numbers)


def _check_heartbeat(heartbeat: Heartbeat) -> None:
    _check_node(heartbeat.node)
    _check_texts(heartbeat.storage, heartbeat.boot)
    _check_number("clock", heartbeat.wall_ms)
    _check_number("last number", heartbeat.last_number, most=MOST_NUMBER)
    _check_number("start", heartbeat.start, most=MOST_STARTS)
    _check_number("count", heartbeat.count, most=MOST_BEATS)
    _check_number("saves", heartbeat.saves)
    if heartbeat.floor is not None:
        _check_number("floor", heartbeat.floor, least=-MOST)
    if heartbeat.reached is not None:
        _check_reached(heartbeat.reached)
    for wheel in heartbeat.named:
        if wheel.node != heartbeat.node or wheel.number > heartbeat.last_number:
            raise MalformedError(
                f"{heartbeat.node} names {wheel}, and was given {heartbeat.last_number}"
            )
    _at_most("wheels", len(heartbeat.wheels), MOST_WHEELS)
    for wheel, reported in heartbeat.wheels.items():
        _check_wheel(wheel, reported)
    _check_number(
        "version of control records", heartbeat.control_version, least=1, most=MOST_VERSION
    )
    _at_most("wheels to be verified", len(heartbeat.verifying), MOST_WHEELS)
    _at_most("nodes heard", len(heartbeat.heard), MOST_MEMBERS)
    for node, heard in heartbeat.heard.items():
        _check_node(node)
        _check_texts(heard.boot, heard.storage)
        _check_number("silence", heard.ago_ms)
        _check_number("saves", heard.saves)
    if heartbeat.term is not None:
        _check_number("epoch", heartbeat.term.epoch)
        _at_most("fences", len(heartbeat.term.fences), MOST_WHEELS)
        for fence in heartbeat.term.fences:
            _check_fence(fence)
        _at_most("limits", len(heartbeat.term.limits), MOST_WHEELS)
        for wheel, seq in heartbeat.term.limits.items():
            _check_number(f"limit of {wheel}", seq)
        _check_texts(heartbeat.term.halves_objection or "")


def _check_reached(reached: Reached) -> None:
    _check_number("times that w was set back", reached.set_backs)
    _check_number("w", reached.due_ms)
    if reached.position is not None:
        _check_number("seq of a position", reached.position.seq)
        _check_number("row of a position", reached.position.row)


def _check_wheel(wheel: WheelId, reported: WheelHeartbeat) -> None:
    # In one expression: a node reports each of its wheels ten times a second.
    if not (
        0 <= reported.applied <= MOST
        and 0 <= reported.high_watermark <= MOST
        and 0 <= reported.seal_seq <= MOST
        and 0 <= reported.ledger_seq <= MOST
        and -MOST <= reported.seal_slot <= MOST
        and -1 <= reported.top_slot <= MOST_SLOT
    ):
        raise MalformedError(f"{wheel}: {reported} has numbers that no wheel has")
    missing = reported.missing
    if not missing:
        return
    _at_most("spans of missing frames", len(missing.spans), MAX_MISSING)
    if missing.first < 1 or missing.last > reported.applied:
        raise MalformedError(f"missing frames of {wheel} are none up to {reported.applied}")


def _check_frames(sender: str, message: Frames) -> None:
    card = message.card
    _check_card(card)
    _check_number("request", message.request)
    if message.request == 0 and card.wheel.node != sender:
        raise MalformedError(f"{sender} pushes frames of {card.wheel}, which is not its own")
    seqs: list[int] = message.frames.seqs.tolist()
    if not seqs:
        return
    if not 1 <= seqs[0] <= seqs[-1] <= MOST or not all(map(lt, seqs, seqs[1:])):
        raise MalformedError(f"frames of {card.wheel} that do not ascend from 1 to {MOST}")


def _check_asked_for(message: Fetch | Lacks) -> None:
    _check_number("request", message.request, least=1)
    _check_number("first seq", message.first_seq, least=1)
    _check_number("last seq", message.last_seq, least=message.first_seq)


def _check_card(card: WheelCard) -> None:
    _at_most("members", len(card.members), MOST_MEMBERS)
    for node, storage in card.members.items():
        _check_node(node)
        _check_texts(storage)
    if not 1 <= card.min_insync <= len(card.members):
        raise MalformedError(f"{card.wheel}: {card.min_insync} of {len(card.members)} members")
    _check_number("span", card.span_seconds, least=1, most=MOST_SPAN_SECONDS)


def _check_answer(sender: str, answer: FenceAnswer) -> None:
    if answer.node != sender:
        raise MalformedError(f"a promise of {answer.node!r} as {sender}'s own")
    _check_texts(answer.storage)
    _check_fence(answer.fence)
    _at_most("wheels", len(answer.applied) + len(answer.incomplete), 2 * MOST_WHEELS)
    for wheel, seq in answer.applied.items():
        _check_number(f"end of {wheel}", seq)
    if not all(map(answer.covers, [*answer.applied, *answer.incomplete])):
        raise MalformedError(f"a promise about {answer.fence.origin} speaks of others' wheels")


def _check_fence(fence: Fence) -> None:
    _check_node(fence.origin)
    _check_number("wheel number", fence.upto, least=1, most=MOST_NUMBER)


def _check_node(node: str) -> None:
    try:
        check_name(node, what="node id")
    except NameInvalidError as error:
        raise MalformedError(str(error)) from error


def _check_texts(*texts: str) -> None:
    for text in texts:
        _at_most("characters", len(text), MOST_TEXT)


def _check_number(name: str, number: int, *, least: int = 0, most: int = MOST) -> None:
    if not least <= number <= most:
        raise MalformedError(f"{name}: {number} is not from {least} to {most}")


def _at_most(what: str, count: int, most: int) -> None:
    if count > most:
        raise MalformedError(f"{count} {what}: no message has more than {most}")
