"""Whether drafting pays on this machine: the tokens that rounds gave, against what their calls cost."""

from __future__ import annotations

from accel.runtime.costs import Costs

MOST = 31  # tokens of a draft whose call the costs are known for
TRIAL = 4  # rounds that are tried before they are judged
REST, LONGEST = 16, 256  # steps without drafts after a trial that did not pay; twice as many after each further one
FADE = 0.8  # what a round weighs after each later one
BELIEF = 4.0, 5.0  # tokens that stood, and that were tested, before any was: what a first draft goes by


class Guard:
    """Of one session, whose calls have `batch` rows: how long drafts may be, and when there are to be none.

    A round pays where its rows got more tokens, on average, than as many plain steps would have given in its
    time by the measured curve, c(T)/c(1) (`model.costs`): of B rows, a call of T tokens is taken for one of B T.
    """

    def __init__(self, costs: Costs, batch: int):
        plain = _cost(costs, batch)
        self._costs = [_cost(costs, batch * width) / plain for width in range(1, MOST + 2)]
        self._stood = self._tested = 0.0
        self._pause = REST
        self._resting = 0
        self._rounds, self._given, self._spent = 0, 0.0, 0.0  # of this trial

    @property
    def limit(self) -> int:
        """The draft that gives most tokens for its cost, where each token stands as likely as lately
        (arXiv:2211.17192); 0 while drafting does not pay.
        """
        return 0 if self._resting else max(range(1, MOST + 1), key=self._speed)

    def rest(self) -> None:
        """A step went by without a draft."""
        if self._resting:
            self._resting -= 1
            if not self._resting:
                self._rounds, self._given, self._spent = 0, 0.0, 0.0

    def observe(self, tokens: float, width: int, drafted: int, stood: int, again: int) -> None:
        """A round's call of `width` tokens gave each row that ran so many `tokens`; of those `drafted` in all
        rows, `stood` stood. `again`: tokens that the next call has to run once more (0: none).
        """
        self._stood = FADE * self._stood + stood
        self._tested = FADE * self._tested + min(drafted, stood + 1)
        self._rounds += 1
        self._given = FADE * self._given + tokens
        self._spent = FADE * self._spent + self._costs[width - 1] + (self._costs[again - 1] if again else 0.0)
        if self._rounds < TRIAL:
            return
        if self._given >= self._spent:
            self._pause = REST
        else:
            self._resting, self._pause = self._pause, min(2 * self._pause, LONGEST)

    def _speed(self, drafted: int) -> float:
        share = (self._stood + BELIEF[0]) / (self._tested + BELIEF[1])
        return (1 - share ** (drafted + 1)) / (1 - share) / self._costs[drafted]


def _cost(costs: Costs, tokens: int) -> float:
    """Beyond what was measured, in proportion."""
    most = costs.tokens[-1]
    return costs.ratio(tokens) if tokens <= most else costs.ratio(most) * tokens / most
