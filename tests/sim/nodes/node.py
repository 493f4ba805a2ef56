"""One simulated node: a machine with a disk and clocks, its two processes, and their supervisor.

| what dies | what dies with it | what comes back |
|---|---|---|
| the cleaner | nothing | the cleaner, after `restart_ms` |
| the server | the cleaner | both |
| the machine | both, at once; perhaps unsynced writes | both, under a new boot id |
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.reschedules import RescheduleProposal, RescheduleWritten
from delaywheel_replica.core.protocol.status_files import CleanerStatus, ServerStatus
from sim.checking.truth import DATA
from sim.machine.clocks import SimClock
from sim.machine.disk import Crash, SimulatedDisk
from sim.machine.scheduler import US_PER_MS, US_PER_S, Scheduler, Timer
from sim.nodes.cleaner import SimCleaner
from sim.nodes.server import SimServer

if TYPE_CHECKING:
    from sim.nodes.world import World

SERVER, CLEANER = "server", "cleaner"

START_AGAIN_MS = 1_000
"""Interval of starting a server again that could not start."""


class SimNode:
    """One node of the cluster.

    Attributes:
        name: its id.
        clock: wall and monotonic clock.
        disk: holds the data folder.
        data: the data folder.
        boot: the boot id.
        server: None while it is dead.
        cleaner: None while it is dead.
        is_up: its machine runs, and shall run the two processes.
        is_gone: it was removed from the cluster for good.
        disk_us: the duration of an effect on the disk.
        recovery_us: the duration of the server's next start, while its cleaner runs already.
        old_row: the last server's status: its file outlives the server and the machine's boot.
        damaged: files in which its disk flipped a bit, or that lost their names.
        published: up to where each wheel is in its disk's own place for ledgers.
        reported_published: up to where any node reported each as published, as noted on its disk.
        sync_groups: frames are on the medium before they are acknowledged.
        has_lost: a frame that it had reported, and that its machine's last crash took; None: none.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.scheduler: Scheduler = world.scheduler
        self.random: Random = world.scheduler.stream(name)
        self.clock = SimClock(world.scheduler)
        self.disk = SimulatedDisk()
        self.disk.wait = self._wait
        self.disk.user = self._user
        self.data = DATA
        self.server: SimServer | None = None
        self.cleaner: SimCleaner | None = None
        self.is_up = False
        self.is_gone = False
        self.disk_us = 0
        self.recovery_us = 0
        self.old_row: ServerStatus | None = None
        self.damaged: set[Path] = set()
        self.published: dict[WheelId, int] = {}
        self.reported_published: dict[WheelId, int] = {}
        self.sync_groups = world.settings.sync_groups
        self.has_lost: str | None = None
        self._disk_waits: list[tuple[int, str, int]] = []  # when each ends, and how long it takes
        self._pauses_us: list[tuple[int, int]] = []  # begin and end of each
        self._boots = 0
        self._restart: Timer | None = None
        self.boot = self._next_boot()

    # --- lives

    def start(self) -> None:
        """Starts both processes; a server that cannot start is retried."""
        self.is_up = True
        self._restart = None
        if self.is_gone or self.server is not None:
            return
        self.disk.restart()
        if self.recovery_us:
            # The supervisor starts both: the cleaner reads the status of an earlier server.
            delay_us, self.recovery_us = self.recovery_us, 0
            self._start_cleaner()
            self._restart = self.scheduler.call_later(delay_us, self._start_server)
        else:
            self._start_server()

    def _start_server(self) -> None:
        self._restart = None
        try:
            self.server = SimServer(self)
        except Crash:
            self._start_later(self._restart_ms())
        except OSError as error:
            self.world.trace.add(self.name, "cannot start", error)
            self._start_later(START_AGAIN_MS)
        if self.server is None:
            self._end_cleaner()
            return
        self.world.checks.started(self)
        self.world.trace.add(self.name, "starts", self.server.store.state)
        self.server.start()
        self._start_cleaner()

    def server_died(self) -> None:
        """Called when the server has ended; the cleaner ends too, and both are restarted."""
        if self.server is not None:
            self.world.trace.add(self.name, "server died")
            self._end_server(silently=False)
        if self.is_up:
            self._start_later(self._restart_ms())

    def cleaner_died(self, error: BaseException | None = None) -> None:
        """Called when the cleaner has ended; it is restarted."""
        if self.cleaner is None:
            return
        self.world.trace.add(self.name, "cleaner died", error or "")
        self._end_cleaner()
        if self.server is not None:
            server = self.server
            server.run(server.take_cleaner_status, None)
            delay_us = self._restart_ms() * US_PER_MS
            server.process.call_later(delay_us, self._start_cleaner)
        else:
            self.scheduler.call_later(self._restart_ms() * US_PER_MS, self._start_cleaner)

    def kill(self) -> None:
        """Ends both processes; they stay dead until `start`."""
        self.is_up = False
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        if self.server is not None:
            self._end_server(silently=False)
        self._end_cleaner()

    def restart(self) -> None:
        """Restarts both processes at once with the current configuration."""
        if self.is_up:
            self.kill()
            self.start()

    def leave(self) -> None:
        """Removes the node from the cluster for good."""
        self.kill()
        self.is_gone = True

    def crash_machine(self, loses: Random | None, *, loses_all: bool = False) -> None:
        """Crashes the machine without notice; it stays dead until `start`.

        Args:
            loses: decides the fate of unsynced writes; None: all survive.
            loses_all: none of them does.
        """
        self.is_up = False
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        self._note_written()
        if self.server is not None:
            self._end_server(silently=True)
        self._end_cleaner()
        reported = self.world.checks.reported_on(self)
        if loses_all:
            self.disk.lose_unsynced()
        self.disk.restart(loses)
        lost = (frame for frame in reported if not frame.is_on(self.disk, with_row=False))
        if (frame := next(lost, None)) is not None:
            self.has_lost = f"{frame.wheel}/{frame.seq}"
        self.clock.reboot()
        self.boot = self._next_boot()
        self.world.checks.disturbed()

    def wipe(self, copy: dict[str, bytes | None] | None = None) -> None:
        """Gives the machine a new disk; it stays dead until `start`.

        Args:
            copy: What an earlier one had; None: the new one is empty.
        """
        self.crash_machine(None)
        self.disk.put_back(copy or {})
        self.has_lost = None  # its next storage has reported nothing
        self.old_row = None
        self.damaged.clear()
        self.published, self.reported_published = {}, {}
        self.world.checks.disturbed()

    def pause(self, *, server: bool, cleaner: bool) -> Callable[[], None]:
        """Pauses processes; returns a call that resumes them."""
        lives = [
            life.process
            for life, wanted in ((self.server, server), (self.cleaner, cleaner))
            if life is not None and wanted
        ]
        for process in lives:
            process.pause()
        began_us = self.scheduler.now_us

        def resume() -> None:
            self._pauses_us.append((began_us, self.scheduler.now_us))
            for process in lives:
                if process.alive and process.paused:
                    process.resume()

        return resume

    # --- between the two processes

    @property
    def storage(self) -> str | None:
        """The uuid of its data folder; None: there is none yet.

        It is read directly from the disk: what a dying server still wrote counts.
        """
        content = self.disk.peek(self.data / "node.json")
        return None if content is None else _storage_in(bytes(content))

    def server_row(self) -> ServerStatus | None:
        """The latest status of the server."""
        return None if self.server is None else self.server.row

    def cleaner_reported(self, status: CleanerStatus) -> None:
        """Called when the cleaner has a new status."""
        server = self.server
        if server is not None:
            server.process.call_later(0, server.run, server.take_cleaner_status, status)

    def wake_cleaner(self) -> None:
        """Called when the server's status has news."""
        if self.cleaner is not None:
            self.cleaner.hear_news()

    def row_stamped(self) -> None:
        """Called when the server has written its status as each tick does."""
        if self.cleaner is not None:
            self.cleaner.row_stamped()

    def commit_soon(self) -> None:
        """Called when a caller waits for a commit."""
        if self.cleaner is not None:
            self.cleaner.commit_soon()

    def send_to_cleaner(self, word: RescheduleProposal | RescheduleWritten) -> None:
        """Called when the server reports a message that gets another due."""
        if self.cleaner is not None:
            self.cleaner.hear(word)

    # --- inside

    def _start_cleaner(self) -> None:
        if self.is_up and self.cleaner is None:
            self.cleaner = SimCleaner(self)
            self.cleaner.start()

    def _end_cleaner(self) -> None:
        if self.cleaner is not None:
            self.cleaner.end()
            self.cleaner = None
            del self.disk.open_files[CLEANER]

    def _end_server(self, *, silently: bool) -> None:
        assert self.server is not None
        self._note_written()
        self.world.network.detach(self.name, silently=silently)
        self.world.frontend.broke(self.name)
        self.old_row = self.server.row or self.old_row
        self.server.end()
        self.server = None
        self._end_cleaner()

    def _wait(self, us: int) -> None:
        """Lets time pass for the server's threads; its start and reads take none."""
        task = self.scheduler.current
        if task is not None and self.server is not None and task.owner is self.server.process:
            self._wait_for_disk("file", us)

    def wait_for_effect(self) -> None:
        """An effect on the disk takes its time."""
        self._wait_for_disk("effect", self.disk_us)

    def _wait_for_disk(self, what: str, us: int) -> None:
        """A started effect takes its time even if the fault ends meanwhile."""
        self._disk_waits.append((self.scheduler.now_us + us, what, us))
        self.scheduler.sleep(us / US_PER_S)

    def paused_us(self, since_us: int) -> int:
        """How long processes were paused since then, counting pauses that have ended."""
        return sum(max(0, end - max(begin, since_us)) for begin, end in self._pauses_us)

    def longest_disk_wait_us(self, since_us: int) -> int:
        """The longest time of an effect and a file operation that were unfinished then."""
        self._disk_waits = [wait for wait in self._disk_waits if wait[0] >= since_us]
        longest: Counter[str] = Counter()
        for _, what, us in self._disk_waits:
            longest[what] = max(us, longest[what])
        return longest.total()

    def _user(self) -> str:
        """Which of the two processes runs."""
        task, cleaner = self.scheduler.current, self.cleaner
        if task is None or cleaner is None or task.owner is not cleaner.process:
            return SERVER
        return CLEANER

    def _note_written(self) -> None:
        """Counts what the dying server still wrote."""
        self.world.checks.looked(self)

    def _start_later(self, delay_ms: int) -> None:
        if self._restart is None:
            self._restart = self.scheduler.call_later(delay_ms * US_PER_MS, self.start)

    def _restart_ms(self) -> int:
        return self.random.randrange(20, 400)

    def _next_boot(self) -> str:
        self._boots += 1
        return f"{self.name}-boot-{self._boots}"


@lru_cache(16)
def _storage_in(content: bytes) -> str:
    return str(json.loads(content)["storage"])
