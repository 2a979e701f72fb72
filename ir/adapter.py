"""Any decoder behind one signature: forward(tokens [B,T], positions [B,T]) -> logits [B,T,V]."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accel.ir.diffusion import diffusion_of
from accel.ir.errors import CaptureError
from accel.ir.program import Facts
from accel.ir.steady import is_indexer
from accel.ir.weights import Stored, stand_in

_LIMIT_NAMES = ("max_position_embeddings", "max_seq_len")  # the longest sequence, in a configuration
_POSITION_NAMES = ("position_ids", "positions", "position_id", "pos")


class Passing:
    """In place of a transformers cache: gives back the keys and values that it is given. Layers that read
    those of a layer before (Gemma-3n) look for them in a cache, and make their own where there is none.
    """

    def __init__(self) -> None:
        self.shared_layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, cache_position: Tensor, *_: Any) -> tuple[int, int]:
        return cache_position.shape[0], 0


class Adapter(nn.Module):
    """`forward(tokens, positions) -> logits` around any decoder; names of parameters stay the user's."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        names = list(inspect.signature(model.forward).parameters)
        self.hugging_face = is_hugging_face(model)
        self.position_name = next((n for n in _POSITION_NAMES if n in names), None)
        self.shares = any(getattr(m, "is_kv_shared_layer", False) for m in model.modules())
        self.offset = 0
        self.writes = False  # whether the module writes into the positions that it is given

    def settle(self, tokens: Tensor, positions: Tensor) -> None:
        """Pass positions as the module itself counts them: some start at padding_idx + 1, and some
        mean another thing by the argument. A module that cannot do without keeps them as they are.
        """
        if self.position_name is None or not self.hugging_face:
            return
        name, self.position_name = self.position_name, None
        found = [getattr(m, "padding_idx", None) for m in self.modules()]
        paddings = {p for p in found if isinstance(p, int)}
        for padding in paddings:  # which some do not count
            tokens = tokens.masked_fill(tokens == padding, padding + 1)
        own = self(tokens, positions)
        for offset in (0, *(p + 1 for p in paddings if p >= 0)):
            self.position_name, self.offset = name, offset
            with contextlib.suppress(IndexError):
                given = positions.clone()
                if torch.allclose(self(tokens, given), own, rtol=1e-4, atol=1e-5):
                    self.writes = not torch.equal(given, positions)
                    return
        self.position_name, self.offset = None, 0

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        extra: dict[str, Any] = {}
        if self.position_name and self.writes:
            positions = positions.clone()
        if self.position_name:
            extra[self.position_name] = positions + self.offset if self.offset else positions
        if self.hugging_face:
            extra["use_cache"] = False
            if self.shares:
                extra["past_key_values"] = Passing()
            return logits_of(self.model(input_ids=tokens, **extra))
        return logits_of(self.model(tokens, **extra))


def is_hugging_face(model: object) -> bool:
    """Whether a module is a transformers model, found without importing transformers."""
    return any(c.__name__ == "PreTrainedModel" for c in type(model).__mro__)


def chosen(out: Any) -> Any:
    """What stands for the logits in a forward's result: itself, `.logits`, or an element of a tuple or dict."""
    if isinstance(out, dict):
        return out.get("logits")
    if hasattr(out, "logits"):
        return out.logits
    return out[0] if isinstance(out, (tuple, list)) and out else out


def logits_of(out: Any) -> Tensor:
    """The logits in whatever a forward returns: a tensor, an object with `.logits`, a tuple or dict."""
    given, out = type(out).__name__, chosen(out)
    if not isinstance(out, Tensor) or out.dim() != 3 or not out.is_floating_point():
        found = (
            f"a tensor of shape {list(out.shape)} and dtype {out.dtype}"
            if isinstance(out, Tensor)
            else given
        )
        raise CaptureError(
            f"forward returned {found}, not logits [B,T,V]; give a causal language model whose "
            "forward(tokens [B,T]) returns logits, or an object with `.logits`"
        )
    return out


