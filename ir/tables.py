"""Tables: constants of each layer of a model, measured from text, in a safetensors file that a recipe names.

No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

Sizes = Mapping[str, tuple[int, ...]]  # name -> size


@dataclass(frozen=True)
class Observed:
    """What one layer's attention reads of a text (tensors), keys and queries after RoPE.

    queries: [B,H,T,D]. keys, values: [B,G,T,D]. form: what makes attention of them (`ir.ops.attention.Form`).
    unrotated, unrotated_queries: keys and queries before RoPE, where they have one.
    """

    queries: Any
    keys: Any
    values: Any
    form: Any
    unrotated: Any = None
    unrotated_queries: Any = None

    @property
    def positions(self) -> Any:
        """Of the rows' tokens [B,T]."""
        return self.keys.new_ones(self.keys[:, 0, :, 0].shape).long().cumsum(1) - 1

    def weights(self) -> Any:
        """The attention [B,G,R,T,T] of the queries, by group of the KV head that they read."""
        at = self.positions
        return self.form.weights(self.queries, at, self.keys, at[:, None])


@dataclass(frozen=True)
class Rows:
    """Rows of a text, and what each layer reads of them.

    tokens: [B,T+1]. known: [B,T], above 0 where the next token can be predicted from the row; below 0 of tokens that
    say so (`Example`). hidden [B,T,E]: what the
    keys of the first of these layers are made of. second_layers: of each layer of a second model, [B,T,F], keys before
    RoPE and values of a token in one row. last: (attention, or None) -> the last hidden states [B,T,E], with gradients;
    attention(layer, Observed) gives what is read in the place of a layer's own, [B,H,T,Dv].
    """

    tokens: Any
    known: Any
    layers: Mapping[int, Observed]
    hidden: Any = None
    second_layers: Any = ()
    last: Any = None


@dataclass(frozen=True)
class Example:
    """Sentences that a text hides, a question at its end, and the answer, which follows from the `facts`. `others` are
    of the same kind, and it does not follow from them.
    """

    facts: tuple[str, ...]
    others: tuple[str, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Tables(ABC):
    """A method with constants of each layer. `table`: their file; empty: the one that is kept for the model.

    The constants reach the method's functions as parameters of their names: tensors where a function is traced
    (a score's `__call__`, a budget's `heads`, what `kv.select` traces), arrays in a budget's `tokens` and `most`.
    `accel-compile train METHOD MODEL` measures them.
    """

    table: str = ""

    key: ClassVar[str]  # the method's name

    @abstractmethod
    def sizes(self, width: int, heads: int) -> Sizes:
        """Name -> size of a layer's constants, whose keys are `width` wide, in so many KV heads; -1: any."""

    @abstractmethod
    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Any]]:
        """Layer -> name -> tensor, of a text; integers stay integers."""

    def examples(self, seed: int) -> Iterator[Example] | None:
        """What a table is measured on, for ever, where nobody gives a text; none: a text, too. Of those that the model
        answers right; if there are none, `measure` gets their rows as of any text.
        """
        return None
