"""What capture has to know of a model, read once, without running it."""

from __future__ import annotations

import json
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from accel.ir.capture.decoder_checks import refuse_kind
from accel.ir.capture.encoder import encoder_facts
from accel.ir.capture.exported import interface_of, parameters_of
from accel.ir.capture.forms import Form, forms_of, is_chunked
from accel.ir.capture.generation import note_of, suppressed_of
from accel.ir.capture.length_limits import is_indexer, limit_of, pools, turns_anew
from accel.ir.capture.traits import Kind, Limit, ModelTraits, Swaps
from accel.ir.diffusion import blocks_of, diffusion_of
from accel.ir.embedding import Embedding
from accel.ir.encoder import EncoderFacts
from accel.ir.errors import CaptureError
from accel.ir.paths import Paths, paths_of

_LIMIT_NAMES = (
    "max_position_embeddings",
    "max_seq_len",
)  # the longest sequence, in a configuration
_POSITION_NAMES = ("position_ids", "positions", "position_id", "pos")
_OF_LAST_CALL = "self_conditioning_logits"  # an argument of DiffusionGemma's forward
_PAIRS = (Kind.ENCODER_DECODER, Kind.MODULE_PAIR)
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


def inspect(
    model: object, max_context: int = 2048, embedding: Embedding | None = None
) -> ModelTraits:
    """Read a model; what would be refused is noted, not raised.

    Args:
        model: what `capture` takes; a module's weights may be on the meta device.
        max_context: the longest sequence that the program will be asked for.
        embedding: how its vectors become that of a text, where it gives vectors and not logits.

    Raises:
        CaptureError: it is no model at all.
    """
    if isinstance(model, ExportedProgram):
        if embedding is not None:
            raise CaptureError("pooling: an ExportedProgram gives logits; give the module itself")
        return _of_program(model, max_context)
    model = unwrapped(model)
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"cannot capture a {type(model).__name__}; give an nn.Module, a Hugging Face model "
            "directory, or a torch.export ExportedProgram"
        )
    return _of_module(model, max_context, embedding)


def unwrapped(model: Any) -> Any:
    """The module under torch.compile."""
    return getattr(model, "_orig_mod", model)


def _of_program(program: ExportedProgram, max_context: int) -> ModelTraits:
    try:
        interface, vocab_size = interface_of(program)
    except CaptureError as error:
        return ModelTraits(Kind.PROGRAM, "ExportedProgram", max_context, str(error))
    return ModelTraits(
        Kind.PROGRAM,
        "ExportedProgram",
        max_context,
        vocab_size=vocab_size,
        parameters=parameters_of(program),
        interface=interface,
    )


def _of_module(
    model: nn.Module, max_context: int, embedding: Embedding | None = None
) -> ModelTraits:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    arguments = list(signature(model.forward).parameters)
    kind = _kind(model, config, arguments)
    modules = dict(model.named_modules())
    tensors = [*model.parameters(), *model.buffers()]
    refused: str | None = None
    limits: list[Limit] = []
    encoder: EncoderFacts | None = None
    paths: Paths | None = None
    told = getattr(model, "generation_config", None)
    notes = note_of(told) if embedding is None else []
    swaps = _swaps(model, modules, text, kind)
    try:
        _refuse(model, kind, arguments, embedding)
        if kind in _PAIRS and embedding is not None:
            raise CaptureError(
                f"{type(model).__name__} is an encoder-decoder; texts become vectors by an encoder or a decoder alone"
            )
        if kind in _PAIRS:
            paths = paths_of(text)
            encoder = encoder_facts(model, max_context, notes)
        # in the order of the modules, as the notes on them are
        limits = [
            limit_of(m, max_context) for m in modules.values() if turns_anew(m) or is_indexer(m)
        ]
    except CaptureError as error:
        refused = str(error)
    padded = {n: getattr(m, "padding_idx", None) for n, m in modules.items()}
    paddings = {n: p for n, p in padded.items() if isinstance(p, int)}
    plain = [v for m in modules.values() for v in vars(m).values() if isinstance(v, Tensor)]
    eos = getattr(told, "eos_token_id", None)
    eos = getattr(text, "eos_token_id", None) if eos is None else eos
    bos = getattr(text, "bos_token_id", None)
    return ModelTraits(
        kind,
        type(model).__name__,
        max_context,
        refused,
        vocab_size=_vocabulary(text, modules) * (2 if embedding and embedding.pairs else 1),
        own_limit=_own_limit(text),
        limits=tuple(limit for limit in limits if limit[0] < max_context),
        eos=() if eos is None else tuple(int(e) for e in (eos if isinstance(eos, list) else [eos])),
        bos=bos if isinstance(bos, int) else None,
        diffusion=None if embedding is not None else diffusion_of(text),
        blocks=None if embedding is not None else blocks_of(text),
        paths=paths,
        draft_head=getattr(model, "draft_head", None),
        embedding=embedding,
        parameters=sum({p.data_ptr(): p.numel() for p in model.parameters()}.values()),
        config=_as_json(config),
        encoder=encoder,
        suppressed=None if embedding is not None else suppressed_of(told),
        notes=tuple(notes),
        input_name=str(getattr(model, "main_input_name", "input_ids")),
        position_name=next((n for n in _POSITION_NAMES if n in arguments), None),
        shares_kv=any(getattr(m, "is_kv_shared_layer", False) for m in modules.values()),
        paddings=frozenset(paddings.values()),
        uncounted=_uncounted(modules, paddings) if kind in _PAIRS else frozenset(),
        example_sizes=_example_sizes(model, config),
        table_sizes=frozenset(size for t in (*tensors, *plain) for size in t.shape),
        swaps=swaps,
    )


