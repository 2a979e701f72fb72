"""DEL (arXiv:2504.05598): self-speculative decoding; the first layers draft, up to the exit that is expected to give
most tokens for its cost, by how often each exit's token was the model's of late; all layers verify, with one cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from accel.ir.axis import option
from accel.ir.entries.exit import CHANCE, EXIT, ROWS, STREAM, TOKEN
from accel.ir.errors import InputError, RecipeError, shown
from accel.ir.invariants import Invariant
from accel.ir.taps import stream
from accel.runtime.call import Arrays, Logits
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.rounds import picked
from accel.runtime.decode.row import Row
from accel.runtime.draft import Base, Drafters, More
from accel.runtime.draft._by_self import BySelf, cost_of, layers_by_call
from accel.runtime.draft._streams import Streams
from accel.runtime.inputs.ints import Ints
from accel.runtime.session.session import Session
from accel.runtime.tree import Level, Tree
from accel.runtime.verify import Verdict

KEPT = 0.95  # of what an exit's tokens were before, with each round that counts them
LONGEST = 17  # tokens of a draft that an exit is judged by
UNKNOWN = 0.5  # the share that stands of an exit of which nothing is known
Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class DelExit(Base):
    """A drafted token runs the first layers up to an exit, the final norm and the LM head. `exits`: numbers of layers,
    of which the drafts of each row choose one; none: a sixth, a third, a half and two thirds of the layers.

    An exit is worth the tokens of a round for its cost, at the length that is best for it, by the share of tokens that
    it had right: of the newest `prompt` tokens of the prompt, then of those that were verified. Older ones count less.
    The exit that drafted says its tokens as it drafts; the others are computed in every `refresh`-th round, of the
    residual stream behind each exit. A draft ends behind a token that is less likely than halfway between what the
    exit's right and its wrong tokens were.

    The recipe gets `depth = by-call`, which makes each layer conditional and skips none by default.
    """

    exits: Any = None
    prompt: int = option(32, least=0, most=512)
    refresh: int = option(4, least=1)

    asks = {"tree": "chain"}
    needs = {"depth": "by-call"}
    relies = frozenset({Invariant.CHAINS, Invariant.LAYERS_BY_CALL})
    provides = frozenset({Invariant.PROBABILITIES})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exits is None:
            return
        wrong = not isinstance(self.exits, (list, tuple)) or not self.exits
        if wrong or any(type(one) is not int or one < 1 for one in self.exits):
            raise RecipeError(
                f"{self.full_name}: exits is {shown(self.exits)}; give numbers of layers, such as [4, 8, 12]"
            )
        object.__setattr__(self, "exits", tuple(sorted(set(self.exits))))

    def steps(self) -> list[Any]:
        from accel.passes.state.exits import Exits

        return [Exits(self)]

    def taps(self, layers: int) -> Sequence[str]:
        return [*(stream(n - 1) for n in self.numbers(layers)), stream(layers - 1)]

    def numbers(self, layers: int) -> tuple[int, ...]:
        """The exits of a model of so many layers."""
        if self.exits is not None:
            return tuple(self.exits)
        some = {max(1, round(layers * sixths / 6)) for sixths in (1, 2, 3, 4)}
        return tuple(sorted(n for n in some if n < layers))

    def open(self, session: Session, rows: Sequence[Row], context: DecodeContext) -> Drafters:
        layers = layers_by_call(context, self.full_name)
        exits = self.numbers(layers)
        if not exits or exits[-1] >= layers:
            raise InputError(
                f"{self.full_name}: exits = {list(exits)}, but the model has {layers} layers; give numbers from 1 to "
                f"{layers - 1}, so that drafting costs less than verification"
            )
        if missing := set(self.taps(layers)) - set(session.extra):
            raise InputError(
                f"{self.full_name} reads {min(missing)}, which this model was not built to give; build with draft = "
                f"{self.use}"
            )
        costs = [cost_of(context, n / layers) for n in exits]
        return _Exiting(self, session, rows, context, exits, costs)


class Worth:
    """What the exits of a row are worth. `costs`: of a drafted token of each, in plain steps."""

    def __init__(self, costs: Sequence[float]):
        self.costs = np.array(costs)
        self.counts = np.zeros((2, len(costs)))  # tokens that were wrong, and right
        self.sure = np.zeros((2, len(costs)))  # and how probable the exit thought them, in all

    def count(self, place: int, right: npt.NDArray[np.bool_], chances: Floats) -> None:
        """Tokens [n] of an exit: whether they were the model's, and how probable the exit thought them."""
        for kind in (0, 1):
            mine = right == bool(kind)
            self.counts[kind, place] = KEPT * self.counts[kind, place] + mine.sum()
            self.sure[kind, place] = KEPT * self.sure[kind, place] + chances[mine].sum()

    @property
    def shares(self) -> Floats:
        """Of each exit's tokens, those that are right [n]."""
        known = self.counts.sum(0)
        return np.where(known > 0, self.counts[1] / np.maximum(known, 1e-9), UNKNOWN)

    @property
    def best(self) -> int:
        """The exit that gives most tokens per cost, the first of equals."""
        lengths = np.arange(1, LONGEST + 1)[:, None]
        tokens = 1 + np.cumsum(self.shares**lengths, 0)
        return int((tokens / (lengths * self.costs + 1)).max(0).argmax())

    def least(self, place: int) -> float:
        """The probability of a token behind which a draft ends; 0 where nothing is known."""
        known = self.counts[:, place]
        return float((self.sure[:, place] / known).mean()) if (known > 0).all() else 0.0


