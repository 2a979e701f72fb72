"""How likely a drafted token stands, by its place in the draft, and which draft gives most tokens for its cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable

PRIOR, WEIGHT = 0.8, 5.0  # the chance that a first draft goes by, and the tokens that it counts for


class Odds:
    """Counted over drafts, each weighing `fade` of what the next one does. A place that was tested little goes by
    the place before it, as tokens of a draft are much alike.
    """

    def __init__(
        self, fade: float, of: Odds | None = None, prior: float = PRIOR, weight: float = WEIGHT
    ):
        """`of`: the odds of more drafts, these among them, which a place that was tested little goes by. `prior`: the
        chance that a first draft goes by, and `weight` the tokens that it counts for.
        """
        self._fade, self._of = fade, of
        self._prior, self._weight = prior, weight
        self._stood: list[float] = []  # by place
        self._tested: list[float] = []

    def observe(self, drafts: Iterable[tuple[int, int]]) -> None:
        """Drafts of one round: how many levels each had (a chain's tokens), how many of them stand."""
        self._stood = [self._fade * n for n in self._stood]
        self._tested = [self._fade * n for n in self._tested]
        for drafted, stood in drafts:
            tested = min(drafted, stood + 1)
            more = [0.0] * (tested - len(self._tested))
            self._stood += more
            self._tested += more
            for place in range(tested):
                self._tested[place] += 1
                self._stood[place] += place < stood

    def expected(self, most: int) -> list[float]:
        """Tokens that a round gives which drafts 0, 1, … `most` (arXiv:2211.17192, its chance by place)."""
        found, all_stand = [1.0], 1.0
        for chance in self.chances(most):
            all_stand *= chance
            found.append(found[-1] + all_stand)
        return found

    def chances(self, most: int) -> list[float]:
        """Of a token at places 0 … `most` - 1 to stand, where those before it do."""
        found, chance = list[float](), self._prior
        of = None if self._of is None else self._of.chances(most)
        for place in range(most):
            chance = chance if of is None else of[place]
            if place < len(self._tested):
                tested = self._tested[place] + self._weight
                chance = (self._stood[place] + self._weight * chance) / tested
            found.append(chance)
        return found

    def best(self, cost: Callable[[int], float], least: int, most: int) -> int:
        """The draft of `least` to `most` tokens that gives most for its cost, the shortest of equals."""
        expected = self.expected(most)
        return max(range(least, most + 1), key=lambda drafted: expected[drafted] / cost(drafted))
