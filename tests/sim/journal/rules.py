"""The rules of the journal as switches, and mistakes: what goes wrong without one of them.

F is the seq through which a member has filled slot files, e its end (every frame up to it is held),
HW the high watermark, T the end of a closed wheel, V what a leader's progress covers.
"""

from dataclasses import dataclass, replace
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules; each default is the right one.

    Attributes:
        fills_through_record: a fill that was carried out covers its record, too: who has filled by
            it never lacks it.
        fills_when_acknowledged: a fill counts once HW or T covers its record; else once it is held.
        syncs_journal_first: the journal is synced through the record before anything is filled.
        syncs_before_entries: sections are on the medium before their entries are written.
        announces_at_end: F is announced after all entries; else before the first section.
        ends_by_falls: an end that falls ends a fill that is under way.
        writes_at_entry: a section is written where the entry ends; else where the file ends.
        cuts_back: what the entry has of a fill that does not count is cut back first.
        cuts_all_back: so is what it has of a later fill than this one, in all seconds if a frame of
            this one was lost; else it is taken for done.
        keeps_cut_entries: an entry of which nothing is left when it is cut back says so; else it is
            gone, and its second looks like one whose entry was lost.
        writes_again: what a failed sync was about is written again before anything counts on it.
        keeps_aside: whole frames behind one that is not are kept; else cut.
        fallen_is_incomplete: an end that has fallen makes a member incomplete.
        crashed_is_incomplete: so does a crash of its machine, unless every group is synced.
        complete_by_later_end: it is complete again when it holds an end of its origin that it heard
            after it fell; else that which it heard first.
        lacks_end_with_falls: what a member said to lack counts until its end falls.
        end_covers_filled: the end is never below F.
        syncs_before_checkpoint: slot files and tables are synced before F is saved.
        saves_before_deleting: F is saved before frames of the journal are deleted.
        entries_after_copies: a copied file is synced before its entry is written.
        compares_chains: a copy goes on behind what a second's file has of the same chain; else
            behind whatever it has.
        copies_within_limit: a copy by files ends no further than frames would be taken.
        own_floor_only: a copy leaves out seconds by its own floor, never by its sender's.
        repairs_from_as_far: a second is repaired from a member that has filled as far.
        cuts_beyond_end: what lies beyond T is cut.
        notes_damage: seconds that a fill has passed over are saved with F.
        keeps_for_damaged: frames stay while a second is damaged, and mend it when it can be read.
        doubts_zeros: a second without an entry that has a file of a fill up to F is damaged.
        late_from_sections: late rows that are filled beyond V are read from their seconds.
        releases_by_entries: releases filled beyond V are found in all seconds whose entries count
            releases; else among those that are due.
        notes_ledger: rows that are not published are noted before their frames are deleted.
        ledger_from_sections: rows that nobody has noted are read from their seconds.
        floor_waits_for_ledger: the floor passes a second when its rows are published.
        stops_when_full: a fill stops where there is no room; else it leaves out that section.
    """

    fills_through_record: bool = True
    fills_when_acknowledged: bool = True
    syncs_journal_first: bool = True
    syncs_before_entries: bool = True
    announces_at_end: bool = True
    ends_by_falls: bool = True
    writes_at_entry: bool = True
    cuts_back: bool = True
    cuts_all_back: bool = True
    keeps_cut_entries: bool = True
    writes_again: bool = True
    keeps_aside: bool = True
    fallen_is_incomplete: bool = True
    crashed_is_incomplete: bool = True
    complete_by_later_end: bool = True
    lacks_end_with_falls: bool = True
    end_covers_filled: bool = True
    syncs_before_checkpoint: bool = True
    saves_before_deleting: bool = True
    entries_after_copies: bool = True
    compares_chains: bool = True
    copies_within_limit: bool = True
    own_floor_only: bool = True
    repairs_from_as_far: bool = True
    cuts_beyond_end: bool = True
    notes_damage: bool = True
    keeps_for_damaged: bool = True
    doubts_zeros: bool = True
    late_from_sections: bool = True
    releases_by_entries: bool = True
    notes_ledger: bool = True
    ledger_from_sections: bool = True
    floor_waits_for_ledger: bool = True
    stops_when_full: bool = True

    def without(self, *names: str) -> "Rules":
        """Returns rules of which these are broken."""
        broken: dict[str, Any] = dict.fromkeys(names, False)
        return replace(self, **broken)


RULES: Final = Rules()
