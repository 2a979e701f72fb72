"""DuoAttention (arXiv:2410.10819): streaming heads keep the first and the newest tokens, retrieval heads keep all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accel.ir.axis import option
from accel.ir.tables import Rows, Sizes, Tables
from accel.runtime.kv.budget import Base
from accel.runtime.kv.budget._observed import right_places


@dataclass(frozen=True)
class DuoHeads(Tables, Base):
    """The `share` of the KV heads of all layers that lose least by it are streaming heads: they keep `sinks` + `recent`
    tokens. The score says which: `streaming-llm` with as many sinks.

    The paper trains a gate per head by the model's last hidden state, at the answers of pass-key prompts. Here a head's
    loss is measured: how far its output moves, relative to its size, when its queries see the first and the newest
    tokens only. The queries are those whose next token stands farther away, behind a copy of the current one.
    """

    lacks = "gates trained by the hidden state (losses of heads are measured)"
    key: ClassVar[str] = "duo-heads"
    share: float = option(0.5, least=0, most=1)
    sinks: int = option(64, least=0)
    recent: int = option(256, least=1)
    adaptive: ClassVar[bool] = True
    even: ClassVar[bool] = False
    level: ClassVar[bool] = False
    small: ClassVar[Mapping[str, Any]] = {"sinks": 2, "recent": 6}

    def sizes(self, width: int, heads: int) -> Sizes:
        """`place`: of each head among those of all layers, from 0 to 1, the one that loses least first."""
        return {"place": (heads,)}

    def tokens(self, seen: int, layer: int, layers: int, place: Any = None) -> int:
        """See Base."""
        streams = place is None or bool((place < self.share).any())
        return max(1, min(seen, self.sinks + self.recent) if streams else seen)

    def most(self, tokens: int, heads: int, place: Any = None) -> int:
        """See Base."""
        return tokens if place is not None and bool((place < self.share).all()) else 1 << 40

    def room(self, tokens: int, heads: int, slots: int, place: Any = None) -> int:
        """See Base."""
        streaming = int((place < self.share).sum()) if place is not None else 0
        return streaming * min(tokens, slots) + (heads - streaming) * slots

    def heads(self, keep: Any, positions: Any, place: Any) -> Any:  # type: ignore[override]
        """See Base."""
        few = keep[:, None].expand(-1, positions.shape[1])
        return few.where(place < self.share, (positions >= 0).sum(2))

    def measure(self, rows: Iterable[Rows]) -> dict[int, dict[str, Any]]:
        """In rows of fewer than 4 `recent` tokens, the newest are a quarter of the row and the first at most an
        eighth.
        """
        lost: dict[int, Any] = {}
        for row in rows:
            for one, known in enumerate(row.known):
                places, count = right_places(row.tokens[one]), len(known)
                recent, sinks = max(1, min(self.recent, count // 4)), min(self.sinks, count // 8)
                number = places.long().new_ones(count).cumsum(0)
                near = (number[:, None] - number < recent) | (number <= sinks)  # [T,T]
                far = (known > 0) & places.any(1) & ~(places & near).any(1)
                for layer, x in row.layers.items():
                    probs = x.weights()[one][:, :, far]  # [G,R,N,T]
                    some = probs.masked_fill(~near[far], 0)
                    some = some / (1 - (probs - some).sum(-1, keepdim=True)).clamp(min=1e-30)
                    values = x.values[one].float()[:, None]
                    whole, moved = probs @ values, (probs - some) @ values
                    part = moved.square().sum(-1) / whole.square().sum(-1).clamp(min=1e-12)
                    lost[layer] = lost.get(layer, 0) + part.mean(1).sum(1)
        heads = sorted((float(v), i, g) for i, x in lost.items() for g, v in enumerate(x))
        where = {(i, g): (n + 0.5) / len(heads) for n, (_, i, g) in enumerate(heads)}
        return {
            i: {"place": x.new_tensor([where[i, g] for g in range(len(x))])}
            for i, x in lost.items()
        }
