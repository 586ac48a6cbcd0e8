"""What ``adaptive`` remembers from one plan to the next, and how that follows the node."""

import math
from dataclasses import dataclass, field, replace

from shoal.policies.candidates import candidates_of
from shoal.policies.excursions import Excursions
from shoal.policies.hindsight import Hindsight, News
from shoal.policies.second_chance import Chances
from shoal.policies.surges import Surges
from shoal.policies.terms import TermsOf, terms_of
from shoal.policies.values.layouts import Unit, layouts_up_to
from shoal.policies.values.partition import Partition
from shoal.policies.values.snapshot import Snapshot, StepPredictor, requests_lately

TERMS_SECONDS = 0.5
"""How long the cost model's numbers are used."""
USUAL_SECONDS = 60.0
"""Time constant of the usual number of requests: longer than the pauses between most bursts."""
REGRET_SECONDS = 120.0
"""Time constant with which it is forgotten by how much the node was slower than a layout."""
GONE_SHARE = 0.1
GONE_SECONDS = 8.0
"""A crowd has gone if for so long at most this share of the usual requests was there. Bursts that
pause for longer are left to what the next one shows."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the policy remembers from one plan to the next."""

    judged_at: float
    """When the layout was last judged, seconds."""
    news: News = field(default_factory=News)
    """What no shadow knows yet of requests."""
    judged: News | None = None
    """What the judgement has of ``news`` that goes on in another thread; None: none goes on."""
    hindsight: Hindsight | None = None
    """The shadows; None: there are none yet."""
    terms_at: float = 0.0
    """When the cost model gave what the units of the shadows can do, seconds."""
    chances: Chances = field(default_factory=Chances)
    """When the node last had each layout."""
    surges: Surges = field(default_factory=Surges)
    """The present surge of requests, and what is known of earlier ones."""
    age: float = 0.0
    """For how many seconds the node was watched, or since a crowd has gone."""
    requests: float = 0.0
    """Requests on the node, smoothed over ``USUAL_SECONDS``, or over ``age`` while this is less."""
    squared_requests: float = 0.0
    """The squares of their numbers, smoothed alike."""
    quiet_since: float = math.inf
    """Since when at most ``GONE_SHARE`` of the usual requests have been there, seconds."""
    past_regrets: tuple[tuple[Partition, float], ...] = ()
    """By how many seconds of requests the node was slower than each partition would have been, up
    to when that one's shadow last began anew."""
    excursions: Excursions = field(default_factory=Excursions)
    """What it has cost to leave each partition."""
    went_wider: bool | None = None
    """Whether the last switch went to fewer and wider units; None: there was none."""
    looked_at: float = -math.inf
    """When the policy last looked ahead, seconds."""
    foreseen: tuple[tuple[Partition, float], ...] = ()
    """The seconds of requests that a switch to each of these would save, by that look."""
    agreed: Partition | None = None
    """To which partition a switch seemed to pay then. To a wider one it must do so twice, because
    that is never urgent."""

    @property
    def usual_requests(self) -> float:
        """As many requests as one usually finds: between bursts this is about a burst's.

        It is the mean of their number as the requests themselves see it, not the clock.
        """
        return self.squared_requests / self.requests if self.requests else 0.0

    def judging(self, now: float) -> "Memory":
        """Return the memory while a judgement of all ``news`` goes on in another thread."""
        return replace(self, judged_at=now, judged=self.news, news=News())

    @property
    def undisturbed(self) -> "Memory":
        """The memory when a judgement is given up that goes on in another thread."""
        if self.judged is None:
            return self
        return replace(self, judged=None, news=self.judged.and_of(self.news))

    def watched(self, snapshot: Snapshot, model: StepPredictor, lane: Unit | None) -> "Memory":
        """Return the memory with the shadows as they are now.

        Args:
            snapshot: the node.
            model: predicts the times of steps.
            lane: the group that urgent requests have to themselves.
        """
        memory, terms = self._with_terms(snapshot, model)
        here = snapshot.partition
        candidates = [c for c in candidates_of(snapshot, 1, lane) if c != here]
        hindsight, brings = memory.hindsight, 0.0
        if hindsight is not None:
            hindsight = replace(hindsight, terms=terms)
            hindsight, brings = _followed(hindsight, snapshot, self.news)
        if hindsight is None or not hindsight.is_of(here, candidates, lane):
            hindsight = Hindsight.of(snapshot, candidates, terms, lane)
        surges = memory.surges.at(hindsight, len(self.news.arrived))
        memory = replace(memory, hindsight=hindsight, surges=surges, news=News())
        return memory._aged(snapshot, brings)._without_gone_crowd(snapshot.requests)

    def _with_terms(self, snapshot: Snapshot, model: StepPredictor) -> tuple["Memory", TermsOf]:
        """Return what units can do now, and the memory with the chances that are part of it."""
        now = snapshot.now
        if self.hindsight is not None and now - self.terms_at <= TERMS_SECONDS:
            return self, self.hindsight.terms
        # Pipelines are not chosen, but may be there, or have been there until the last switch.
        present = [unit.layout for unit in snapshot.partition]
        before = () if self.hindsight is None else self.hindsight.here
        known = *present, *(unit.layout for unit in before)
        every = tuple(dict.fromkeys((*layouts_up_to(snapshot.max_group), *known)))
        chances = self.chances.at(now, present, every)
        measured = terms_of(snapshot, model, every)
        terms = chances.terms(measured, present[0], now, requests_lately(snapshot))
        return replace(self, chances=chances, terms_at=now), terms

    def _aged(self, snapshot: Snapshot, brings: float) -> "Memory":
        """Return the memory when time has passed since the layout was last judged.

        Args:
            snapshot: the node.
            brings: the seconds of requests that a switch has saved.
        """
        elapsed = max(0.0, snapshot.now - self.judged_at)
        age = self.age + elapsed
        kept = math.exp(-elapsed / min(USUAL_SECONDS, age)) if age else 1.0
        regretted = math.exp(-elapsed / REGRET_SECONDS)
        requests = snapshot.requests
        return replace(
            self,
            judged_at=snapshot.now,
            age=age,
            requests=kept * self.requests + (1 - kept) * requests,
            squared_requests=kept * self.squared_requests + (1 - kept) * requests**2,
            past_regrets=tuple((p, regretted * (past - brings)) for p, past in self.past_regrets),
            excursions=self.excursions.aged(regretted),
        )

    def _without_gone_crowd(self, requests: int) -> "Memory":
        """Return the memory without what a crowd has taught, once it has gone.

        What comes next is nothing like that crowd. If it had to make up for what switches have cost
        then, or was compared with what was usual then, the node would stay for long in a layout
        that suits nobody. What is known of step times and of surges is kept.

        Args:
            requests: how many are on the node.
        """
        if requests > GONE_SHARE * self.usual_requests:
            return replace(self, quiet_since=math.inf)
        since = min(self.quiet_since, self.judged_at)
        is_gone = self.judged_at - since >= GONE_SECONDS
        if self.hindsight is None or not self.usual_requests or not is_gone:
            return replace(self, quiet_since=since)
        return replace(
            self,
            hindsight=self.hindsight.restarted(dict(self.hindsight.trials)),
            past_regrets=(),
            excursions=Excursions(),
            age=0.0,
            requests=0.0,
            squared_requests=0.0,
        )

    def leaving(
        self, snapshot: Snapshot, to: Partition, regrets: dict[Partition, float], loss: float
    ) -> "Memory":
        """Return the memory when the node changes to another partition.

        Args:
            snapshot: the node.
            to: the partition.
            regrets: by how many seconds of requests the node was slower than each partition would
                have been.
            loss: what the switch costs, in seconds of requests.
        """
        here = snapshot.partition
        is_wider = len(to) < len(here)
        is_back = self.went_wider is not None and self.went_wider != is_wider
        return replace(
            self,
            past_regrets=tuple((c, regret + loss) for c, regret in regrets.items()),
            excursions=self.excursions.leaving(here, regrets[here]),
            chances=self.chances.after_switch(snapshot.since_switch, back=is_back),
            went_wider=is_wider,
            agreed=None,
        )


def _followed(hindsight: Hindsight, snapshot: Snapshot, news: News) -> tuple[Hindsight, float]:
    """Return the shadows as they are now, and what a switch has saved the requests that it moved.

    The latter is in seconds of requests, and 0 if the node has not switched.
    """
    here = snapshot.partition
    if here not in dict(hindsight.trials):
        return hindsight.followed(snapshot, news), 0.0
    switched = hindsight.after_switch(here)
    brings = hindsight.rest - switched.current.final_cost(hindsight.terms)
    return switched.followed(snapshot, news).levelled(), brings
