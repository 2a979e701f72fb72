"""What is no decoder, told before anything is exported: the kind of module, its head, tokens that see later ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel.ir.capture.traits import ModelTraits
from accel.ir.diffusion import Diffusion
from accel.ir.errors import CaptureError

_HEAD = re.compile(r"For(\w*Classification|\w*QuestionAnswering|MultipleChoice|NextSentence\w*)$")
_SEEN = 1e-4  # of the largest value: a difference that rounding does not make


def refuse_kind(model: Any, arguments: Sequence[str]) -> None:
    """Refuse transformers' own models that take no tokens, or whose head is not over a vocabulary.

    `arguments`: names of what the model's forward takes.

    Raises:
        CaptureError: with the nearest class that would work.
    """
    name, takes = type(model).__name__, getattr(model, "main_input_name", "input_ids")
    if takes != "input_ids" and not {"input_ids", "decoder_input_ids"} & set(arguments):
        raise CaptureError(
            f"{name}.forward takes {takes}, not token ids [B,T]: it is not a language model; give "
            "the causal language model that contains it, if there is one"
        )
    if "shared_kv_states" in arguments and hasattr(model.config, "backbone_hidden_size"):
        raise CaptureError(
            f"{name} drafts for another model, whose last vectors and keys its forward takes (inputs_embeds, "
            "shared_kv_states): it is no language model alone; give the model that it drafts for"
        )
    books = getattr(model.config, "num_codebooks", None)
    if isinstance(books, int) and books > 1 and hasattr(model, "build_delay_pattern_mask"):
        raise CaptureError(
            f"{name}.forward takes codes of {books} codebooks for a step, and gives logits of as many; accel decodes "
            "one token id a step. Run it in transformers; accel.runtime.inputs.codebooks lays out such codes"
        )
    if _HEAD.search(name):
        raise CaptureError(
            f"{name}: its head gives no logits over a vocabulary; give {_nearest(model.config.model_type)}, "
            "which has the same layers under a language model's head"
        )


def _nearest(model_type: str) -> str:
    """The causal language model of a type; words where transformers has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    return str(causal.get(model_type, "a causal language model"))


def no_logits(traits: ModelTraits) -> str:
    """What to add where a model's forward returns no logits."""
    if not traits.hugging_face or traits.embedding is not None:
        return ""
    return f"; the nearest to {traits.name} is {_nearest(traits.config['model_type'])}"


def alike(tokens: Tensor, vocab: int) -> Tensor:
    """Tokens [B,T] of which the first two rows differ in their last token only; see `both_ways`."""
    tokens = tokens.clone()
    tokens[1] = tokens[0]
    tokens[1, -1] = (tokens[0, -1] + 1) % vocab
    return tokens


def both_ways(
    model: nn.Module, traits: ModelTraits, run: Callable[[], Tensor], logits: Tensor
) -> Diffusion | None:
    """What the configuration says of masks, where a token does depend on later ones; none where it does not. The
    decoder of an encoder-decoder needs no mask. Another model that looks ahead and fills no masks is refused, with the
    name of the module that lets it.

    `logits` are those of `alike` tokens; `run()` calls the model on the same ones again. One that then
    gives others is left to the check that the captured program goes through.

    Raises:
        CaptureError: the two rows differ before their last token.
    """
    if not sees_later(run, logits):
        return None
    if traits.diffusion is not None:
        size = traits.facts().vocabulary_of(logits.shape[-1])
        if traits.diffusion.mask is not None and traits.diffusion.mask >= size:
            raise CaptureError(
                f"{traits.name}: config.mask_token_id is {traits.diffusion.mask}, and its logits are of {size} "
                "tokens; give the id that it was trained with"
            )
        return traits.diffusion
    if traits.encoder is not None:
        return Diffusion()
    raise CaptureError(
        f"{traits.name} is bidirectional: {_culprit(model, run)} lets a token attend to later "
        f"tokens, so it cannot be decoded token by token; {_causal_form(traits)}. A masked-diffusion model "
        "(LLaDA, Dream) must have config.mask_token_id"
    )


def sees_later(run: Callable[[], Tensor], logits: Tensor) -> bool:
    """Whether a token depends on later ones: the rows of `alike` tokens differ before their last one, and not by chance
    or state. As of `both_ways`.
    """
    return _differ(logits) and torch.allclose(run(), logits, 1e-3, 1e-4)


def _differ(value: Tensor) -> bool:
    """Whether rows 0 and 1 of [B,T,...] differ before the last token."""
    rows = value[:2, :-1].float()
    return float((rows[0] - rows[1]).abs().max()) > _SEEN * float(rows.abs().max())


def _causal_form(traits: ModelTraits) -> str:
    if traits.config.get("is_decoder") is False:
        return (
            "config.is_decoder = True, set before loading, makes it a decoder (its output "
            "is only as good as its training for that)"
        )
    return "give a causal language model"


def _culprit(model: nn.Module, run: Callable[[], Tensor]) -> str:
    """The innermost module whose inputs agree before the last token and whose output does not."""
    culprits: list[str] = []
    names = {m: n for n, m in model.named_modules()}

    def of_tokens(value: Any, shape: torch.Size) -> list[Tensor]:
        flat = value if isinstance(value, (tuple, list)) else [value]
        return [v for v in flat if isinstance(v, Tensor) and v.shape[:2] == shape and v.dim() > 1]

    def see(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        values = [*args, *kwargs.values()]
        first = next((v for v in values if isinstance(v, Tensor) and v.dim() in (2, 3)), None)
        if culprits or first is None:
            return
        shape = first.shape[:2]
        if any(map(_differ, of_tokens(values, shape))):
            return
        outputs = of_tokens(out.logits if hasattr(out, "logits") else out, shape)
        if any(map(_differ, outputs)):
            culprits.append(f"{names[module] or 'its forward'} ({type(module).__name__})")

    hooks = [m.register_forward_hook(see, with_kwargs=True) for m in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return culprits[0] if culprits else "its forward"
