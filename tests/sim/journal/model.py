"""The model in sizes: how many members, and how many runs."""

from collections.abc import Callable
from dataclasses import dataclass

from sim.journal.cluster import Cluster, Wrong
from sim.journal.rules import RULES, Rules


@dataclass(frozen=True)
class Tried:
    """The result of some runs.

    Attributes:
        runs: how many there were, until one was wrong.
        losses: in how many of them something was declared lost.
        wrong: what was wrong with the last one.
        seed: its seed.
    """

    runs: int
    losses: int
    wrong: str | None = None
    seed: int | None = None

    def __str__(self) -> str:
        if self.wrong is None:
            return f"{self.runs} runs, {self.losses} with losses that were reported, all right"
        return f"seed {self.seed}: {self.wrong}"


@dataclass(frozen=True)
class JournalModel:
    """Runs of one size.

    Attributes:
        members: the wheel's members.
        min_insync: how many hold what is acknowledged.
        runs: how many runs.
        first: the first seed; odd ones sync every group.
        rules: the rules.
    """

    members: int = 3
    min_insync: int = 2
    runs: int = 1
    first: int = 0
    rules: Rules = RULES

    def tried(self, says: Callable[[str], object] | None = None) -> Tried:
        """Runs until one is wrong.

        Args:
            says: Is told what happens.
        """
        losses = 0
        for number in range(self.runs):
            seed = self.first + number
            sizes = {"members": self.members, "min_insync": self.min_insync}
            cluster = Cluster(seed, self.rules, says=says, **sizes)
            try:
                cluster.run()
            except Wrong as wrong:
                return Tried(number + 1, losses, str(wrong), seed)
            losses += bool(cluster.lost or cluster.partly_lost)
        return Tried(self.runs, losses)
