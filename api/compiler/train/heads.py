"""Training of heads that draft by hidden states: a model that stays as it is, and a head that reads it."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from accel.compiler.over_state import shared
from accel.compiler.pipeline import pipeline
from accel.compiler.train.device import move
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.run import Run
from accel.compiler.train.source import Source
from accel.ir.capture.arch.own_vocabulary import OwnVocabulary
from accel.ir.entries.embed import EMBED
from accel.ir.entries.step import LOGITS
from accel.ir.errors import InputError
from accel.ir.invariants import Method
from accel.ir.program import Program
from accel.ir.taps import FINAL
from accel.passes import run
from accel.passes.calibrate import feeds
from accel.passes.state.embedded import STREAM
from accel.passes.state.embeds import Embeds
from accel.passes.state.head import output_head
from accel.passes.state.kv_taps import KvTaps
from accel.passes.state.taps import Taps
from accel.passes.trained import Parts
from accel.runtime.artifact.atomic import AtomicOutputDir
from accel.runtime.draft._published import CONFIG

FADE = 0.8  # what a token of a draft weighs beside the one before it
COUNTED = 1 << 16  # tokens of the text by which the draft vocabulary is chosen


@dataclass(frozen=True)
class Reader(Method):
    """What the pass reads that names outputs of the model."""

    outputs: tuple[str, ...] = ()

    def taps(self, layers: int) -> tuple[str, ...]:
        """See Method."""
        return self.outputs


@dataclass
class Beside:
    """A model, and the head in `head`, once it has started."""

    program: Program
    method: Any
    vocabulary: int  # of the head
    text: Tensor  # [B,N], rows of what it learns from
    device: str  # on which it learns

    head: Any = None

    whole: ClassVar[bool] = False  # it drafts all tokens of the model, whatever `vocabulary`

    def start(self, inner: int, seed: int) -> Parts:
        """The head's tensors, which have learnt nothing, on the device. The model moves there, too."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = self.made()
        if self.ids is not None:
            self.words.set_ids(self.ids)
        self.head.to(self.device)
        move(self.program, self.device)
        named = self.head.named_parameters()
        return {0: {n: p for n, p in named if p.requires_grad and not n.startswith("stand_ins.")}}

    @abstractmethod
    def made(self) -> nn.Module:
        """A head that has learnt nothing."""

    @classmethod
    @abstractmethod
    def taps(cls, layers: int) -> tuple[str, ...]:
        """The outputs that it reads, of a model of so many layers."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What config.json says of it."""

    @property
    def words(self) -> OwnVocabulary:
        found: OwnVocabulary = self.head.words
        return found

    @cached_property
    def ids(self) -> Tensor | None:
        """The model's tokens that the head drafts, the commonest of the text, in their order; None: all."""
        size = self.program.facts.vocab_size
        if self.whole or self.vocabulary >= size:
            return None
        counts = torch.bincount(self.text.flatten(), minlength=size)
        return counts.sort(descending=True, stable=True).indices[: self.vocabulary].sort().values

    @property
    def own_words(self) -> int | None:
        """How many tokens it drafts; None: all."""
        return None if self.ids is None else len(self.ids)

    @cached_property
    def layer(self) -> Any:
        """transformers' configuration of a decoder layer of the model's sizes."""
        from transformers import LlamaConfig

        facts, width = self.program.facts, self.width
        attends = next(one for one in facts.layers if one.num_heads)
        return LlamaConfig(
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

    def layer_config(self) -> dict[str, Any]:
        """The same for a config.json."""
        layer = self.layer
        told = {"model_type": layer.model_type, "vocab_size": layer.vocab_size}
        return {**layer.to_diff_dict(), **told, "num_hidden_layers": 1}

    @property
    def width(self) -> int:
        """Of one output that it reads."""
        first = self.taps(self.program.facts.num_layers)[0]
        return int(self.program.step.output_nodes()[first].meta["val"].shape[2])

    @property
    def output_head(self) -> Tensor:
        """Of the model [V,E], of the tokens that the head drafts [Vd,E]. Raises InputError where it has no such one."""
        stored = output_head(self.program)
        if stored is None:
            raise InputError(
                f"{self.method.key}: no linear output head was found in the model, by which its heads begin"
            )
        found = stored.read().detach().float()
        return found if self.ids is None else found[self.ids]

    def read(self, tokens: Tensor, places: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of tokens [B,N] the taps [B,N,F], and what the model says [B,N,V]. places: of the tokens [N]; None: 0, 1 …"""
        given = feeds(self.program, "step", tokens)
        if places is not None:
            given["positions"] = places.expand(tokens.shape).contiguous()
        with torch.no_grad():
            found = self.program.run("step", given)
        taps = [found[name].float() for name in self.taps(self.program.facts.num_layers)]
        return torch.cat(taps, -1), found[LOGITS].float()

    def embedded(self, tokens: Tensor) -> Tensor:
        """The model's embeddings [B,N,E] of tokens [B,N]."""
        with torch.no_grad():
            found: Tensor = self.program.run(EMBED.name, {"tokens": tokens})[STREAM].float()
        return found

    def taught(self, logits: Tensor, says: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a head's logits [B,T,Vd] where the model says [B,T,V], and how often its likeliest token is the
        model's.
        """
        said, likeliest = says, logits.argmax(-1)
        if self.ids is not None:
            ids = self.ids.to(says.device)
            said, likeliest = says[..., ids], ids[likeliest]
        loss = -(said.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        return loss, (likeliest == says.argmax(-1)).float().mean()


class HeadsRun(Run):
    """Beside a model. A subclass declares the drafter whose heads it makes, and what stands beside the model."""

    folder = True
    on_devices = True
    drafter: ClassVar[type[Any]]
    pair: ClassVar[type[Beside]]

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, cls.drafter)

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
        readers = (Reader(cls.pair.taps(program.facts.num_layers)),)
        own = [KvTaps(readers), Taps(readers), Embeds(method)]
        steps = pipeline(program.facts.encoder is not None, own)
        done = shared(steps)
        run(program, steps[done:], done=steps[:done])
        rows = source.rows(options.length, 8, options.seed)
        text = torch.cat([next(rows)[0] for _ in range(1 + COUNTED // options.length // 8)])
        return cls.pair(program, method, options.inner, text, options.device), options

    @abstractmethod
    def drafts(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What each drafted token of rows [B,T+1] gives to learn, as of `Beside.taught`."""

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on rows [B,T+1]."""
        found = self.drafts(ids)
        self.descend(torch.stack([FADE**n * loss for n, (loss, _) in enumerate(found)]).sum())
        rights = {f"right {n + 1}": right.item() for n, (_, right) in enumerate(found)}
        return {"loss": found[0][0].item()} | rights

    def write(self, out: Path, about: Mapping[str, str], by: Mapping[str, Any]) -> None:
        """A folder in the layout of the head's authors."""
        tensors = {n: p.detach().half().cpu().contiguous() for n, p in self.saved().items()}
        if (ids := self.soft.ids) is not None:
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = self.soft.words.drafted.cpu()
        with AtomicOutputDir(out) as folder:
            text = json.dumps(self.soft.config(), indent=2) + "\n"
            (folder / CONFIG).write_text(text, encoding="utf-8")
            save_file(tensors, folder / "model.safetensors", {**about, "format": "pt"})

    def saved(self) -> Mapping[str, Tensor]:
        """The tensors by their published names."""
        return self.parts[0]


@dataclass
class BesideIndependent(Beside):
    """Heads that read what the model's output head reads."""

    @classmethod
    def taps(cls, layers: int) -> tuple[str, ...]:
        return (FINAL,)

    def config(self) -> dict[str, Any]:
        return {"vocab_size": self.program.facts.vocab_size, "hidden_size": self.width}


class IndependentRun(HeadsRun):
    """Head i learns at each place what the model says i + 1 tokens further."""

    def drafts(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        taps, says = self.soft.read(ids)
        logits = self.soft.head.said(taps)
        count = ids.shape[1] - 1
        return [
            self.soft.taught(logits[:, : count - i, i], says[:, 1 + i :])
            for i in range(min(logits.shape[2], count))
        ]
