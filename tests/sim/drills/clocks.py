"""Drills about clocks that are ahead together, and w that is set back."""

from __future__ import annotations

from sim.drills.script import Drills, Script

CLOCKS = Drills()

HALF_AN_HOUR_MS = 1_800_000


def ahead_without_b(script: Script, at_ms: int, ms: int, *, step_ms: int = HALF_AN_HOUR_MS) -> None:
    """The clocks of node a and of the brokers are ahead, and b is not heard: so a leads ahead."""
    script.do(at_ms - 500, "absence", node="b", ms=script.about(6_000))
    script.do(at_ms, "clocks_ahead", nodes=("a",), step_ms=step_ms, ms=ms)
    script.do(at_ms, "kill_server", node="a")


def both(script: Script, *, delay_ms: int) -> tuple[int, int]:
    """Something is pending, accepted by a and by b."""
    script.cluster("ab", 2)
    mine = script.send(3_000, "a", delay_ms=delay_ms, count=3)
    return mine, script.send(3_300, "b", delay_ms=delay_ms, count=2)


@CLOCKS(
    r"clocks_ahead",
    r"delivers m1 ",
    r"w is set back",
    r"hears of a m1:acknowledged",
    r"hears of m2: already delivered",
    r"hears of b m\d+:acknowledged",
    r"reports duplicate m1$",
)
def set_back(script: Script) -> None:
    """Messages handled ahead are sent again and cancelled; more are sent for the same time."""
    mine, other = both(script, delay_ms=45_000)
    ahead_without_b(script, 6_000, script.about(14_000))
    script.do(script.about(28_000), "set_back")
    script.send_again(script.about(31_000, 3_000), mine, "ab", count=3)
    script.send_again(script.about(31_000, 3_000), other, "ba", count=2)
    script.cancel(script.about(31_000, 3_000), mine + 1, "a")
    script.flow(35_000, 42_000, 300, "ab", delay_ms=1_500, patience_ms=4_000)
    script.flow(35_000, 42_000, 450, "ba", delay_ms=12_000, patience_ms=4_000)
    script.until_ms = 56_000


@CLOCKS(r"clocks_ahead", r"delivers m1 ", r"(server|cleaner) died", r"w is set back", r"delivers")
def set_back_and_crash(script: Script) -> None:
    """The same while processes die around the operator's command."""
    mine, other = both(script, delay_ms=45_000)
    ahead_without_b(script, 6_000, script.about(14_000))
    at_ms = script.about(28_000)
    for _ in range(script.random.randrange(2, 6)):
        what = script.random.choice(("kill_cleaner", "kill_server", "kill_at_effect"))
        rest = {"effects": script.random.randrange(30)} if what == "kill_at_effect" else {}
        script.do(script.about(at_ms - 1_500, 4_500), what, node=script.random.choice("ab"), **rest)
    script.do(at_ms, "set_back")
    script.send_again(script.about(29_000, 6_000), mine, "ab", count=3)
    script.send_again(script.about(29_000, 6_000), other, "ba", count=2)
    script.flow(29_000, 40_000, 300, "ab", delay_ms=4_000, patience_ms=6_000)
    script.until_ms = 56_000