def _is_hugging_face(model: object) -> bool:
    """Whether a module is a transformers model, found without importing transformers."""
    return any(c.__name__ == "PreTrainedModel" for c in type(model).__mro__)


def _kind(model: nn.Module, config: Any, arguments: list[str]) -> Kind:
    two = bool(getattr(config, "is_encoder_decoder", False)) and "decoder_input_ids" in arguments
    if not _is_hugging_face(model):
        return Kind.MODULE_PAIR if two else Kind.MODULE
    return Kind.ENCODER_DECODER if two else Kind.DECODER


def _own_limit(text: Any) -> int | None:
    """The longest sequence that a configuration names."""
    named = (getattr(text, name, None) for name in _LIMIT_NAMES)
    return next((n for n in named if isinstance(n, int) and n > 0), None)


def _vocabulary(text: Any, modules: dict[str, nn.Module]) -> int:
    """How many token ids a module takes: its configuration's word, else its first embedding."""
    size = getattr(text, "decoder_vocab_size", None) or getattr(text, "vocab_size", None)
    if isinstance(size, int):
        return size
    sizes = [m.num_embeddings for m in modules.values() if isinstance(m, nn.Embedding)]
    return sizes[0] if sizes else 2


def _refuse(
    model: nn.Module, kind: Kind, arguments: list[str], embedding: Embedding | None
) -> None:
    """Raises CaptureError where a module cannot be captured, as far as that is seen without running it."""
    if any(p.is_meta for p in model.parameters()):
        raise CaptureError(
            f"{type(model).__name__} has weights on the meta device, which hold no values; load them first"
        )
    if pooled := [(n, rate) for n, m in model.named_modules() if (rate := pools(m))]:
        name, rate = pooled[0]
        raise CaptureError(
            f"{type(model).__name__}: {name} makes one key of {rate} tokens; accel caches keys by token, and has no "
            "cache of such keys. Give a model whose attention is over tokens"
        )
    if _OF_LAST_CALL in arguments:
        raise CaptureError(
            f"{type(model).__name__} refines a canvas of tokens beside its input, by the logits of its last call "
            f"({_OF_LAST_CALL}), and fills no masks; accel decodes diffusion models that fill masks: give one with "
            "config.mask_token_id"
        )
    pairs = embedding is not None and embedding.pairs is not None
    if kind not in (Kind.MODULE, Kind.MODULE_PAIR) and not pairs:
        refuse_kind(model, arguments)


def _uncounted(modules: dict[str, nn.Module], paddings: dict[str, int]) -> frozenset[int]:
    """Ids that do not count as positions, in a decoder that counts them from its tokens."""
    counting = [n for n, m in modules.items() if hasattr(m, "create_position_ids_from_input_ids")]
    return frozenset(paddings[n] for n in counting if n in paddings)


def _example_sizes(model: nn.Module, config: Any) -> tuple[int, int, int]:
    """B, T and X for tracing: different, and equal to no size of the model (specialisation)."""
    taken = {d for p in model.parameters() for d in p.shape}
    if hasattr(config, "to_dict"):
        taken |= {v for v in config.to_dict().values() if isinstance(v, int)}
    free = [p for p in _PRIMES if p not in taken]
    return free[0], free[1], free[2]


def _as_json(config: Any) -> dict[str, Any]:
    """A transformers configuration as a dict; empty where there is none."""
    if not hasattr(config, "to_json_string"):
        return {}
    told: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return told


def _fused_leaves_out(text: Any) -> bool:
    """Whether transformers' sdpa ignores what a configuration says of the scores: a soft cap, GPT-2's own scales."""
    return (
        bool(getattr(text, "attn_logit_softcapping", None))
        or bool(getattr(text, "scale_attn_by_inverse_layer_idx", False))
        or getattr(text, "scale_attn_weights", True) is False
    )


def _swaps(model: Any, modules: dict[str, nn.Module], text: Any, kind: Kind) -> Swaps:
    """What is changed while the module is captured."""
    indexers = tuple(n for n, m in modules.items() if is_indexer(m))
    can_choose = hasattr(model, "_can_set_experts_implementation")
    return Swaps(
        forms=tuple(Form(n, *found) for n, m in modules.items() for found in forms_of(m)),
        chunked=tuple(n for n, m in modules.items() if is_chunked(m)),
        rotaries=tuple(n for n, m in modules.items() if turns_anew(m)),
        indexers=indexers,
        written_attention=bool(indexers) or _fused_leaves_out(text),
        experts=can_choose and bool(model._can_set_experts_implementation()),
    )
