"""What capture knows of a model before anything runs: `inspect` reads it once, the rest of capture goes by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from accel.ir.capture.forms import Form
from accel.ir.diffusion import Blocks, Diffusion
from accel.ir.draft_head import DraftHead
from accel.ir.embedding import Embedding
from accel.ir.encoder import EncoderFacts
from accel.ir.errors import CaptureError
from accel.ir.facts import Facts
from accel.ir.paths import Paths
from accel.ir.suppressed import Suppressed

Limit = tuple[int, str]  # longest sequence, why


class Kind(Enum):
    """What is given to capture."""

    DECODER = "causal decoder of transformers"
    ENCODER_DECODER = "encoder-decoder of transformers"
    MODULE_PAIR = "encoder-decoder in plain PyTorch"  # of the same interface
    MODULE = "nn.Module"
    PROGRAM = "ExportedProgram"


@dataclass(frozen=True)
class Interface:
    """How to call an exported program: `inputs` in its own order, each 'tokens' or 'positions'."""

    inputs: tuple[str, ...]
    output: int  # which of the flat outputs the logits are
    in_spec: Any


@dataclass(frozen=True)
class Swaps:
    """What is changed in a module while it is captured. Modules go by their paths.

    written_attention: attention is written out, since sdpa leaves something out of it. experts: they may be
    computed as batched products. chunked: code in chunks of tokens, made short. rotaries, indexers: see
    `ir/capture/length_limits.py`.
    """

    forms: tuple[Form, ...] = ()
    chunked: tuple[str, ...] = ()
    rotaries: tuple[str, ...] = ()
    indexers: tuple[str, ...] = ()
    written_attention: bool = False
    experts: bool = False


@dataclass(frozen=True)
class ModelTraits:
    """One reading of a model.

    refused: why it cannot be captured, as far as that is known before it runs. vocab_size: token ids that it
    takes. own_limit: the longest sequence that its configuration names. limits: those past which it computes
    otherwise. paddings: ids of padding of all modules; uncounted: those that do not count as positions.
    """

    kind: Kind
    name: str  # of its class
    max_context: int  # as it was asked for
    refused: str | None = None
    vocab_size: int = 0
    own_limit: int | None = None
    limits: tuple[Limit, ...] = ()
    eos: tuple[int, ...] = ()
    bos: int | None = None
    diffusion: Diffusion | None = None
    blocks: Blocks | None = None  # as far as its configuration says
    paths: Paths | None = None
    draft_head: DraftHead | None = None
    embedding: Embedding | None = None  # it gives vectors in place of logits
    parameters: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    encoder: EncoderFacts | None = None
    suppressed: Suppressed | None = None
    notes: tuple[str, ...] = ()  # on what it asks for in vain
    input_name: str = "input_ids"  # of the encoder
    position_name: str | None = None  # of the forward's argument
    shares_kv: bool = False  # layers read the keys and values of a layer before
    paddings: frozenset[int] = frozenset()
    uncounted: frozenset[int] = frozenset()
    example_sizes: tuple[int, int, int] = (0, 0, 0)  # B, T and X for tracing
    table_sizes: frozenset[int] = frozenset()  # of all tensors
    swaps: Swaps = Swaps()
    interface: Interface | None = None  # of an exported program

    @property
    def hugging_face(self) -> bool:
        return self.kind in (Kind.DECODER, Kind.ENCODER_DECODER)

    def require(self) -> None:
        """Raises CaptureError where the model is refused."""
        if self.refused is not None:
            raise CaptureError(self.refused)

    def facts(self) -> Facts:
        """Name, sizes and end tokens; the context lowered to the model's limits, with a note on each."""
        facts = Facts(
            self.name,
            self.vocab_size,
            self.max_context,
            eos=self.eos,
            bos=self.bos,
            parameters=self.parameters,
            config=dict(self.config),
            encoder=self.encoder,
            diffusion=self.diffusion,
            blocks=self.blocks,
            paths=self.paths,
            draft_head=self.draft_head,
            embedding=self.embedding,
            suppressed=self.suppressed,
        )
        if self.own_limit is not None and self.own_limit < facts.max_context:
            facts.max_context = self.own_limit
            facts.notes.append(
                f"max_context is {self.own_limit}, the model's own limit, not {self.max_context}"
            )
        for limit, why in self.limits:
            if limit < facts.max_context:
                facts.max_context = limit
                facts.notes.append(f"max_context is {limit}: {why}")
        return facts
