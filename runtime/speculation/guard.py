"""Whether drafting pays on this machine: the tokens that rounds gave, against what their calls cost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from accel.runtime.decode.costs import Costs
from accel.runtime.speculation.odds import Odds
from accel.runtime.speculation.round_cost import RoundCost, unmeasured_cost

MOST = 31  # tokens of a draft whose call the costs are known for
TRIAL = 4  # rounds that are tried before they are judged
LOSS = 1.5  # plain steps that drafts may lose before they gained any, beside a share of the steps
KEPT = 10.0  # plain steps that were gained of which later drafts may lose as many
FIRST = 4  # steps before a drafter that can look back does, and says what it would have drafted
PLAIN = 16  # steps without drafts whose median says what one takes
HEARD = 2  # tokens that are known to stand or fall, before a drafter that is watched drafts
DOUBT, FEW = (
    0.5,
    1.0,
)  # the chance that such a drafter's tokens go by, and the tokens that it counts for
MARGIN = 1.05  # times its cost a draft gives that pays by what would have been
REST, LONGEST = (
    16,
    256,
)  # steps without drafts after a trial that did not pay; twice as many after each further one
SHARE = 0.02  # of the steps: more than that trials do not lose
DEARER, HARMLESS = (
    3.0,
    0.2,
)  # a round's drafter may take so many times what is known of it, or plain steps
HOST = 2e-4  # seconds that a round with a draft takes beside its call and its drafter's, as far as is known before
BESIDE = 1.0  # plain steps: more is the machine's doing
FADE = 0.8  # what a round weighs after each later one


class Guard:
    """Of one session, whose calls have `batch` rows: how long drafts may be, and when there are to be none.

    A round pays where its rows got more tokens, on average, than as many plain steps would have given in its
    time: that of the call by the measured curve, c(T)/c(1) (`model.costs`; of B rows, a call of T tokens is taken
    for one of B T), that of the drafter by how it compares with the call. `draft_cost`: what a drafted token costs, in
    plain steps, as far as is known before. `shaped`: drafts are trees, whose shape says how large they are. `probes`:
    the drafter can say what it would have drafted of tokens that came without (`probe`), which costs less than a trial.
    `watches`: it runs no model, so that it drafts beside plain steps, and before the first token (`watch`): nothing is
    tried. `opening`: plain steps that the first draft or probe takes beside.

    Of n steps all of this may lose `LOSS` and n times `SHARE`, and what drafts gained: a round that could lose more is
    shortened, or not run. Where no draft pays even if all of it stands, none is made, probed or watched.
    """

    def __init__(
        self, costs: Costs, batch: int, draft_cost: float = 0.0, shaped: bool = False, probes: bool = False,
        watches: bool = False, opening: float = 0.0,
    ):  # fmt: skip
        self._known = costs
        self._odds = Odds(FADE, prior=DOUBT, weight=FEW) if watches else Odds(FADE)
        self._shaped, self._watches, self._opening = shaped, watches, opening
        self._heard = 0  # tokens of drafts that were watched since the last rest
        self._weight, self._levels, self._nodes = (
            0.0,
            0.0,
            0.0,
        )  # of those, later ones weighing more
        self._drafted, self._drafting = (
            1.0,
            draft_cost,
        )  # tokens, and the plain steps that they took
        self._host = 0.0  # plain steps of a round with a draft
        self._plain = deque[float](maxlen=PLAIN)  # seconds of steps without drafts
        self.of_batch(batch)
        self._pause = REST
        self._resting = 0
        self._rounds, self._given, self._spent = 0, 0.0, 0.0  # of this trial
        self._won = 0.0  # steps, by all rounds
        self._can_probe = self._probes = probes  # at all; before the next trial
        self._host = HOST / self._step if probes or watches else 0.0
        if probes:
            self._resting = FIRST
        elif draft_cost and not self._odds.best(self.cost, 0, MOST):
            self._resting = self._pause = LONGEST

    def of_batch(self, batch: int) -> None:
        """Calls have so many rows from now on."""
        self._batch = batch
        self._plain.clear()
        self._costs = list(map(round_costs(self._known, batch), range(MOST + 1)))
        self._step = self._known.seconds[0] * _cost(self._known, batch)  # seconds of a plain one
        self._best: int | None = None  # `limit`, where nothing was observed since
        self._may_pay = any(1 + drafted >= self.cost(drafted) for drafted in range(1, MOST + 1))

    @property
    def step(self) -> float:
        """Seconds of a plain step, as far as is known."""
        return self._step

    @property
    def due(self) -> bool:
        """Whether the drafter has to `probe` before anything is drafted."""
        return self._probes and self._may_pay and not self._resting and self._opening <= self._left

    @property
    def watching(self) -> bool:
        """Whether the drafter is to say what it drafts beside this step, which has no draft (`watch`)."""
        return self._watches and self._may_pay and not self._resting

    def watch(self, drafts: Sequence[tuple[int, int, int]], seconds: float) -> None:
        """Of tokens that come without drafts, what drafts would have been of rows at one place: how many levels each,
        how many of them stand, and how many tokens it has; and the time that it took to find out.
        """
        self._won -= seconds / self._step
        if drafts:
            self._odds.observe([draft[:2] for draft in drafts])
            self._heard += sum(min(levels, stood + 1) for levels, stood, _ in drafts)
            self._weight = FADE * self._weight + len(drafts)
            self._levels = FADE * self._levels + sum(draft[0] for draft in drafts)
            self._nodes = FADE * self._nodes + sum(draft[2] for draft in drafts)
        self._best = None
        if self._left < LOSS / 2:
            self._rest()

    def probe(self, drafts: Sequence[tuple[int, int]], seconds: float) -> None:
        """Of tokens that came without drafts, what drafts would have been: how many tokens, how many of them stand; and
        the time that it took to find out. There is a trial where such drafts pay.
        """
        self._probes, self._best = False, None
        if self._plain:  # none since rows joined or left
            self._step = median(self._plain)
        self._won -= seconds / self._step
        self._opening = 0.0
        for draft in drafts:  # the newest count for most
            self._odds.observe([draft])
        if not self._odds.best(self.cost, 0, MOST):
            self._rest()

    @property
    def limit(self) -> int:
        """The draft that gives most tokens for its cost, where tokens stand as likely as lately, or of trees the
        largest; 0 while drafting does not pay.
        """
        if self._resting or self._probes:
            return 0
        if self._best is None:
            self._best = self._found(self.most) if self._may_pay else 0
        return self._best

    def affords(self, drafted: int, most: int) -> bool:
        """Whether a round pays that drafts so many tokens for each row, no fewer, of which at most `most` stand, and
        may lose what it does where none of them stands.
        """
        cost = self._call(drafted)
        return self.limit > 0 and 1 + most > cost and cost - 1 <= self._left

    @property
    def most(self) -> int:
        """Tokens of the longest draft that loses no more than it may where none of it stands; 0: none."""
        spare = self._left - self._opening
        if self.cost(1) - 1 > spare:
            return 0
        spare = max(spare / 2, self.cost(1) - 1)  # for another after it
        more = (drafted for drafted in range(2, MOST + 1) if self.cost(drafted) - 1 > spare)
        return next(more, MOST + 1) - 1

    def _found(self, most: int) -> int:
        """See `limit`."""
        if not most or not self._watches:
            return most if self._shaped or not most else self._odds.best(self.cost, 1, most)
        if self._heard < HEARD:
            return 0
        if not self._shaped:  # one that is cut short may win what lets the next be longer
            return min(most, self._odds.best(self._dearer, 0, MOST))
        levels = max(1, round(self._levels / self._weight))
        nodes = max(1, round(self._nodes / self._weight))
        pays = self._odds.expected(levels)[-1] > self._dearer(min(nodes, most))
        return most if pays else 0

    def _dearer(self, drafted: int) -> float:
        """A cost that drafts have to give more than."""
        return MARGIN * self.cost(drafted) if drafted else 1.0

    @property
    def _left(self) -> float:
        """Plain steps that may be lost from now on."""
        return LOSS + self._won

    def cost(self, drafted: int) -> float:
        """Of a round that drafts so many tokens for each row, in plain steps; the call alone where the drafter's
        time is not known yet.
        """
        return (
            self._costs[min(drafted, MOST)]
            + self._draft_cost * drafted
            + (self._host if drafted else 0.0)
        )

    def rest(self, seconds: float = 0.0) -> None:
        """A step went by without a draft, in so much time."""
        self._plain.append(seconds)
        self._won = min(self._won + SHARE, KEPT)
        self._best = None
        if self._resting:
            self._resting -= 1
            if not self._resting:
                self._rounds, self._given, self._spent, self._heard = 0, 0.0, 0.0, 0
                self._probes = self._can_probe

    def observe(
        self,
        tokens: float,
        drafts: Sequence[tuple[int, int]],
        again: int,
        drafting: float = 0.0,
        seconds: float = 0.0,
        largest: int = 0,
        computed: int | None = None,
    ) -> None:
        """A round gave each row that ran so many `tokens`; of what rows drafted, how many levels (a chain's tokens) and
        how many of them stood. `again`: tokens that the next call has to run once more (0: none). `drafting`: the
        drafter's time, the call's being 1. `largest`: tokens of the largest draft (0: as many as levels). `computed`:
        the tokens of the call (None: as many of each row as of the longest).
        """
        self._odds.observe(drafts)
        self._best = None
        width = 1 + (largest or max(drafted for drafted, _ in drafts))
        cost = self._call(width - 1)
        if computed is not None:
            cost = _cost(self._known, computed) / _cost(self._known, self._batch)
        most = max(
            DEARER * self._draft_cost * (width - 1), HARMLESS
        )  # more is the machine's doing, or comes again
        self._won -= min(max(0.0, drafting * cost - most), LOSS)
        if self._rounds:  # in a trial's first, a drafter catches up
            self._drafted = FADE * self._drafted + width - 1
            self._drafting = FADE * self._drafting + min(drafting * cost, most)
        cost += self._draft_cost * (width - 1) + (self._call(again - 1) if again else 0.0)
        if self._can_probe or self._watches:
            if self._rounds and len(self._plain) >= FIRST:
                beside = min(max(0.0, seconds / median(self._plain) - cost), BESIDE)
                self._host = FADE * self._host + (1 - FADE) * beside
            cost += self._host
        self._rounds += 1
        self._given = FADE * self._given + tokens
        self._spent = FADE * self._spent + cost
        self._won, self._opening = min(self._won + tokens - cost + SHARE * tokens, KEPT), 0.0
        if self._left < LOSS / 4:  # the next could lose no more
            self._rest()
        elif self._rounds < TRIAL and self._spent < self._given + LOSS / 2:
            return
        elif self._given >= self._spent:
            self._pause = REST
        else:
            self._rest()

    def _rest(self) -> None:
        self._resting = max(self._pause, math.ceil(-self._won / SHARE))
        self._pause = min(2 * self._pause, LONGEST)

    def _call(self, drafted: int) -> float:
        """Of a call that checks so many drafted tokens for each row, in plain steps."""
        if drafted <= MOST:
            return self._costs[drafted]
        return round_costs(self._known, self._batch)(drafted)

    @property
    def _draft_cost(self) -> float:
        """Of a drafted token, in plain steps."""
        return self._drafting / self._drafted


def round_costs(costs: Costs | None, batch: int) -> RoundCost:
    """Of a call that checks so many drafted tokens for each of `batch` rows, in plain steps, without the drafter."""
    if costs is None:
        return unmeasured_cost
    return lambda drafted: _cost(costs, batch * (1 + drafted)) / _cost(costs, batch)


def steps_of(draft: Costs, tokens: int, costs: Costs | None, batch: int) -> float:
    """Of a draft model's call of so many tokens, in plain steps of the target; 0 where these are not known."""
    if costs is None:
        return 0.0
    return draft.seconds[0] * _cost(draft, tokens) / (costs.seconds[0] * _cost(costs, batch))


def _cost(costs: Costs, tokens: int) -> float:
    """Beyond what was measured, in proportion."""
    most = costs.tokens[-1]
    return costs.ratio(tokens) if tokens <= most else costs.ratio(most) * tokens / most
