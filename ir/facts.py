"""What is known of a model: collected by capture and passes, kept in an artifact, read by the runtime. A feature that
most models lack is a file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from accel.ir.adapters import AdapterFacts
from accel.ir.depth import Depth
from accel.ir.diffusion import Blocks, Diffusion
from accel.ir.draft_head import DraftHead
from accel.ir.embedding import Embedding
from accel.ir.encoder import EncoderFacts
from accel.ir.extra_ids import ExtraIds
from accel.ir.fields import BUILD_ONLY, Fields, Positive, optional_objects, read
from accel.ir.kv import KvFacts
from accel.ir.low_rank import LowRank
from accel.ir.paths import Paths
from accel.ir.picks import Picks
from accel.ir.prefill import Prefill
from accel.ir.selection import Selection
from accel.ir.suppressed import Suppressed
from accel.ir.units import Units
from accel.ir.window import Window


@dataclass(frozen=True)
class LayerFacts:
    """What one layer carries.

    attention: the class of its mask, or "recurrent" where nothing attends (the head counts are then
    0). state_bytes: recurrent state of one row, which does not grow with the tokens. shares: the layer
    before whose keys and values it reads; none: its own. nodes: operators of its region in the step.
    """

    attention: str
    window: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    state_bytes: int = 0
    shares: int | None = None
    nodes: int = 0


@dataclass
class Facts:
    """What is known of the model; grows as passes recognise more.

    `weight_bytes` are those of all weights, as they are stored; of these a call that reads coarsely leaves out
    `finer_bytes`. Both are 0 until the model is built. `config`, `notes` and `tied` are of the build, and no artifact
    keeps them here.
    """

    name: str
    vocab_size: Positive
    max_context: Positive
    max_batch: Positive = 1
    eos: tuple[int, ...] = ()
    bos: int | None = None
    parameters: int = 0
    weight_bytes: int = 0
    finer_bytes: int = 0
    layers: list[LayerFacts] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict, metadata=BUILD_ONLY)
    notes: list[str] = field(default_factory=list, metadata=BUILD_ONLY)
    tied: bool = field(
        default=False, metadata=BUILD_ONLY
    )  # it chooses among equal values, such as experts of a router of zeros
    encoder: EncoderFacts | None = None
    kv: KvFacts | None = None  # None: every token stays as it is
    depth: Depth | None = None
    prefill: Prefill | None = None
    diffusion: Diffusion | None = None  # it sees both ways and fills masks; None: causal
    blocks: Blocks | None = None  # it is causal and fills masks behind a text, too
    paths: Paths | None = None  # it gives a graph of tokens; None: logits alone
    draft_head: DraftHead | None = (
        None  # it drafts by what a target computes; None: by tokens alone
    )
    embedding: Embedding | None = None  # it gives vectors in place of logits; None: it makes text
    adapters: AdapterFacts | None = None  # None: no row chooses one
    units: Units | None = None  # None: attention reads no units of tokens
    low_rank: LowRank | None = None  # None: keys are read as they are
    selection: Selection | None = None  # None: calls of a few tokens select as calls of one
    window: Window | None = None  # None: layers with a window keep all tokens
    suppressed: Suppressed | None = None  # None: any token may follow
    picks: Picks | None = None  # None: every layer computes all rows of a call
    extra_ids: ExtraIds | None = None  # None: a step reads tokens of the vocabulary alone

    @property
    def num_layers(self) -> int:
        """Layers that recognition found; 0: the model is one piece."""
        return len(self.layers)

    @property
    def stateless(self) -> bool:
        """Whether a token is computed by itself, so that nothing is cached."""
        return self.draft_head is not None and self.draft_head.independent > 0

    @property
    def both_ways(self) -> bool:
        """Whether a token sees those after it."""
        embeds = self.embedding is not None and self.embedding.both_ways
        return embeds or self.diffusion is not None

    @property
    def width(self) -> int:
        """How many numbers a step gives for a token: its logits and what lies behind them, or its vector."""
        if self.embedding is not None:
            return self.embedding.width
        return self.vocab_size + self.behind_logits

    @property
    def behind_logits(self) -> int:
        """How many numbers lie behind a token's logits: what transitions are made of, features, or more logits."""
        behind = 0 if self.paths is None else self.paths.width
        head = self.draft_head
        return behind if head is None else behind + head.behind(self.vocab_size)

    @property
    def token_ids(self) -> int:
        """How many ids a step reads: those of its tokens, and those behind them."""
        return self.vocab_size + (0 if self.extra_ids is None else self.extra_ids.count)

    def vocabulary_of(self, width: int) -> int:
        """How many tokens it has where a step gives so many numbers for one."""
        if self.draft_head is not None:
            width = self.draft_head.vocabulary_of(width)
        return width if self.paths is None else width - self.paths.width

    def set_vocabulary(self, size: int) -> None:
        """Let the model have `size` tokens; what a configuration names beyond them is dropped."""
        self.vocab_size = size
        self.eos = tuple(token for token in self.eos if 0 <= token < size)
        self.bos = self.bos if self.bos is not None and 0 <= self.bos < size else None
        if self.suppressed is not None:
            self.suppressed = self.suppressed.below(size)
        if self.encoder is not None and not all(0 <= token < size for token in self.encoder.start):
            self.encoder = replace(self.encoder, start=())
        if self.encoder is not None and self.encoder.speech is not None:
            if self.encoder.speech.largest >= size:
                self.encoder = replace(self.encoder, speech=None)

    def to_json(self) -> dict[str, Any]:
        """As a manifest keeps it: `from_json` reads it."""
        features = {name: getattr(self, name) for name in FEATURES}
        return {
            "name": self.name,
            "vocab_size": self.vocab_size,
            "num_layers": self.num_layers,
            "max_context": self.max_context,
            "max_batch": self.max_batch,
            "eos": list(self.eos),
            "bos": self.bos,
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "finer_bytes": self.finer_bytes,
            "layers": [asdict(layer) for layer in self.layers],
            **{name: asdict(feature) for name, feature in features.items() if feature is not None},
        }

    @classmethod
    def from_json(cls, f: Fields) -> Facts:
        """Raises ArtifactError. Artifacts of older versions lack what has a default."""
        found = read(cls, f)
        count = f.integer("num_layers")
        if count != len(found.layers):
            raise f.wrong("num_layers", count, f"{len(found.layers)}, the number of layers")
        for i, token in enumerate(found.eos):
            if token >= found.vocab_size:
                raise f.wrong(f"eos[{i}]", token, f"a token id, 0..{found.vocab_size - 1}")
        if found.depth is not None and len(found.depth.plan) != count:
            plan = list(found.depth.plan)
            raise f.object("depth").wrong("plan", plan, f"{count} bools, some of them true")
        mask = 0 if found.diffusion is None else found.diffusion.mask
        if mask is not None and mask >= found.vocab_size:
            raise f.object("diffusion").wrong(
                "mask", mask, f"a token id, 0..{found.vocab_size - 1}"
            )
        for name in ("last", "padding") if found.paths is not None else ():
            if (getattr(found.paths, name) or 0) >= found.vocab_size:
                token = getattr(found.paths, name)
                raise f.object("paths").wrong(name, token, f"a token id, 0..{found.vocab_size - 1}")
        if found.blocks is not None and found.blocks.mask >= found.vocab_size:
            raise f.object("blocks").wrong(
                "mask", found.blocks.mask, f"a token id, 0..{found.vocab_size - 1}"
            )
        if found.suppressed is not None:
            found.suppressed.check_below(found.vocab_size, f.object("suppressed"))
        return found


FEATURES = optional_objects(Facts)  # attributes that most models lack
