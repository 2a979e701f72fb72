"""Training of heads that draft by hidden states (EAGLE-3, arXiv:2503.01840): at each place of a text a draft is made,
in which the head reads its own features, and each drafted token learns what the model says of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from accel.compiler.over_state import shared
from accel.compiler.pipeline import pipeline
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.run import Run
from accel.compiler.train.runs.head import Whole
from accel.compiler.train.source import Source
from accel.ir.capture.arch.eagle3 import Eagle3, Eagle3Config
from accel.ir.entries.embed import EMBED
from accel.ir.entries.step import LOGITS
from accel.ir.invariants import Method
from accel.ir.program import Program
from accel.passes import run
from accel.passes.calibrate import feeds
from accel.passes.state.embedded import STREAM
from accel.passes.state.embeds import Embeds
from accel.passes.state.taps import Taps
from accel.passes.trained import Parts
from accel.runtime.artifact.atomic import AtomicOutputDir
from accel.runtime.decode.trained_part import sample
from accel.runtime.draft._published import CONFIG, eagle3_ids, eagle3_taps
from accel.runtime.draft.eagle3 import Eagle3 as Eagle3Draft

UNROLLED = 4  # tokens of a draft that it learns
FADE = 0.8  # what a token of a draft weighs beside the one before it
COUNTED = 1 << 16  # tokens of the text by which the draft vocabulary is chosen


class Reader(Method):
    """What the pass reads that names outputs of the model."""

    def taps(self, layers: int) -> tuple[str, ...]:
        """See Method."""
        return eagle3_taps({}, layers)


@dataclass
class Beside:
    """A model that stays as it is, and a head that reads it."""

    program: Program
    method: Any
    vocabulary: int  # of the head
    common: Tensor  # the tokens of the text, the commonest first

    def start(self, inner: int, seed: int) -> Parts:
        """The head's tensors, which have learnt nothing."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = Eagle3(self.config)
        if not self.head.words.whole:
            self.head.words.set_ids(self.common[: self.vocabulary].sort().values)
        named = self.head.named_parameters()
        return {0: {n: p for n, p in named if not n.startswith("stand_ins.")}}

    @property
    def config(self) -> Eagle3Config:
        """Sizes as the model's."""
        from transformers import LlamaConfig

        facts = self.program.facts
        width = int(self.program.step.output_nodes()[self.taps[0]].meta["val"].shape[2])
        attends = next(one for one in facts.layers if one.num_heads)
        layer = LlamaConfig(
            vocab_size=facts.vocab_size,
            hidden_size=width,
            intermediate_size=facts.config.get("intermediate_size") or 2 * width,
            num_hidden_layers=1,
            num_attention_heads=attends.num_heads,
            num_key_value_heads=attends.num_kv_heads,
            head_dim=attends.head_dim,
            max_position_embeddings=facts.max_context,
            rms_norm_eps=1e-5,
        )
        some = None if self.vocabulary >= facts.vocab_size else self.vocabulary
        return Eagle3Config(layer, self.taps, width, some, False, width)

    @property
    def taps(self) -> tuple[str, ...]:
        """The outputs of the model that it reads."""
        return eagle3_taps({}, self.program.facts.num_layers)

    @property
    def names(self) -> str:
        """By what the model is known again, as JSON."""
        return json.dumps({"model": sample(lambda: Whole(self.program))})

    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens [B,N] the taps [B,N,F], the embeddings [B,N,E], and what the model says [B,N,V]."""
        with torch.no_grad():
            found = self.program.run("step", feeds(self.program, "step", tokens))
            rows = self.program.run(EMBED.name, {"tokens": tokens})[STREAM]
        taps = torch.cat([found[name].float() for name in self.taps], -1)
        return taps, rows.float(), found[LOGITS].float()


class HeadsRun(Run):
    """Beside a model."""

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, Eagle3Draft)

    @classmethod
    def lacks(cls, options: TrainOptions) -> str | None:
        """See Kind."""
        return None if options.out else "a head is a folder of its own; give out=DIR"

    @classmethod
    def opened(
        cls, method: Any, source: Source, options: TrainOptions
    ) -> tuple[Beside, TrainOptions]:
        """See Run."""
        program = source.program.copy()
        options = replace(options, length=min(options.length, program.facts.max_context))
        steps = pipeline(program.facts.encoder is not None)
        done = shared(steps)
        run(program, [*steps[done:], Taps((Reader(),)), Embeds(method)], done=steps[:done])
        rows = source.rows(options.length, 8, options.seed)
        ids = torch.cat(
            [next(rows)[0].flatten() for _ in range(1 + COUNTED // options.length // 8)]
        )
        counts = torch.bincount(ids, minlength=program.facts.vocab_size)
        common = counts.sort(descending=True, stable=True).indices
        return Beside(program, method, options.inner, common), options

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1]."""
        taps, rows, says = self.soft.read(ids)
        losses, right = unrolled(self.soft.head, taps, rows[:, 1:], says[:, 1:], UNROLLED)
        weighed = [FADE**n * one for n, one in enumerate(losses)]
        self.descend(torch.stack(weighed).sum())
        return {"loss": losses[0].item()} | {f"right {n + 1}": r for n, r in enumerate(right)}

    def write(self, out: Path, about: Mapping[str, str], by: Mapping[str, Any]) -> None:
        """A folder in the layout of the head's authors."""
        head: Eagle3 = self.soft.head
        tensors = {n: p.detach().half().contiguous() for n, p in self.parts[0].items()}
        layer = self.soft.config.layer
        config = {
            **layer.to_diff_dict(),
            "model_type": layer.model_type,
            "architectures": ["LlamaForCausalLMEagle3"],
            "vocab_size": layer.vocab_size,
            "num_hidden_layers": 1,
            "draft_vocab_size": head.lm_head.out_features,
            "target_hidden_size": self.soft.config.tap_width,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": eagle3_ids(
                    {}, self.soft.program.facts.num_layers
                ),
            },
        }
        if not head.words.whole:
            ids = self.soft.common[: head.lm_head.out_features].sort().values
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = head.words.drafted
        with AtomicOutputDir(out) as folder:
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_file(tensors, folder / "model.safetensors", {**about, "format": "pt"})


