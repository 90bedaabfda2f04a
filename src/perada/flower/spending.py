"""What a site has spent of its own privacy: a file that the server cannot take back.

    STATE/FEDERATION/SITE/privacy.json

One ledger counts all runs of a federation, because they read the same images. Rounds that the server undoes stay in it:
their uploads have left. It is written before an upload leaves, so that a kill may count a round twice, but never misses
one. A round that is answered from the disk costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Damaged
from ..methods import copy_epochs
from ..privacy import Privacy
from ..privacy.accountant import Steps, check_installed
from ..privacy.ledger import Ledger
from ..privacy.spending import Spending
from ..runs.files import is_whole, read_object, sealed, write_atomic
from ..server.checks import Refused
from .messages import PRIVACY_SPENT

if TYPE_CHECKING:
    from .client import Work

FILE = "privacy.json"
ADVICE = "restore it from a backup: without it this site does not know what it has spent"


@dataclass(frozen=True)
class SiteSpending:
    """The ledger of one site, and what a round of a plan costs it."""

    path: Path
    site: str
    privacy: Privacy  # of the plan, with the smaller δ of the plan's and the site's
    spending: Spending
    own_budget: float  # of site.toml; 0 is none

    @classmethod
    def of(cls, work: Work) -> SiteSpending:
        settings, config = work.site.settings, work.config
        privacy = config.privacy
        if privacy.of_samples:
            check_installed()
        if settings.budget:
            privacy = replace(privacy, delta=min(privacy.delta, settings.delta))
        sizes = {settings.name: len(work.federation.clients[0].train)}
        epochs = copy_epochs(work.experiment.method, config.train.epochs)
        spending = Spending(privacy, sizes, config.train.batch, epochs)
        return cls(work.site.state.path / FILE, settings.name, privacy, spending, settings.budget)

    @property
    def counts(self) -> bool:
        """Whether rounds of this plan cost the site anything: at level `client` the server adds the noise."""
        return self.privacy.of_samples

    def ledger(self) -> Ledger:
        """Returns what was spent so far, in all runs."""
        if not self.path.exists():
            return Ledger()
        content = read_object(self.path, {"spent": dict}, ADVICE)
        try:
            if is_whole(content):
                return Ledger.read(content["spent"])
        except (AttributeError, TypeError, ValueError):
            pass
        raise Damaged(f"{self.path} is damaged: {ADVICE}")

    @property
    def epsilon(self) -> float:
        """The site's ε so far."""
        return self.ledger().epsilon(self.site, self.privacy)

    def check(self) -> None:
        """Refuses a round that would pass the plan's budget or the site's own."""
        if not self.counts:
            if self.own_budget:
                raise Refused("it takes part with differential privacy of its samples only (Privacy.level=sample)")
            return
        ledger, most = self.ledger(), self._budget()  # a damaged ledger is refused before anything is trained
        if most and ledger.epsilon(self.site, self.privacy, self._bill()) > most:
            raise Refused(PRIVACY_SPENT)

    def pay(self) -> None:
        """Writes down one more round."""
        if self.counts:
            ledger = self.ledger().charged({self.site: self._bill()})
            write_atomic(self.path, sealed({"spent": ledger.as_note()}))

    def _bill(self) -> Steps:
        return self.spending.bill[self.site]

    def _budget(self) -> float:
        """Returns the stricter one of the plan's budget and the site's own; 0 for none."""
        return min((b for b in (self.privacy.budget, self.own_budget) if b), default=0.0)

    def told(self) -> str:
        """Returns the site's ε in words, for its own log; empty where nothing is counted."""
        if not self.counts:
            return ""
        return f"; ε {self.epsilon:.2f} so far" + (f" of {most:g}" if (most := self._budget()) else "")
