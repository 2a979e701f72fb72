"""What is known of a model: collected by capture and passes, kept in an artifact, read by the runtime."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from accel.ir.adapters import AdapterFacts
from accel.ir.depth import Depth
from accel.ir.diffusion import Diffusion
from accel.ir.fields import Fields
from accel.ir.low_rank import LowRank
from accel.ir.prefill import Prefill
from accel.ir.selection import Selection
from accel.ir.units import Units
from accel.ir.window import Window

FEATURES = (
    "encoder",
    "kv",
    "depth",
    "prefill",
    "diffusion",
    "adapters",
    "units",
    "low_rank",
    "selection",
    "window",
)  # attributes of `Facts` that most models lack


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

    @classmethod
    def from_json(cls, f: Fields) -> LayerFacts:
        """Raises ArtifactError. Artifacts of older versions lack what has a default."""
        return cls(
            attention=f.text("attention"),
            window=f.integer("window"),
            num_heads=f.integer("num_heads"),
            num_kv_heads=f.integer("num_kv_heads"),
            head_dim=f.integer("head_dim"),
            state_bytes=f.integer("state_bytes") if "state_bytes" in f.value else 0,
            shares=f.optional_integer("shares") if "shares" in f.value else None,
            nodes=f.integer("nodes") if "nodes" in f.value else 0,
        )


@dataclass(frozen=True)
class EncoderFacts:
    """What the encoder of an encoder-decoder model takes, and the tokens that its decoder starts from."""

    vocab_size: int  # of token ids [B,X]; 0: it takes features
    max_length: int  # longest X
    features: tuple[int, ...] = ()  # sizes of one row's features, after B
    start: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, f: Fields) -> EncoderFacts:
        """Raises ArtifactError."""
        return cls(
            f.integer("vocab_size"),
            f.integer("max_length", 1),
            f.integers("features"),
            f.integers("start"),
        )


COARSE = "coarse"  # the step's input [] bool: whether attention reads what lies in blocks coarsely


@dataclass(frozen=True)
class KvFacts:
    """What a recipe does with the KV cache beyond appending to it.

    observe: last queries of a row that the entry `compress` takes, those of guessed tokens among them. lookahead:
    tokens that are guessed for that at the end of a prompt. repeats: a prompt is run again before it is compressed.
    flush: it drops nothing, and moves blocks of so many tokens (`kv.codec`), but for the first `sinks`.
    tables: the budget's constants, by name, of each layer that evicts; none: it has none. marks: inputs of `compress`
    about a row's tokens that a session gives.
    moves: tokens that stay take positions from 0 on. coarse: a call may read what lies in blocks coarsely.
    """

    observe: int = 0
    flush: int = 0
    lookahead: int = 0
    repeats: bool = False
    tables: tuple[dict[str, tuple[float, ...]], ...] = ()
    marks: tuple[str, ...] = ()
    moves: bool = False
    sinks: int = 0
    coarse: bool = False

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The step's inputs by which a call chooses, with their shapes."""
        return {COARSE: ()} if self.coarse else {}

    @classmethod
    def from_json(cls, f: Fields) -> KvFacts:
        """Raises ArtifactError."""
        tables = f.objects("tables") if "tables" in f.value else []
        return cls(
            f.integer("observe"),
            f.integer("flush") if "flush" in f.value else 0,
            f.integer("lookahead") if "lookahead" in f.value else 0,
            f.boolean("repeats") if "repeats" in f.value else False,
            tuple({name: one.numbers(name) for name in one.value} for one in tables),
            f.texts("marks") if "marks" in f.value else (),
            f.boolean("moves") if "moves" in f.value else False,
            f.integer("sinks") if "sinks" in f.value else 0,
            f.boolean("coarse") if "coarse" in f.value else False,
        )


@dataclass
class Facts:
    """What is known of the model; grows as passes recognise more.

    `config`, `notes` and `tied` are of the build, and no artifact keeps them here.
    """

    name: str
    vocab_size: int
    max_context: int
    max_batch: int = 1
    eos: tuple[int, ...] = ()
    bos: int | None = None
    parameters: int = 0
    layers: list[LayerFacts] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tied: bool = False  # it chooses among equal values, such as experts of a router of zeros
    encoder: EncoderFacts | None = None
    kv: KvFacts | None = None  # None: every token stays as it is
    depth: Depth | None = None
    prefill: Prefill | None = None
    diffusion: Diffusion | None = None  # it sees both ways and fills masks; None: causal
    adapters: AdapterFacts | None = None  # None: no row chooses one
    units: Units | None = None  # None: attention reads no units of tokens
    low_rank: LowRank | None = None  # None: keys are read as they are
    selection: Selection | None = None  # None: calls of a few tokens select as calls of one
    window: Window | None = None  # None: layers with a window keep all tokens

    @property
    def num_layers(self) -> int:
        """Layers that recognition found; 0: the model is one piece."""
        return len(self.layers)

    def set_vocabulary(self, size: int) -> None:
        """Let the model have `size` tokens; what a configuration names beyond them is dropped."""
        self.vocab_size = size
        self.eos = tuple(token for token in self.eos if 0 <= token < size)
        self.bos = self.bos if self.bos is not None and 0 <= self.bos < size else None
        if self.encoder is not None and not all(0 <= token < size for token in self.encoder.start):
            self.encoder = replace(self.encoder, start=())

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
            "layers": [asdict(layer) for layer in self.layers],
            **{name: asdict(feature) for name, feature in features.items() if feature is not None},
        }

    @classmethod
    def from_json(cls, f: Fields) -> Facts:
        """Raises ArtifactError."""
        vocab = f.integer("vocab_size", 1)
        layers = [LayerFacts.from_json(layer) for layer in f.objects("layers")]
        if (count := f.integer("num_layers")) != len(layers):
            raise f.wrong("num_layers", count, f"{len(layers)}, the number of layers")
        for i, token in enumerate(f.array("eos")):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                raise f.wrong(f"eos[{i}]", token, f"a token id, 0..{vocab - 1}")
        return cls(
            name=f.text("name"),
            vocab_size=vocab,
            max_context=f.integer("max_context", 1),
            max_batch=f.integer("max_batch", 1),
            eos=tuple(f.array("eos")),
            bos=f.optional_integer("bos"),
            parameters=f.integer("parameters"),
            layers=layers,
            encoder=EncoderFacts.from_json(f.object("encoder")) if f.has("encoder") else None,
            kv=KvFacts.from_json(f.object("kv")) if f.has("kv") else None,
            depth=Depth.from_json(f.object("depth"), len(layers)) if "depth" in f.value else None,
            prefill=Prefill.from_json(f.object("prefill")) if "prefill" in f.value else None,
            diffusion=Diffusion.from_json(f.object("diffusion"), vocab)
            if "diffusion" in f.value
            else None,
            adapters=AdapterFacts.from_json(f.object("adapters")) if f.has("adapters") else None,
            units=Units.from_json(f.object("units")) if f.has("units") else None,
            low_rank=LowRank.from_json(f.object("low_rank")) if f.has("low_rank") else None,
            selection=Selection.from_json(f.object("selection")) if f.has("selection") else None,
            window=Window.from_json(f.object("window")) if f.has("window") else None,
        )
