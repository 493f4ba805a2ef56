"""Drills about seals, the floor, copies and cancels: each message once, and in time."""

from __future__ import annotations

from sim.drills.script import FOREVER_MS, Drills, Script
from sim.machine.clocks import EPOCH_MS
from sim.machine.network import Quality

DELIVERY = Drills()


@DELIVERY(r"clock_step node=c", r"client +hears of c .*acknowledged")
def deaf_spare(script: Script) -> None:
    """Interleaving 9: an empty wheel of a node that hears no leader."""
    script.mute(2_600, "Gossip", "a", "c")
    script.mute(2_600, "Gossip", "b", "c")
    script.do(2_700, "clock_step", node="c", step_ms=-20_000, ms=FOREVER_MS)
    script.flow(2_500, 15_000, 500, "a", delay_ms=200)
    for at_ms in range(11_000, 16_000, 170):
        script.send(at_ms, "c", delay_ms=-script.random.randrange(6_500, 9_000), patience_ms=300)
    script.until_ms = 17_000


@DELIVERY(r"clock_step node=c", r"c +starts", r"client +hears of c .*DUE_TOO_OLD")
def spare_after_a_step(script: Script) -> None:
    """Interleaving 10: a standby wheel's seal was reported; it is opened under a clock set back."""
    at_ms = script.about(12_000, 1_000)
    script.flow(2_500, 13_000, 500, "a", delay_ms=200)
    script.do(at_ms, "clock_step", node="c", step_ms=-20_000, ms=FOREVER_MS)
    script.do(at_ms + 10, "kill_server", node="c")
    for later_ms in range(100, 2_000, 60):
        delay_ms = -script.random.randrange(6_500, 11_000)
        script.send(at_ms + later_ms, "c", delay_ms=delay_ms, patience_ms=50)
    script.until_ms = 17_000


@DELIVERY(r"clock_step node=c", r"client +hears of c .*acknowledged")
def clock_ahead(script: Script) -> None:
    """Interleaving 17: an origin's clock runs ahead of all others for a while."""
    script.do(2_500, "clock_step", node="c", step_ms=60_000, ms=script.about(1_000, 3_000))
    script.flow(3_000, 9_000, 100, "c", delay_ms=2_000)
    script.until_ms = 10_000


@DELIVERY(r"clock_step node=a", r"client +hears of a .*acknowledged")
def leader_ahead(script: Script) -> None:
    """The same with the leader's clock."""
    script.do(2_500, "clock_step", node="a", step_ms=60_000, ms=script.about(1_000, 3_000))
    script.flow(3_000, 9_000, 100, "a", delay_ms=2_000)
    script.until_ms = 10_000


@DELIVERY(r"c +does Acknowledge", r"delivers")
def slow_mirrors(script: Script) -> None:
    """Frames that only their origin holds until long after their due."""
    script.mute(2_900, "Frames", "c", "ab", ms=script.about(10_000, 2_000))
    script.mute(2_900, "Fetch", "a", "bc", ms=12_000)
    script.mute(2_900, "Fetch", "b", "ac", ms=12_000)
    script.flow(3_000, 3_600, 60, "c", delay_ms=800, timeout_ms=25_000, patience_ms=30_000)
    script.until_ms = 17_000


@DELIVERY(r"delivers m\d+ c\.1", r"closes c\.1 at", r"delivers|wrote a")
def sent_again(script: Script) -> None:
    """A wheel out of which a message was delivered is closed when its copy comes."""
    for at_ms in range(2_500, 4_000, 100):
        script.send(at_ms, "ca", delay_ms=script.random.randrange(100, 1_500), again=True)
    script.do(script.about(4_000, 300), "kill_server", node="c")
    script.until_ms = 9_000


@DELIVERY(r"delivers m\d+ a\.1", r"init .* epoch 1", r"wrote c\.1")
def new_leader(script: Script) -> None:
    """Interleaving 21: a new leader lacks a forwarded message, and gets the copy."""
    at_ms = script.about(4_000)
    script.mute(at_ms, "Frames", "a", "c", ms=4_000)
    script.mute(at_ms, "Fetch", "c", "ab", ms=4_000)
    script.do(at_ms, "lost_answers", share=1.0, ms=400)
    script.flow(at_ms + 10, at_ms + 150, 20, "ac", delay_ms=50, timeout_ms=700, patience_ms=4_000)
    script.do(at_ms + 350, "pause", node="b", part="cleaner", ms=8_000)
    script.do(at_ms + 400, "absence", node="a", ms=12_000)
    script.until_ms = 14_000


