"""All drills: short plans that lead straight to one rare situation.

They are run by name like the profiles of `profiles.py`.
"""

from __future__ import annotations

from sim.drills.clocks import CLOCKS
from sim.drills.closing import CLOSING
from sim.drills.delivery import DELIVERY
from sim.drills.ingress import INGRESS
from sim.drills.media import MEDIA
from sim.drills.script import Situation
from sim.drills.term import TERM
from sim.drills.topics import TOPICS
from sim.drills.verifying import VERIFYING

DRILLS: dict[str, Situation] = {
    **CLOCKS,
    **CLOSING,
    **DELIVERY,
    **INGRESS,
    **MEDIA,
    **TERM,
    **TOPICS,
    **VERIFYING,
}