@dataclass
class _Of:
    """What a row has. `place`: the exit that drafts. `said`: of its draft, each token that the exit thought likeliest,
    and how probable. `prompt`: the streams of its prompt, until they are counted.
    """

    worth: Worth
    place: int = 0
    rounds: int = 0
    said: tuple[tuple[int, float], ...] = ()
    prompt: Arrays | None = None


class _Exiting(BySelf):
    def __init__(
        self,
        of: DelExit,
        session: Session,
        rows: Sequence[Row],
        context: DecodeContext,
        exits: Sequence[int],
        costs: Sequence[float],
    ):
        super().__init__(session, rows, context, min(costs))
        self._of_method = of
        layers = layers_by_call(context, of.full_name)
        self._plans = [{"run_layers": np.arange(layers) < n} for n in exits]
        self._names = [stream(n - 1) for n in exits]
        self._last = stream(layers - 1)
        self._of = [_Of(Worth(costs)) for _ in rows]
        self._streams = Streams()
        self._in_prompt = of.prompt > 0
        if self._in_prompt:
            self._streams.ask((*self._names, self._last), of.prompt)
        session.listen(self._streams)

    def says(self, row: int) -> Mapping[str, Any]:
        return self._plans[self._of[row].place]

    def draft(self, limits: Mapping[int, int], more: More) -> Mapping[int, Tree]:
        self._end_prompt()
        for i in limits:
            self._count_prompt(self._of[i])
            self._of[i].place, self._of[i].said = self._of[i].worth.best, ()
        self._streams.ask((), 0)
        trees = super().draft(limits, _Ending(more, self))
        longest = max((len(tree) for i, tree in trees.items() if self._due(i)), default=0)
        if longest:
            self._streams.ask(self._names, longest + 1)
        return trees

    def goes_on(self, row: int, level: Level, logits: Sequence[Logits]) -> bool:
        """Note what the exit said; whether its token is likely enough."""
        of, line = self._of[row], logits[0].astype(np.float64)
        likeliest = int(line.argmax())
        with np.errstate(over="ignore", under="ignore"):
            odds = np.exp(line - line[likeliest])
        chance = 1 / float(odds.sum())
        of.said = (*of.said, (likeliest, chance))
        return bool(odds[int(level.tokens[0])] * chance >= of.worth.least(of.place))

    def observe(self, row: int, tree: Tree, verdict: Verdict, logits: Logits) -> None:
        super().observe(row, tree, verdict, logits)
        of = self._of[row]
        if not len(tree) or tree is not self._trees.get(row):
            return
        stands = len(verdict.path) + 1  # tokens in front of which all is committed
        said = logits[:stands, : self._vocab].argmax(-1)
        every = self._shadows(row, stands) if self._due(row) else None
        of.rounds += 1
        if every is not None:
            for place, (tokens, chances) in enumerate(zip(*every, strict=True)):
                of.worth.count(place, tokens == said[: tokens.size], chances)
        elif own := of.said[:stands]:
            tokens, chances = (np.array(one) for one in zip(*own, strict=True))
            of.worth.count(of.place, tokens == said[: tokens.size], chances)

    def _due(self, row: int) -> bool:
        """Whether all exits are asked in a row's round."""
        return self._of[row].rounds % self._of_method.refresh == 0

    def _shadows(self, row: int, count: int) -> tuple[Ints, Floats] | None:
        """Of the first tokens of the call that verified, what each exit says, and how probable [n,T]; none where the
        call's streams are not known.
        """
        positions, heard = self._streams.of(row)
        first = int(np.searchsorted(positions, self.rows[row].seen.size - 1))
        if first + count > positions.size or positions[first] != self.rows[row].seen.size - 1:
            return None
        return self._heads([heard[name][first : first + count] for name in self._names])

    def _heads(self, streams: Sequence[Floats]) -> tuple[Ints, Floats]:
        """What the head says of streams [T,E], and how probable [n,T]."""
        given = np.stack(streams)
        rows = np.tile(np.arange(given.shape[1]), (len(given), 1))
        out = self._session.entry(EXIT.name, {STREAM: given, ROWS: rows})
        return out[TOKEN].astype(np.int64), out[CHANCE]

    def _end_prompt(self) -> None:
        """What was heard until now are prompts."""
        if self._in_prompt:
            for i, of in enumerate(self._of):
                of.prompt = self._streams.of(i)[1]
        self._in_prompt = False

    def _count_prompt(self, of: _Of) -> None:
        if of.prompt:
            names = (*self._names, self._last)
            tokens, chances = self._heads([of.prompt[name] for name in names])
            for place in range(len(self._names)):
                of.worth.count(place, tokens[place] == tokens[-1], chances[place])
        of.prompt = None

    def join(self, other: Self) -> None:
        super().join(other)
        for one in (self, other):
            one._end_prompt()
        self._of += other._of

    def leave(self, order: Ints) -> None:
        super().leave(order)
        self._end_prompt()
        self._of = picked(self._of, order)

    def close(self) -> None:
        super().close()
        with suppress(InputError):  # of a session that a failed call closed
            self._session.unlisten(self._streams)


@dataclass(frozen=True)
class _Ending:
    """A row's length, and behind an unlikely token the end."""

    more_of: More
    drafters: _Exiting

    def draws(self, said: Mapping[int, Sequence[Logits]]) -> Collection[int]:
        return self.more_of.draws(said)

    def more(self, row: int, level: Level, logits: Sequence[Logits]) -> bool:
        sure = self.drafters.goes_on(row, level, logits)
        return self.more_of.more(row, level, logits) and sure