@DELIVERY(r"a bit flipped", r"cleaner died")
def one_millisecond(script: Script) -> None:
    """Interleaving 19: a millisecond is split, one of its frames goes bad, the leader changes."""
    script.cluster("a", 1, first_cap_messages=4, cap_messages=8, max_frame_messages=3)
    script.send(2_500, "a", delay_ms=1_500, count=60)
    slow = {"way_us": (20_000, 30_000)}
    script.do(3_500, "kafka_faults", changes=slow, ms=3_000)
    script.do(script.about(4_150, 500), "bit_flip", node="a", what="slot", choice=script.about(0))
    script.do(script.about(4_250, 500), "kill_cleaner", node="a")
    script.until_ms = 9_000


@DELIVERY(r"client +cancels", r"hears of m\d+: cancelled")
def cancel_beside_messages(script: Script) -> None:
    """A cancel is submitted behind messages, which wait until slow mirrors hold those before."""
    script.cluster("abc", 2, apart_ms=50)
    slow = Quality(delay_us=250_000, jitter_us=1_000)
    for mirror in "bc":
        script.do(2_500, "bad_link", src=mirror, dst="a", quality=slow, ms=4_000)
    for at_ms in range(3_000, 6_000, 1_000):
        first = script.send(at_ms, "a", delay_ms=3_000, count=5)
        script.send(at_ms + 600, "a", delay_ms=3_000, count=5)
        script.send(at_ms + 700, "a", delay_ms=3_000)
        script.send(at_ms + 710, "a", delay_ms=3_000)
        script.cancel(script.about(at_ms + 715, 30), first, "a")
    script.until_ms = 7_000