def unrolled(
    head: Eagle3, taps: Tensor, e: Tensor, says: Tensor, count: int
) -> tuple[list[Tensor], list[float]]:
    """The losses of `count` drafted tokens, one after the other, and how often the likeliest is the model's. Of tokens
    0 .. N-1 the taps [B,N,F], of tokens 1 .. N-1 the embeddings e [B,N-1,E] and what the model says behind them
    [B,N-1,V].

    Place t of a draft's token n stands for slot t + n: it sees the slots up to t as the model has them, and of its own
    guesses those of place t, whose keys and values are `guessed`.
    """
    h = head.fuse(taps[:, :-1])
    wanted = head.words.of(says)
    losses, right, guessed = list[Tensor](), list[float](), list[tuple[Tensor, Tensor]]()
    for n in range(min(count, h.shape[1])):
        width = e.shape[1] - n
        h = h[:, :width]
        q, k, v = _heads(head, e[:, n:], h, n)
        guessed = [(keys[:, :, :width], values[:, :, :width]) for keys, values in guessed]
        guessed.append((k, v))
        mixed = head.midlayer.self_attn.o_proj(_mixed(q, guessed))
        logits, h = head.ending(h, mixed)
        said = wanted[:, n:].softmax(-1)
        losses.append(-(said * logits.log_softmax(-1)).sum(-1).mean())
        best = says[:, n:].argmax(-1)
        mine = head.words.ids[logits.argmax(-1)]
        right.append((mine == best).float().mean().item())
    return losses, right


def _heads(head: Eagle3, e: Tensor, h: Tensor, ahead: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B,H,T,D] of places that stand for slots `ahead` of them."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

    attention = head.midlayer.self_attn
    x = head.beginning(e, h)
    q, k, v = (
        getattr(attention, f"{name}_proj")(x)
        .unflatten(-1, (-1, attention.head_dim))
        .transpose(1, 2)
        for name in "qkv"
    )
    places = torch.arange(ahead, ahead + x.shape[1])[None]
    q, k = apply_rotary_pos_emb(q, k, *head.rotary(h, places))
    groups = q.shape[1] // k.shape[1]
    return q, repeat_kv(k, groups), repeat_kv(v, groups)


def _mixed(q: Tensor, slots: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention [B,T,H D] of queries over the slots that the model has and the guesses of each place."""
    (keys, values), guesses = slots[0], slots[1:]
    count, scale = q.shape[2], q.shape[3] ** -0.5
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    scores = (q @ keys.transpose(2, 3)).masked_fill(later, float("-inf"))
    more = [(q * k).sum(-1, keepdim=True) for k, _ in guesses]
    weights = (torch.cat([scores, *more], -1) * scale).softmax(-1)
    out = weights[..., :count] @ values
    for n, (_, v) in enumerate(guesses):
        out = out + weights[..., count + n, None] * v
    flat: Tensor = out.transpose(1, 2).flatten(2)
    return flat
