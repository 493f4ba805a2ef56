"""Checks which messages of peers are plausible.

Members are trusted in what they report of themselves: which frames they hold, what they promised. A
mistake or a damaged process must not be able to claim more than that, least of all anything that
deletes messages on other nodes.

| a message says | what is done |
|---|---|
| something impossible (its declaration, `check`) | it is malformed: the connection is closed |
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

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.codec import MOST, MalformedError
from delaywheel_replica.core.protocol.heartbeat import Heartbeat, Promise
from delaywheel_replica.core.protocol.messages import Fetch, Frames, Gossip, Lacks, PeerMessage


def check(sender: str, message: PeerMessage) -> None:
    """Refuses a message whose parts do not go together, whoever sent it; raises MalformedError."""
    match message:
        case Gossip():
            if message.heartbeat.node != sender:
                raise MalformedError(f"a heartbeat of {message.heartbeat.node!r} as {sender}'s own")
            for heartbeat in (message.heartbeat, *message.others):
                _check_named(heartbeat)
        case Frames():
            _check_frames(sender, message)
        case Fetch() | Lacks():
            if message.last_seq < message.first_seq:
                raise MalformedError(f"frames from {message.first_seq} to {message.last_seq}")
        case Promise():
            _check_promise(sender, message)
        case _:
            pass


def tempered(heartbeat: Heartbeat, most_slot: int) -> Heartbeat:
    """Returns the heartbeat with seals and floors lowered to the own clock less the late window."""
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

    Known are wheels of the control topic, as far as it was read, those that have files here, and
    what the other nodes' newest heartbeats say.
    """
    reported = heartbeats.get(origin)
    numbers = [0 if reported is None else reported.last_number]
    for wheels in (registered, held, *(heartbeat.wheels for heartbeat in heartbeats.values())):
        numbers += [wheel.number for wheel in wheels if wheel.node == origin]
    return max(numbers)


def _check_named(heartbeat: Heartbeat) -> None:
    for wheel in heartbeat.named:
        if wheel.node != heartbeat.node or wheel.number > heartbeat.last_number:
            raise MalformedError(
                f"{heartbeat.node} names {wheel}, and was given {heartbeat.last_number}"
            )


def _check_frames(sender: str, message: Frames) -> None:
    card = message.card
    if card.min_insync > len(card.members):
        raise MalformedError(f"{card.wheel}: {card.min_insync} of {len(card.members)} members")
    if message.request == 0 and card.wheel.node != sender:
        raise MalformedError(f"{sender} pushes frames of {card.wheel}, which is not its own")
    seqs: list[int] = message.frames.seqs.tolist()
    if not seqs:
        return
    if not 1 <= seqs[0] <= seqs[-1] <= MOST or not all(map(lt, seqs, seqs[1:])):
        raise MalformedError(f"frames of {card.wheel} that do not ascend from 1 to {MOST}")


def _check_promise(sender: str, promise: Promise) -> None:
    if promise.node != sender:
        raise MalformedError(f"a promise of {promise.node!r} as {sender}'s own")
    if not all(map(promise.covers, [*promise.applied, *promise.incomplete])):
        raise MalformedError(f"a promise about {promise.fence.origin} speaks of others' wheels")
