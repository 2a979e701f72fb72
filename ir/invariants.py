"""Invariants that methods of a recipe rely on, break or provide: the vocabulary of compatibility."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

from accel.ir.axis import check_options
from accel.ir.errors import RecipeError

__all__ = ["PROVIDED", "Invariant", "Method"]


class Invariant(Enum):
    """A property of a session that holds unless a method of the recipe breaks it; those in `PROVIDED` hold
    only if a method provides them. The value is the sentence that an error prints.
    """

    UNIFORM_SLOTS = "all layers write the same tokens into the same slots"
    HEADS_ALIKE = "all heads of a layer hold the same tokens"
    HEADS_LEVEL = "all heads of a layer hold equally many tokens"
    FIXED_LAYERS = "no layer is deleted after the cache layout is fixed"
    ALL_LAYERS_RUN = "every layer computes queries, keys and values of every token"
    TOKENS_CONTIGUOUS = "the tokens of a row occupy consecutive slots, without gaps"
    EVERY_TOKEN_RUNS = "every token of a prompt runs through the whole model in its session"
    ALL_TOKENS_HELD = "a session keeps every token that it was given"
    ROW_PRIVATE = "rows do not share cache memory"
    PLAIN_KEYS = "the cache stores keys as attention reads them, and nothing derived from them"
    FULL_ATTENTION = "every query attends to every key that its mask allows"
    APPEND_ONLY = "tokens are appended, and no token is written again"
    CHAINS = "the tokens of a call form one chain, each the successor of the one before"
    EXCHANGEABLE_SIBLINGS = "drafted siblings are drawn independently of each other, or chosen"
    CALL_INDEPENDENT = "a token's keys and values depend on the tokens before it, not on how they were split into calls"
    DECODE_WIDTH = (
        "a call of a few tokens (`session.room`) gives the same logits as one call per token"
    )
    BATCH_INVARIANCE = (
        "the same tokens give the same bits, whatever shared the calls that wrote them"
    )
    REWIND = "the newest tokens can be removed (rewind)"
    HOST_MEMORY = "the cache is in the memory of this process"
    PROBABILITIES = "the drafter gives probabilities, not only a ranking of tokens"
    DRAFT_MODEL = "a draft model is built into the artifact"
    LAYERS_BY_CALL = "a call may select the layers that run"
    BRANCHES_BY_CALL = "a call may select the attentions and the MLPs that run"
    COARSE_READS = "a call may read the cache in fewer bits than it is stored in"
    FED_BY_BLOCK = "calls of a block compute the same slots, whatever those before them have filled"
    TEXT_PROMPT = "every token of a prompt is one of the vocabulary"
    LATER_READS = "a token also attends to what later tokens of its call select"


PROVIDED = frozenset(
    {
        Invariant.PROBABILITIES,
        Invariant.DRAFT_MODEL,
        Invariant.LAYERS_BY_CALL,
        Invariant.BRANCHES_BY_CALL,
        Invariant.COARSE_READS,
        Invariant.LATER_READS,
    }
)


class Method:
    """The declarations of a method, as class attributes, or as properties if they depend on an option. A
    recipe is refused if
    and only if one method relies on an invariant that another breaks, or on one in `PROVIDED` that no method provides.
    `small`: options for tiny models and a few dozen tokens, if the defaults are too large. `by_position`: it chooses
    tokens by their position alone, whatever they hold. `files`: options of a method of the loop that name a file or a
    folder which it reads as it runs; an artifact takes them along. `by_request`: options that come with each request,
    which no table sets. `embeds`: it reads the embeddings of tokens. `gives_embeds`: its calls also give some in place
    of tokens. `lacks`: what of its paper it does not do, as a phrase; the table of papers prints it.
    """

    files: ClassVar[tuple[str, ...]] = ()
    by_request: ClassVar[frozenset[str]] = frozenset()
    small: ClassVar[Mapping[str, Any]] = {}
    by_position: ClassVar[bool] = False
    embeds: ClassVar[bool] = False
    gives_embeds: ClassVar[bool] = False
    lacks: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check the declared ranges of the options. A class that checks more calls this first."""
        check_options(self, self.full_name)

    def check_table(self, table: Iterable[str]) -> None:
        """Raise RecipeError where a table that names the method sets an option that comes with each request."""
        if wrong := [name for name in table if name in self.by_request]:
            raise RecipeError(
                f"{self.full_name}: {wrong[0]} comes with each request; leave it out of the table, and give "
                f"{wrong[0]}=… when it generates"
            )

    @property
    def full_name(self) -> str:
        """Its axis and its name in recipes, as errors give them: `kv.select.quest`."""
        kind = type(self)
        base = next((c for c in kind.__mro__ if c.__name__ == "Base"), kind)
        return f"{base.__module__.removeprefix('accel.').partition('.')[2]}.{self.use}"

    @property
    def use(self) -> str:
        """Its name in recipes: that of its file."""
        return type(self).__module__.rpartition(".")[2].replace("_", "-")

    def taps(self, layers: int) -> Sequence[str]:
        """The outputs of the step that it reads, by name (`accel.ir.taps`), of a model of so many layers."""
        return ()

    @property
    def relies(self) -> frozenset[Invariant]:
        """The invariants that the method needs."""
        return frozenset()

    @property
    def breaks(self) -> frozenset[Invariant]:
        """The invariants that do not hold with the method."""
        return frozenset()

    @property
    def provides(self) -> frozenset[Invariant]:
        """The invariants of `PROVIDED` that the method makes hold."""
        return frozenset()
