"""Sites whose uploads are refused again and again, which are not asked to train for a while."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Damaged

PAUSE = 10  # rounds


class Quarantine:
    """The rounds of each site's refused uploads since its last good one."""

    def __init__(self, after: int) -> None:
        self.after = after  # rounds with a refused upload in a row; 0 puts no site in quarantine
        self.refused: dict[str, list[int]] = {}

    def load(self, note: object, where: str) -> None:
        """Reads what `refused` was when it was written."""
        if not isinstance(note, Mapping) or not all(_rounds(of) for of in note.values()):
            raise Damaged(f"{where} is damaged: quarantine does not list rounds per site")
        self.refused = {str(site): list(rounds) for site, rounds in note.items()}

    def undo(self, round: int) -> None:
        """Forgets what happened in this round and later: the run goes back to it."""
        self.refused = {s: before for s, of in self.refused.items() if (before := [r for r in of if r < round])}

    def holds(self, site: str, round: int) -> bool:
        """Whether a site is not asked in this round."""
        return self._reached(site) and round <= self.refused[site][-1] + PAUSE

    def split(self, cohort: Sequence[str], round: int) -> tuple[list[str], list[str]]:
        """Returns the sites to ask, and those of them that come back from a quarantine.

        If all of a cohort are in quarantine they are asked all the same, as no other could train this round. A site
        that comes back is in quarantine again after one more refused upload.
        """
        asked = [s for s in cohort if not self.holds(s, round)] or list(cohort)
        back = [s for s in asked if self._reached(s)]
        for site in back:
            self.refused[site] = self.refused[site][1 - self.after :] if self.after > 1 else []
        return asked, back

    def refuse(self, site: str, round: int) -> bool:
        """Counts a refused upload; returns whether it puts the site in quarantine.

        A round counts once: asked again, or after the server has died, a site sends the same bytes from its disk.
        """
        rounds = self.refused.setdefault(site, [])
        if round in rounds:
            return False
        rounds.append(round)
        return self._reached(site)

    def accept(self, site: str) -> None:
        """Forgets the refused uploads of a site: they are no longer in a row."""
        self.refused.pop(site, None)

    def _reached(self, site: str) -> bool:
        return 0 < self.after <= len(self.refused.get(site, ()))


def _rounds(of: Any) -> bool:
    return isinstance(of, list) and all(type(r) is int for r in of)
