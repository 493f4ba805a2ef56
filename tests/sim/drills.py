"""All drills: short plans that lead straight to one rare situation.

They are run by name like the profiles of `profiles.py`.
"""

from __future__ import annotations

from sim.drills_clocks import CLOCKS
from sim.drills_closing import CLOSING
from sim.drills_delivery import DELIVERY
from sim.drills_office import OFFICE
from sim.drills_topics import TOPICS
from sim.drills_verifying import VERIFYING
from sim.script import Situation

DRILLS: dict[str, Situation] = {**CLOCKS, **CLOSING, **DELIVERY, **OFFICE, **TOPICS, **VERIFYING}