def own_limit(model: nn.Module) -> int | None:
    """The longest sequence that the configuration names."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    named = (getattr(text, name, None) for name in _LIMIT_NAMES)
    return next((n for n in named if isinstance(n, int) and n > 0), None)


def facts_of(model: nn.Module, max_context: int) -> Facts:
    """Name, sizes and end tokens, from the configuration where there is one."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = own_limit(model)
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = getattr(text, "eos_token_id", None) if eos is None else eos
    facts = Facts(name=type(model).__name__, vocab_size=0, max_context=max_context)
    if limit is not None and limit < max_context:
        facts.max_context = limit
        facts.notes.append(f"max_context is {limit}, the model's own limit, not {max_context}")
    facts.eos = [] if eos is None else [int(e) for e in (eos if isinstance(eos, list) else [eos])]
    bos = getattr(text, "bos_token_id", None)
    facts.bos = bos if isinstance(bos, int) else None
    facts.diffusion = diffusion_of(text)
    unique = {p.data_ptr(): p.numel() for p in model.parameters()}
    facts.parameters = sum(unique.values())
    if hasattr(config, "to_json_string"):
        facts.config = json.loads(config.to_json_string(use_diff=False))
    return facts


def vocabulary(model: nn.Module) -> int:
    """How many token ids a module takes: its configuration's word, else its largest embedding."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "decoder_vocab_size", None) or getattr(text, "vocab_size", None)
    if isinstance(size, int):
        return size
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    return sizes[0] if sizes else 2


@contextlib.contextmanager
def inference_mode(model: nn.Module, kind: type[Adapter] = Adapter) -> Iterator[Adapter]:
    """The module ready for capture, behind an adapter, put back as it was afterwards."""
    training = [m for m in model.modules() if m.training]
    config = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    experts = getattr(config, "_experts_implementation", None)
    model.eval()
    try:
        if is_hugging_face(model):
            _choose_forms(model)
        yield kind(model).eval()
    finally:
        for module in training:
            module.training = True
        if is_hugging_face(model) and attention is not None:
            model.set_attn_implementation(attention)  # type: ignore[operator]
        if _has_experts(model) and experts is not None:
            model.set_experts_implementation(experts)  # type: ignore[operator]


def _choose_forms(model: Any) -> None:
    """The forms that export: sdpa, or written-out attention where sdpa is missing or leaves something
    out (a soft cap; causality, beside a sparse choice of keys); experts as batched products, without a
    loop over what each token chose.
    """
    config = model.config.get_text_config()
    written = getattr(config, "attn_logit_softcapping", None) or any(map(is_indexer, model.modules()))
    try:
        model.set_attn_implementation("eager" if written else "sdpa")
    except (ValueError, ImportError):
        model.set_attn_implementation("eager")
    if _has_experts(model):
        model.set_experts_implementation("batched_mm")


def _has_experts(model: Any) -> bool:
    return hasattr(model, "_can_set_experts_implementation") and bool(
        model._can_set_experts_implementation()
    )


def widened(
    model: nn.Module, stored: Mapping[Tensor, Stored], notes: list[str]
) -> tuple[nn.Module, dict[Tensor, Stored]]:
    """The model in float32, and what is stored for its parameters that are stand-ins.

    A half-precision model is copied with stand-ins for its parameters, each of which is widened when
    it is read; the model itself stays as it is.
    """
    tensors = {*model.parameters(), *model.buffers()}
    narrow = {t for t in tensors if t.is_floating_point() and t.dtype is not torch.float32}
    found = {t.dtype for t in narrow}
    found |= {s.source.dtype for t, s in stored.items() if s.blank.dtype != s.source.dtype}
    if found:
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in found))
        notes.append(f"{names} weights are computed in float32")
    stored = dict(stored)
    if not narrow:
        return model, stored
    copies: dict[int, Any] = {id(t): t for t in model.parameters() if t not in narrow}
    for tensor in narrow:
        if isinstance(tensor, nn.Parameter):
            wide: Tensor = nn.Parameter(stand_in(tensor.shape), requires_grad=False)
            stored[wide] = Stored(tensor.detach(), (Tensor.float,))
        else:
            wide = tensor.float()
        copies[id(tensor)] = wide
    return copy.deepcopy(model, copies), stored
