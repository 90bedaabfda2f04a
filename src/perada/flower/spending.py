"""What a site has spent of its own privacy: a file that the server cannot take back.

    STATE/FEDERATION/SITE/privacy.json

One ledger counts all runs of a federation, because they read the same images. Rounds that the server undoes stay in it:
their uploads have left. It is written before an upload leaves, so that a kill may count a round twice, but never misses
one. A round that is answered from the disk costs nothing. A round whose uploads the site does not noise is written down
as steps without noise: from then on the site's ε is infinite.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import Damaged, InputError
from ..methods import copy_epochs
from ..privacy import Privacy
from ..privacy.accountant import Steps, check_installed
from ..privacy.ledger import Ledger
from ..privacy.spending import Spending
from ..runs.files import is_whole, read_file, read_object, sealed, write_atomic
from ..runs.options import check_private
from ..server.checks import Refused
from .messages import PRIVACY_SPENT
from .site_state import SiteState

if TYPE_CHECKING:
    from .client import Work

FILE = "privacy.json"
ADVICE = "restore it from a backup: without it this site does not know what it has spent"


def check_plan(config: Config, budget: float) -> None:
    """Refuses a plan that would tell more of a site's data than it says, or than a site with a budget allows."""
    if budget and not config.privacy.of_samples:
        raise Refused("it takes part with differential privacy of its samples only (Privacy.level=sample)")
    if config.privacy.on:
        try:
            check_private(config.make_method(), config.train, config.distill, config.drift, config.privacy)
        except InputError as error:  # it speaks of the plan alone
            raise Refused(str(error)) from error


@dataclass(frozen=True)
class SiteSpending:
    """The ledger of one site, and what a round of a plan costs it."""

    state: SiteState
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
        return cls(work.site.state, settings.name, privacy, spending, settings.budget)

    @property
    def path(self) -> Path:
        return self.state.path / FILE

    @property
    def counts(self) -> bool:
        """Whether rounds of this plan cost a finite ε: at level `client` the server adds the noise, not the site."""
        return self.privacy.of_samples

    def ledger(self) -> Ledger:
        """Returns what was spent so far, in all runs; refuses to take a ledger that is gone for an empty one."""
        if not self.path.exists():
            runs = {path.parent.name for path in self.state.path.glob("*/round-*")}
            trained = [_is_private(self.state, run) for run in runs if self.state.rounds(run)]
            if any(trained):
                raise Damaged(f"{self.path} is missing: {ADVICE}")
            return Ledger({self.site: self._bare}) if trained else Ledger()
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
        ledger, most = self.ledger(), self._budget()  # a damaged ledger is refused before anything is trained
        if most and ledger.epsilon(self.site, self.privacy, self._bill) > most:
            raise Refused(PRIVACY_SPENT)

    def pay(self) -> None:
        """Writes down one more round."""
        ledger = self.ledger().charged({self.site: self._bill})
        write_atomic(self.path, sealed({"spent": ledger.as_note()}))

    @property
    def _bill(self) -> Steps:
        """What a round costs."""
        return self.spending.bill.get(self.site, {}) if self.counts else self._bare

    @cached_property
    def _bare(self) -> Steps:
        """The steps of a round without noise of the site's own."""
        bare = replace(self.privacy, level="sample", noise=0.0, target=0.0, budget=0.0)
        return replace(self.spending, privacy=bare).bills().get(self.site, {})

    def _budget(self) -> float:
        """Returns the stricter one of the plan's budget and the site's own; 0 for none.

        The plan's budget is of what the plan counts, which at level `client` is not what this site sends.
        """
        budgets = (self.privacy.budget if self.counts else 0.0, self.own_budget)
        return min((b for b in budgets if b), default=0.0)

    def told(self) -> str:
        """Returns the site's ε in words, for its own log; empty where no round had noise."""
        if not (self.counts or any(step.noise for step in self.ledger().of(self.site))):
            return ""
        if math.isinf(epsilon := self.epsilon):
            return "; ε ∞: images were used in a run without differential privacy"
        return f"; ε {epsilon:.2f} so far" + (f" of {most:g}" if (most := self._budget()) else "")


def _is_private(state: SiteState, run: str) -> bool:
    """Returns whether a run's newest plan has noise of the site's own; False where it cannot be read."""
    try:
        privacy = json.loads(json.loads(read_file(state.path / run / "plan.json"))["plan"])["config"]["privacy"]
        return bool(privacy["level"] == "sample" and (privacy["noise"] > 0 or privacy["target"] > 0))
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return False