@DELIVERY(
    r"told at . of m\d+: MESSAGE_STATE_PENDING",
    r"told at . of m\d+: MESSAGE_STATE_CANCELLED",
    r"told at . of m\d+: MESSAGE_STATE_ROLLED_BACK",
    r"told at . of m\d+: MESSAGE_STATE_HELD",
    r"told at . of m\d+: MESSAGE_STATE_UNDECIDED",
    r"told at . of m\d+: MESSAGE_STATE_DELIVERED",
    r"finds at .: [1-9]",
    r"hears of a search for m\d+: CANCEL_OUTCOME_CANCELLED",
    r"reads at .: [1-9]",
    r"hears of m\d+: rolled back",
)
def answers_to_all(script: Script) -> None:
    """Every call is made about messages in every state, and nothing is wrong."""
    script.cluster("abc", 2, halves=True)
    firsts = [script.send(3_000 + 10 * n, "abc", delay_ms=15_000) for n in range(6)]
    soon = [script.send(5_000 + 10 * n, "abc", delay_ms=2_000) for n in range(3)]
    halves = [
        script.half(4_500, "a", hold_ms=9_000),
        script.half(4_500, "a", hold_ms=9_000, ends="rollback", after_ms=300),
        script.half(4_500, "b", hold_ms=9_000, says=False),
        script.half(4_500, "b", hold_ms=9_000, later_ms=14_000),
        script.half(4_500, "b", hold_ms=1_500, says=False, unknowns=9),
        script.half(4_500, "b", hold_ms=1_500, says=False, ends="rollback"),
    ]
    for told in "ab":
        cancelled = script.half(16_500, "a", hold_ms=6_000, told=told, after_ms=4_000)
        script.cancel(17_500, cancelled, "bca")
    for at_ms, number in ((10_000, halves[2]), (14_500, firsts[5])):
        script.cancel(at_ms, number, script.random.choice("abc"), by_search=True)
    script.cancel(6_000, firsts[0], "cba")
    script.cancel(6_000, firsts[1], "bac")
    script.cancel(9_000, soon[0], "abc")
    for number, delay_ms in ((firsts[2], 3_000), (firsts[0], 4_000), (halves[2], 2_000)):
        script.reschedule(7_000, number, delay_ms, "acb")
    for at_ms in range(3_500, 20_000, 1_000):
        script.ask(script.about(at_ms), None, "abc"[at_ms // 1_000 % 3])
        for number in (*firsts, *soon, *halves):
            script.ask(script.about(at_ms, 900), number, script.random.choice("abc"))
    script.until_ms = 22_000


@DELIVERY(r"client +hears of m1: cancelled")
def long_asked(script: Script) -> None:
    """A caller asks for so long that the answer must come, and long before the due."""
    first = script.send(3_000, "abc", delay_ms=50_000)
    script.cancel(script.about(4_000), first, "bca", patience_ms=35_000)
    script.until_ms = 5_000


@DELIVERY(r"client +cancels", r"delivers")
def late_cancel(script: Script) -> None:
    """A cancel lies behind late messages, of which a leader takes a few at a time."""
    script.cluster("abc", 2, first_cap_messages=4, cap_messages=6, max_frame_messages=3)
    for at_ms in (3_000, 6_000, 9_000):
        for node in "bc":
            script.mute(at_ms, "Applied Gossip", node, "a", ms=650)
        firsts = [
            script.send(at_ms + 10 * n, "a", delay_ms=400, count=3, patience_ms=500)
            for n in range(1, 12)
        ]
        for first in firsts[:3]:
            script.cancel(script.about(at_ms + 150), first, "a")
    script.until_ms = 12_000


@DELIVERY(r"client +cancels many", r"delivers", r"client +hears of many")
def many_cancels(script: Script) -> None:
    """Many cancels are written together while transactions take their messages separately."""
    script.do(2_500, "kafka_faults", changes={"way_us": (30_000, 60_000)}, ms=9_000)
    for at_ms in range(3_000, 10_000, 1_500):
        firsts = [script.send(at_ms, "cb", delay_ms=300 + 60 * n) for n in range(12)]
        script.cancel_many(script.about(at_ms + 150), firsts, "a")
        later = script.send(at_ms, "cb", delay_ms=5_000)
        script.cancel_many(script.about(at_ms + 1_000), [firsts[0], later], "a")
        for node in "bc":
            script.mute(at_ms + 100, "Applied Gossip", node, "a", ms=script.about(400, 250))
    script.until_ms = 12_000


@DELIVERY(r"client +reschedules", r"reschedule .*to_ms", r"reschedule .*settled", r"delivers")
def other_dues(script: Script) -> None:
    """Messages are given nearer and later dues; leaders die when it is decided, or written."""
    for at_ms in range(3_000, 15_000, 3_000):
        for n, delay_ms in enumerate((900, 2_500, 400, 5_000)):
            first = script.send(at_ms + 10 * n, "abc", delay_ms=2_000)
            script.reschedule(script.about(at_ms + 300, 900), first, delay_ms, "abc"[n % 3])
        dies = script.about(at_ms + 500, 900)
        for process in ("kill_server", "kill_cleaner"):
            script.do(dies, process, node="abc"[at_ms // 3_000 % 3])
    script.until_ms = 18_000


@DELIVERY(r"client +reschedules", r"reschedule .*to_ms", r'reschedule .*"passed":\[\d', r"delivers")
def passed_dues(script: Script) -> None:
    """The new due passes before the copy exists: mirrors are slow when it is written."""
    for at_ms in range(3_000, 10_000, 2_000):
        first = script.send(at_ms, "a", delay_ms=3_500)
        script.reschedule(script.about(at_ms + 200), first, 350, "a")
        for node in "bc":
            script.mute(at_ms + 150, "Applied Gossip", node, "a", ms=script.about(900, 250))
    script.until_ms = 14_000


@DELIVERY(r"a bad sector in index", r"client +reschedules", r"reschedule .*settled", r"delivers")
def other_dues_without_rows(script: Script) -> None:
    """The leader's node cannot read index rows of a rescheduled message in its second."""
    firsts = [script.send(at_ms, "a", delay_ms=6_000) for at_ms in range(2_500, 3_500, 100)]
    script.do(3_600, "bad_sector", node="a", what="index", choice=script.random.randrange(1 << 30))
    for number, first in enumerate(firsts):
        script.reschedule(script.about(4_000 + 100 * number), first, 1_500, "a")
    script.until_ms = 12_000


@DELIVERY(r"reschedule .*to_ms", r"a bad sector in slot", r"reports lost a\.1/1")
def unreadable_original(script: Script) -> None:
    """A lone node can no longer read what it is to copy, though all of its second was taken.

    Its disk hangs before the copy is written, and its server dies.
    """
    script.cluster("a", 1)
    first = script.send(3_000, "a", delay_ms=5_500)
    script.reschedule(7_800, first, 900, "a")
    script.do(7_804, "slow_disk", node="a", us=2_500_000, ms=30)
    script.do(script.about(9_450), "bad_sector", node="a", what="slot", choice=0)
    script.do(9_560, "kill_server", node="a")
    script.until_ms = 75_000  # what cannot be read is lost a minute after its second


@DELIVERY(
    r"delivers m2 a\.1",
    r"a bad sector in index",
    r"client +cancels m2",
    r"client +hears of m2: rescheduled",
    r"client +hears of many: m2: rescheduled",
)
def unreadable_marks(script: Script) -> None:
    """A rescheduled, delivered message is cancelled while its mark cannot be read from the index.

    The node that it was rescheduled at has read its second before, and keeps what it found there.
    m1 is finished and its slot file deleted, so its unreadable row may be that of any second.
    """
    script.cluster("abc", 2, late_window_s=2)
    script.send(2_500, "a", delay_ms=100)
    first = script.send(3_000, "a", delay_ms=12_000)
    script.reschedule(script.about(3_500), first, 1_000, "a")
    script.mute(7_000, "Fetch", "a", "bc")  # nothing is repaired
    script.do(script.about(7_010), "bad_sector", node="a", what="index", choice=0)
    script.cancel(script.about(7_200), first, "a")
    script.cancel_many(script.about(8_200), (first,), "a")
    script.until_ms = 12_000


@DELIVERY(
    r"delivers m1 a\.1",
    r"b +a bad sector in",
    r"client +cancels m1 at b",
    r"client +hears of m1: CANCEL_UNKNOWN",
)
def unreadable_marks_elsewhere(script: Script) -> None:
    """A rescheduled, delivered message is cancelled at a new leader that cannot read its mark.

    The mark lies in the second page of the slot file, behind the message's first copy, and this
    node has not read the second before.
    """
    first = script.send(3_000, "a", delay_ms=25_000, count=80)
    script.reschedule(script.about(3_500), first, 1_000, "a")
    for node in "ac":
        script.do(script.about(6_000), "pause", node=node, part="cleaner", ms=20_000)
    script.mute(9_900, "Fetch", "b", "ac")  # nothing is repaired
    script.do(10_000, "bad_sector", node="b", what=f"{EPOCH_MS // 1000 + 28}.slot", page=1)
    script.cancel(script.about(10_200), first, "b")
    script.until_ms = 16_000


@DELIVERY(
    r"client +cancels m1 at b",
    r"client +commits m1 at a",
    r"delivers m1 a\.1",
    r"client +hears of m1: already delivered",
    r"c +a bad sector in",
    r"client +commits m1 at c",
    r"c +-> . Fetch.*a\.1",
)
def unreadable_release(script: Script) -> None:
    """A commit is repeated at a node that can read the cancel that it crossed, but no release.

    The release was taken before the cancel, and the half delivered. It lies in the second page of
    the slot file, behind the half. That this page is bad node c finds in the look that decides:
    until then it counts as a node that holds everything.
    """
    script.cluster("abc", 2, halves=True)
    for node, ms in ("a", 30_000), ("c", 3_000):  # b leads
        script.do(2_500, "pause", node=node, part="cleaner", ms=ms)
    half = script.half(8_000, "a", hold_ms=12_000, told="ac", after_ms=500)
    script.send(8_100, "a", delay_ms=12_100, count=80)
    script.mute(8_400, "Frames", "b", "ac", ms=300)
    script.do(8_400, "lost_answers", share=1.0, ms=250)
    script.cancel(script.about(8_450, 40), half, "b", patience_ms=500)
    of_a1 = {"what": f"{EPOCH_MS // 1000 + 20}.slot", "choice": 1}  # the first of two such files
    script.do(9_300, "bad_sector", node="c", page=1, **of_a1)
    script.mute(9_300, "Fetch", "c", "ab")  # nothing is repaired
    script.until_ms = 12_000


@DELIVERY(r"client +cancels m\d+", r"client +reschedules", r"client +hears of m\d+")
def cancel_or_other_due(script: Script) -> None:
    """One caller cancels what another reschedules, at the same time."""
    script.do(2_500, "kafka_faults", changes={"way_us": (20_000, 40_000)}, ms=12_000)
    for at_ms in range(3_000, 12_000, 500):
        first = script.send(at_ms, "abc", delay_ms=2_500)
        script.cancel(script.about(at_ms + 300, 150), first, "a")
        script.reschedule(script.about(at_ms + 300, 150), first, 1_200, "a")
    script.until_ms = 15_000


@DELIVERY(r"client +cancels", r"delivers")
def slow_cancel(script: Script) -> None:
    """Interleaving 2: a cancel is mirrored slowly while the cleaner takes its message."""
    script.do(2_500, "kafka_faults", changes={"way_us": (30_000, 60_000)}, ms=9_000)
    for at_ms in range(3_000, 10_000, 1_500):
        first = script.send(at_ms, "cb", delay_ms=500)
        script.cancel(script.about(at_ms + 150), first, "a")
        for node in "bc":
            script.mute(at_ms + 100, "Applied Gossip", node, "a", ms=script.about(400, 250))
    script.until_ms = 12_000


@DELIVERY(r"client +cancels", r"delivers")
def overtaken_cancel(script: Script) -> None:
    """Messages are taken, and then the cancels, before the server reads the next status."""
    for at_ms in range(3_000, 12_000, 1_000):
        # Several, of which one transaction or the next takes each.
        firsts = [script.send(at_ms, "cb", delay_ms=350 + 25 * n) for n in range(20)]
        for first in firsts:
            script.cancel(at_ms + 200, first, "a")
        for node in "bc":
            script.mute(at_ms + 150, "Applied Gossip", node, "a", ms=script.about(330, 120))
    script.until_ms = 14_000


@DELIVERY(r"hears of c .*acknowledged", r"client +cancels m\d+ at a", r"client +hears of m\d+:")
def unheard_of(script: Script) -> None:
    """The leader's node is asked to cancel what others have just acknowledged without it.

    It fetches everything, and holds what it learns of; but the origin no longer waits for it.
    """
    script.mute(2_500, "Frames", "c", "a")
    script.mute(2_500, "Applied Gossip", "a", "c")
    script.flow(2_600, 5_000, 200, "c", delay_ms=12_000)
    for at_ms in range(5_000, 10_000, 250):
        number = script.send(at_ms, "c", delay_ms=12_000, patience_ms=500)
        script.cancel(script.about(at_ms + 10, 70), number, "a")
    script.until_ms = 12_000


@DELIVERY(
    r"client +cancels m3 at a", r"hears of a m3:acknowledged", r"cancels m3 at a", r"hears of m3:"
)
def accepted_during_a_look(script: Script) -> None:
    """While a silent node is asked for what nobody has, it is accepted; its caller cancels it."""
    script.send(2_400, "a", delay_ms=20_000, count=2)
    script.do(2_500, "pause", node="c", part="both", ms=FOREVER_MS)
    for at_ms in range(3_000, 10_000, 2_500):
        first = script.send(at_ms, "ca", delay_ms=12_000, count=3)
        for number in range(first, first + 3):
            # Its first node says nothing for 1.5 s; the look lasts from then on for 1 s.
            script.cancel(script.about(at_ms + 900, 200), number, "a")
            script.cancel(script.about(at_ms + 1_650, 100), number, "a")
    script.until_ms = 12_000


@DELIVERY(r"delivers m1 ", r"does Sweep", r"client +cancels m1 at", r"hears of m1: too late")
def long_done(script: Script) -> None:
    """A cancel comes when its message's second is deleted everywhere."""
    for number in range(1, 4):
        script.send(2_000 + 200 * number, "abc", delay_ms=300)
        script.cancel(script.about(22_000, 2_000), number, script.random.choice("abc"))
    script.flow(5_000, 22_000, 1_000, "b", delay_ms=200)
    script.until_ms = 26_000


@DELIVERY(r"a bit flipped", r"a +does Repair")
def bad_copy(script: Script) -> None:
    """A frame goes bad in one place, before it is due."""
    script.flow(2_500, 4_000, 60, "c", delay_ms=4_000)
    for at_ms in (4_200, 4_700, 5_200):
        choice = script.random.randrange(1 << 30)
        script.do(at_ms, "bit_flip", node="a", what="slot", choice=choice)
    script.mute(4_000, "Fetch", "a", "bc", ms=3_000)
    script.until_ms = 9_000


@DELIVERY(
    r"crash_machine", r"a +does Repair", r"crash_machine", r"a +starts", r"delivers m\d+ c\.1"
)
def crashed_repair(script: Script) -> None:
    """The next leader's machine crashes again while lost frames are being restored."""
    for at_ms in range(3_000, 4_600, 20):
        due_ms = 9_000 + script.random.randrange(3_000)
        script.send(at_ms, "c", delay_ms=due_ms - at_ms)
    script.do(script.about(4_610, 30), "crash_machine", node="a", ms=200)
    script.do(script.about(4_960, 100), "crash_machine", node="a", ms=200)
    for node in "bc":
        script.do(5_500, "kafka_cut", node=node, ms=FOREVER_MS)
    script.until_ms = 16_000


@DELIVERY(r"a bit flipped", r"delivers")
def unread_for_long(script: Script) -> None:
    """The leader cannot read what is due, and fetches nothing for several seconds."""
    script.flow(2_500, 4_000, 60, "c", delay_ms=3_000)
    script.mute(4_050, "Fetch", "a", "bc", ms=9_000)
    for node in "bc":
        script.mute(4_050, "Frames", node, "a", ms=9_000)
    for at_ms in (4_100, 4_200, 4_300):
        choice = script.random.randrange(1 << 30)
        script.do(at_ms, "bit_flip", node="a", what="slot", choice=choice)
    script.until_ms = 15_000


@DELIVERY(r"a bad sector in index", r"a +does Repair", r"a bad sector in slot", r"a +starts")
def bad_sectors(script: Script) -> None:
    """One node's medium cannot read parts of indexes and slot files, before and during a start."""
    script.flow(2_500, 4_400, 60, "c", delay_ms=5_000)
    script.flow(2_500, 4_400, 90, "a", delay_ms=5_000)
    for at_ms, what in ((3_600, "index"), (4_450, "index"), (4_500, "slot"), (4_550, "slot")):
        choice = script.random.randrange(1 << 30)
        script.do(at_ms, "bad_sector", node="a", what=what, choice=choice)
    script.do(script.about(4_700), "kill_server", node="a")
    script.until_ms = 11_000


@DELIVERY(r"a +starts .*all_incomplete", r"closes a\.1 at")
def lone(script: Script) -> None:
    """A lone node loses what it has forwarded."""
    script.cluster("a", 1)
    script.flow(1_500, 14_000, 100, "a", delay_ms=300)
    for at_ms in (4_000, 8_000, 12_000):
        script.do(script.about(at_ms, 2_000), "crash_machine", node="a", ms=300)
    script.until_ms = 15_000


@DELIVERY(r"absence node=c", r"delivers m\d+ c\.1", r"c +starts", r"c +does Sweep")
def long_absence(script: Script) -> None:
    """Interleaving 12: a node returns with files of slots that are long finished."""
    script.flow(2_500, 4_000, 60, "cab", delay_ms=script.random.randrange(2_000, 9_000))
    script.do(script.about(4_000), "absence", node="c", ms=26_000)
    script.flow(5_000, 28_000, 500, "ab", delay_ms=200)
    script.until_ms = 36_000


@DELIVERY(r"a slot file is gone", r"b +does LeaveWheel\(wheel=b\.1\)", r"closes b\.1 at")
def deleted_slot(script: Script) -> None:
    """A slot file that its origin has closed is deleted, and then written to again."""
    script.cluster("abc", 2, handles=2)
    seconds = [at_ms + script.random.randrange(900) for at_ms in (16_000, 17_000, 18_000)]
    for at_ms in range(3_000, 4_200, 100):
        due_ms = seconds[(at_ms - 3_000) // 400]
        script.send(at_ms, "b", delay_ms=due_ms - at_ms)
    script.do(script.about(4_300), "slot_gone", node="b", choice=script.random.randrange(1_000))
    for number, due_ms in enumerate(seconds):
        script.send(4_500 + 200 * number, "bca", delay_ms=due_ms - 4_500 - 200 * number)
    script.until_ms = 12_000


@DELIVERY(r"delivers m1 a\.1", r"a slot file is gone", r"reports lost a\.\d/")
def deleted_open(script: Script) -> None:
    """A lone node continues in a slot file that is deleted while open, and loses that too."""
    script.cluster("a", 1)
    due_ms = script.about(11_000, 900)
    script.send(2_400, "a", delay_ms=300)
    for at_ms in range(2_500, 4_500, 100):
        script.send(at_ms, "a", delay_ms=due_ms - at_ms)
    script.do(script.about(3_500), "slot_gone", node="a", choice=0)
    script.until_ms = 18_000


@DELIVERY(r"a slot file is gone", r"a +does Repair", r"delivers m\d+ c\.1")
def deleted_copy(script: Script) -> None:
    """The leader's copy of a slot file is deleted while it is open, and is restored."""
    due_ms = script.about(6_000, 900)
    for at_ms in range(2_500, 3_500, 100):
        script.send(at_ms, "c", delay_ms=due_ms - at_ms)
    choice = script.random.randrange(1_000)
    script.do(script.about(3_600), "slot_gone", node="a", choice=choice)
    script.until_ms = 9_000


@DELIVERY(r"a bit flipped in index", r"a slot file is gone", r"a +does Repair", r"delivers m1 c\.1")
def row_and_file(script: Script) -> None:
    """The leader's disk loses a frame's row and its slot file: nothing shows its second.

    Other frames of the second may be found by their rows; this frame must be missed all the same.
    """
    due_ms = script.about(9_000, 900)
    for number in range(script.random.choice((1, 1, 3))):
        at_ms = 2_600 + 100 * number
        script.send(at_ms, "c", delay_ms=due_ms - at_ms)
    script.do(3_600, "bit_flip", node="a", what="index", choice=script.random.randrange(1 << 30))
    script.do(script.about(3_650), "slot_gone", node="a", choice=0)
    script.until_ms = 14_000


@DELIVERY(r"a bit flipped in index", r"server died", r"reports lost a\.1/", r"closes a\.1 at")
def torn_behind_a_loss(script: Script) -> None:
    """A lone node loses rows and a slot file, and dies while it writes the rows of its last group.

    Rows whose slot file is there are written again by the next start.
    """
    script.cluster("a", 1, max_frame_messages=5)
    script.flow(3_500, 4_250, 25, "a", delay_ms=9_000)
    for _ in range(4):  # one of them behind the checkpoint: a start reads no other rows
        choice = script.random.randrange(1 << 30)
        script.do(4_260, "bit_flip", node="a", what="index", choice=choice)
    script.do(4_265, "slot_gone", node="a", choice=0)
    at_ms = script.about(4_320, 60)
    # Slot files are announced before they are made and written; then only some rows get through.
    script.do(at_ms, "kill_at_write", node="a", effects=5, torn=0.7)
    for delay_ms in (11_000, 12_500):
        script.send(at_ms, "a", delay_ms=delay_ms, patience_ms=100)
    script.until_ms = 9_000


@DELIVERY(r"disk_full", r"disk +DISK_OUT", r"does Sweep", r"does Sweep", r"does Sweep")
def full_disk(script: Script) -> None:
    """One node's disk fills, and stays full: the others continue, and continue to delete."""
    node = script.random.choice("abc")
    others = "".join(other for other in "abc" if other != node)
    script.flow(2_500, 50_000, 300, others, delay_ms=script.about(300, 3_000))
    spare_bytes = script.random.randrange(2_000)
    script.do(script.about(5_000, 2_000), "disk_full", node=node, spare_bytes=spare_bytes,
              ms=FOREVER_MS)  # fmt: skip
    script.until_ms = 55_000


@DELIVERY(r"slow_files", r"does CloseWheel", r"does Sweep", r"does DeleteWheel")
def slow_files(script: Script) -> None:
    """File operations are slow on every node; callers are not held up by work beside them."""
    script.cluster("abc", 2, max_frame_messages=5)
    for node in "abc":
        script.flow(script.about(2_500), 24_000, 450, node, delay_ms=script.about(2_000, 4_000))
    for node in "abc":
        script.do(4_000, "slow_files", node=node, operations=("open", "sync", "delete"),
                  us=50_000, ms=FOREVER_MS)  # fmt: skip
    script.do(script.about(9_000, 1_000), "kafka_down", ms=8_000)
    script.do(script.about(7_000, 2_000), "kill_server", node=script.random.choice("abc"))
    script.until_ms = 29_000


@DELIVERY(r"delivers m1 ", r"reports asked", r"reports cancelled", r"pause node=a", r"delivers")
def halves_and_words(script: Script) -> None:
    """Halves that are committed, rolled back, or left; some are committed and cancelled at once.

    Some are committed at another node than the one that has them. In the end their leader rests.
    """
    script.cluster("abc", 2, halves=True)
    script.half(4_000, "a", hold_ms=8_000)
    for at_ms in range(4_200, 16_000, 1_200):
        script.half(at_ms, "a", hold_ms=3_000, told="b")
        for ends in ("commit", "rollback"):
            script.half(at_ms, "b", hold_ms=1_000, ends=ends, says=False)
        script.half(at_ms, "c", hold_ms=3_000, ends="rollback", after_ms=300)
        for turn, node in enumerate("abcabc"):
            both = script.half(at_ms + turn, node, hold_ms=2_000, after_ms=100 * turn + 50)
            script.cancel(at_ms + turn + 100 * turn + script.random.randrange(100), both, node)
    script.do(script.about(14_000), "pause", node="a", part="cleaner", ms=9_000)
    script.until_ms = 30_000


@DELIVERY(
    r"HALVES_NOT_READY",
    r"attempt 1 at m\d+: RETRIED",
    r"checker +dies",
    r"attempt 2 at m\d+: FORWARDED",
    r"attempt 4 at m\d+: UNDECIDED",
)
def halves_answered(script: Script) -> None:
    """Groups answer for halves whose senders did not: at once, later, or never.

    The first ones are refused, as one node has a release that does not know them. Some have a
    delay, some were committed when their second was in memory.
    """
    script.cluster("abc", 2, halves=True)
    script.do(-1, "old_release", node="c", ms=4_500)
    for at_ms in (3_200, 3_600, 4_000):
        script.half(at_ms, "a", hold_ms=3_000)
    for at_ms in range(6_500, 9_500, 700):
        for ends in ("commit", "rollback"):
            for unknowns in (0, 1, 2, 9):
                later_ms = script.random.choice((None, 900, 6_000))
                script.half(at_ms, "a", hold_ms=800, later_ms=later_ms, ends=ends, says=False,
                            unknowns=unknowns)  # fmt: skip
        script.half(at_ms, "a", hold_ms=2_500, told="b", after_ms=script.about(1_800))
        script.half(at_ms, "b", hold_ms=2_500, later_ms=script.about(5_000), after_ms=300)
    for at_ms in (8_100, 9_300, 10_700):
        script.do(script.about(at_ms, 500), "checker_dies", ms=script.about(10, 700))
    script.until_ms = 22_000


@DELIVERY(
    r"is handed COMMITS",
    r"has i\d+ cancel_message",
    r"reports asked",
)
def halves_by_records(script: Script) -> None:
    """Halves through ingress, committed at once, or when it is nearly too late."""
    script.cluster("abc", 2, halves=True)
    for at_ms in range(4_500, 15_000, 1_500):
        for after_ms in (1, 1, 300):
            script.half(at_ms, "a", hold_ms=4_000, after_ms=after_ms, is_ingress=True)
        script.half(at_ms, "a", hold_ms=3_000, later_ms=6_000, after_ms=50, is_ingress=True)
        script.half(at_ms, "a", hold_ms=2_000, ends="rollback", after_ms=9, is_ingress=True)
        script.half(at_ms, "a", hold_ms=1_000, after_ms=script.about(980), is_ingress=True)
    script.until_ms = 22_000


@DELIVERY(r"commits m1 at b", r"reports asked m1", r"FORWARDED is the answer on m1")
def halves_released_late(script: Script) -> None:
    """A release is held by W nodes only after its half was asked about."""
    script.cluster("abc", 2, halves=True)
    for at_ms in range(5_000, 12_000, 1_500):
        script.half(at_ms, "b", hold_ms=1_000, after_ms=script.about(780), patience_ms=600)
        script.mute(at_ms + 700, "Frames", "b", "ac", ms=1_200)
    script.until_ms = 18_000


@DELIVERY(
    *(r"reports asked m1", r"delivers m2 ", r"refuses m\d+", r"dead letter m\d+"),
    *(r"replays m\d+", r"FORWARDED is the answer", r"delivers", r"reports asked"),
)
def halves_unasked(script: Script) -> None:
    """The halves topic takes nothing for a while; its leader learns that, its operator replays."""
    script.cluster("abc", 2, halves=True)
    script.half(4_000, "a", hold_ms=1_500, ends="rollback", says=False)
    script.do(6_000, "own_topic_trouble", which="halves", trouble="denied", ms=9_000)
    for at_ms in range(6_200, 27_000, 1_300):
        script.half(at_ms, "b", hold_ms=script.about(1_200), after_ms=100)
        for ends in ("commit", "rollback"):
            script.half(at_ms, "c", hold_ms=script.about(1_200), ends=ends, says=False)
    for at_ms in (5_000, 6_500, 8_000, 16_000):
        script.half(at_ms, "a", hold_ms=2_000, after_ms=script.about(100, 900), is_ingress=True)
    script.until_ms = 32_000


@DELIVERY(r"client +cancels m1 ", r"reports asked", r"hears of m\d+: already delivered")
def halves_beyond_v(script: Script) -> None:
    """Rows about halves lie behind late halves, of which a leader takes a few at a time."""
    script.cluster("abc", 2, halves=True, first_cap_messages=4, cap_messages=6)
    for at_ms in (3_000, 6_000, 9_000):
        for node in "bc":
            script.mute(at_ms, "Applied Gossip", node, "a", ms=650)
        halves = [
            script.half(at_ms + 10 * n, "a", hold_ms=400, ends="rollback", says=False)
            for n in range(1, 12)
            for _ in range(3)
        ]
        for half in halves[:9:3]:
            script.cancel(script.about(at_ms + 150), half, "a")
    script.until_ms = 12_000


@DELIVERY(r"client +cancels m\d+ ", r"hears of m\d+: cancelled", r"delivers m\d+ b\.1")
def same_ids_for_other_topics(script: Script) -> None:
    """Somebody sends the ids and dues of others' messages to a topic of his own, before or after.

    One of both is cancelled, or gets another due: the other one goes on.
    """
    script.cluster("ab", 2)
    for at_ms in (3_000, 6_000):
        for owner, other in ("ab", "ba"):
            first = script.send(at_ms, owner, delay_ms=2_500, count=4)
            twin = script.send(
                script.about(at_ms + 300, 50), other, delay_ms=0, count=4, twin_of=first
            )
            script.cancel(at_ms + 900, first + 1, "ab")
            script.cancel(at_ms + 900, twin + 2, "ab")
            script.reschedule(at_ms + 900, first + 3, 4_000, "ab")
    script.until_ms = 14_000
