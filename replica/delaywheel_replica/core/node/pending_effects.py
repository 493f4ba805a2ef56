"""Effects whose outcome the member machine waits for.

If an effect fails, those after it in its list are dropped with it. Exceptions are deleting a
wheel, verifying it and reading it again, which take long, run beside everything else, and stand
alone. So effects
requested together are remembered together: with a failure the machine learns everything that will
not happen, and requests it again if it is still wanted.
"""

from delaywheel.identity import WheelId
from delaywheel_replica.core.node.events import (
    CloseWheel,
    DeleteWheel,
    Effect,
    LeaveWheel,
    Mirror,
    OpenWheel,
    ReadAgain,
    Repair,
    Save,
    VerifyWheel,
)

Alone = DeleteWheel | VerifyWheel | ReadAgain
"""Those that concern any number of files: each runs in steps, beside everything else."""

Awaited = Save | OpenWheel | LeaveWheel | Mirror | Repair | CloseWheel | Alone
"""Each of them is answered with an event, or with Failed."""


def wheel_of(effect: Awaited) -> WheelId | None:
    """Returns the wheel that an effect concerns; None if it concerns none."""
    match effect:
        case Save():
            return None
        case OpenWheel():
            return effect.spare.wheel
        case Mirror() | Repair():
            return effect.card.wheel
        case _:
            return effect.wheel


class PendingEffects:
    """Effects that were issued and have no answer yet, oldest first."""

    def __init__(self) -> None:
        self._lists = 0
        self._asked: list[tuple[int, Awaited]] = []

    def asked(self, effects: list[Effect]) -> None:
        """Notes those effects of a list that will be answered; long ones are tracked separately."""
        self._lists += 1
        together = self._lists
        for effect in effects:
            if isinstance(effect, Alone):
                self._lists += 1
                self._asked.append((self._lists, effect))
            elif isinstance(effect, Awaited):
                self._asked.append((together, effect))

    def has(self, kind: type[Awaited], wheel: WheelId | None = None) -> bool:
        """Whether an effect of this kind, for this wheel, awaits its answer."""
        for _, effect in self._asked:  # mostly none: a generator would cost more than the loop
            if isinstance(effect, kind) and wheel_of(effect) == wheel:
                return True
        return False

    def is_writing(self, wheel: WheelId) -> bool:
        """Whether frames of this wheel are being written to their files."""
        return bool(self._asked) and (self.has(Mirror, wheel) or self.has(Repair, wheel))

    def done(self, *kinds: type[Awaited], wheel: WheelId | None = None) -> Awaited | None:
        """Removes the oldest effect of one of these kinds for this wheel."""
        for index, (_, effect) in enumerate(self._asked):
            if isinstance(effect, kinds) and wheel_of(effect) == wheel:
                del self._asked[index]
                return effect
        return None

    def failed(self, failed: Effect) -> list[Awaited]:
        """Removes an effect that failed, and those that were dropped with it."""
        number = next((number for number, effect in self._asked if effect is failed), None)
        if number is None:
            return []
        gone: list[Awaited] = []
        kept: list[tuple[int, Awaited]] = []
        for entry in self._asked:
            falls = entry[0] == number and (gone or entry[1] is failed)
            if falls:
                gone.append(entry[1])
            else:
                kept.append(entry)
        self._asked = kept
        return gone