@CLOCKS(r"w is set back", r"clocks_ahead", r"w is set back", r"reports duplicate m1$", r"delivers")
def set_back_twice(script: Script) -> None:
    """A clock is ahead again before w has reached the first one's time."""
    mine, other = both(script, delay_ms=59_500)
    ahead_without_b(script, 6_000, script.about(14_000))
    script.do(script.about(28_000), "set_back")
    later = script.send(32_000, "ab", delay_ms=40_000, count=3, patience_ms=4_000)
    ahead_without_b(script, 38_000, script.about(6_000), step_ms=HALF_AN_HOUR_MS // 2)
    script.do(script.about(54_000), "set_back")
    for first, count in ((mine, 3), (other, 2), (later, 3)):
        script.send_again(script.about(57_000, 3_000), first, "ab", count=count)
    script.flow(62_000, 66_000, 300, "ab", delay_ms=1_500, patience_ms=4_000)
    script.until_ms = 80_000


@CLOCKS(r"clocks_ahead", r"delivers m1 ", r"w is set back", r"delivers m\d+ b", r"delivers m\d+ a")
def set_back_short(script: Script) -> None:
    """It was not far ahead: w reaches the time of what was done ahead, and passes it."""
    mine, other = both(script, delay_ms=32_000)
    ahead_without_b(script, 6_000, script.about(10_000), step_ms=script.about(25_000, 5_000))
    script.do(script.about(24_000), "set_back")
    script.send_again(script.about(27_000, 3_000), mine, "ab", count=3)
    script.send_again(script.about(27_000, 3_000), other, "ba", count=2)
    script.flow(28_000, 46_000, 400, "ab", delay_ms=1_500, patience_ms=4_000)
    script.flow(28_000, 46_000, 700, "ba", delay_ms=6_000, patience_ms=4_000)
    script.until_ms = 54_000


@CLOCKS(
    r"clocks_ahead", r"delivers m\d+ ", r"w is set back", r"delivers m60 ", r"reports duplicate"
)
def set_back_in_a_millisecond(script: Script) -> None:
    """A clock is corrected while the messages of one millisecond are forwarded, some at a time."""
    script.cluster("ab", 2, first_cap_messages=4, cap_messages=8, max_frame_messages=3)
    first = script.send(3_000, "b", delay_ms=40_000, count=60)
    script.do(5_000, "kafka_faults", changes={"way_us": (20_000, 30_000)}, ms=8_000)
    ahead_without_b(script, 6_000, script.about(2_500, 600))
    script.do(script.about(24_000), "set_back")
    for number in range(0, 60, 7):
        script.send_again(script.about(28_000, 10_000), first + number, "ab")
    script.flow(30_000, 34_000, 500, "ab", delay_ms=3_000, patience_ms=4_000)
    script.until_ms = 50_000


@CLOCKS(
    r"clock_step node=c", r"client +hears of c .*CLOCK_AHEAD", r"client +hears of c .*acknowledged"
)
def days_ahead(script: Script) -> None:
    """An origin's clock is days ahead for a moment, in which it is given messages."""
    step_ms = script.random.choice((25, 60)) * 3_600_000
    script.do(2_500, "clock_step", node="c", step_ms=step_ms, ms=script.about(2_500, 1_000))
    for at_ms in range(3_000, 4_800, 300):
        script.send(at_ms, "c", delay_ms=step_ms + 2_000, patience_ms=500, timeout_ms=400)
    script.flow(7_000, 12_000, 500, "c", delay_ms=2_000)
    script.until_ms = 14_000


@CLOCKS(r"clocks_ahead", r"delivers m1 ", r"w is set back", r"kill_server node=a")
def corrected_alone(script: Script) -> None:
    """A lone node came to lead while Kafka's clock was wrong too; both are corrected.

    Nothing else happens for so long that it has to lead: a process that dies forgets the clocks.
    """
    script.cluster("a", 1)
    script.send(2_000, "a", delay_ms=20_000, count=3)
    script.do(3_000, "clocks_ahead", nodes=("a",), step_ms=HALF_AN_HOUR_MS, ms=script.about(5_000))
    script.do(3_000, "kill_cleaner", node="a")
    script.do(script.about(9_500), "set_back")
    script.do(34_000, "kill_server", node="a")
    script.until_ms = 56_000


@CLOCKS(
    r"clock_step node=a", r"hears of b m1:acknowledged", r"delivers m1 ", r"kill_cleaner node=a"
)
def disputed(script: Script) -> None:
    """Of two nodes one is a day ahead all the time: Kafka's clock shows which."""
    script.cluster("ab", 1)
    script.do(0, "clock_step", node="a", step_ms=24 * 3_600_000, ms=30_000)
    script.send(6_000, "b", delay_ms=2_000, count=3, patience_ms=4_000)
    script.flow(8_000, 45_000, 3_000, "b", delay_ms=1_000, patience_ms=4_000)
    script.do(50_000, "kill_cleaner", node="a")
    script.until_ms = 54_000


@CLOCKS(
    r'reschedule .*"set_backs":0,"to_ms":17637018',
    r"w is set back",
    r'reschedule .*"is_written":true,.*"to_ms":17637018',
)
def not_copied_while_ahead(script: Script) -> None:
    """Reschedules are put off while all clocks are ahead, and written once w is set back.

    The dues that they have by then were never chosen by anybody, and stay.
    """
    script.cluster("ab", 2)
    first = script.send(3_000, "a", delay_ms=20_000, count=3)
    script.cut(4_500, "a", "b", ms=script.about(12_500, 200))
    for number in range(3):
        script.reschedule(script.about(5_000, 500), first + number, 600 + 200 * number, "ab")
    script.do(8_000, "clocks_ahead", nodes=("a", "b"), step_ms=HALF_AN_HOUR_MS, ms=3_200)
    script.do(script.about(15_500), "set_back")
    script.until_ms = 24_000
