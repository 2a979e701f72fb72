"""The adapter of `dparallel` (arXiv:2509.26488), certainty-forcing distillation: a model that fills masks answers its
prompts by one token per call; then it learns to have those answers of half of a block's masks at once, and to be
certain of those that it has right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, fx
from torch.nn import functional as F

from accel.compiler.optimize import optimize
from accel.compiler.over_state import keys_of
from accel.compiler.part_text import Batch
from accel.compiler.train.filled import decoded
from accel.compiler.train.host import questions
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.run import Run
from accel.compiler.train.source import Source
from accel.ir.errors import InputError
from accel.ir.peft import CONFIG, WEIGHTS
from accel.ir.program import Program, evaluate
from accel.passes.calibrate import feeds
from accel.passes.gradients import References
from accel.passes.trained import Parts, sample
from accel.runtime.artifact.atomic import AtomicOutputDir
from accel.runtime.loop.dllm_lowconf import DllmLowconf
from accel.runtime.loop.dparallel import Dparallel

SHARP = 0.5  # what logits are divided by before their entropy
LINEAR = torch.ops.aten.linear.default
_SUFFIX = ".weight"


@dataclass
class Tuned:
    """A model that fills masks, whose matrices have products of two thin ones added."""

    program: Program
    method: Dparallel

    @property
    def names(self) -> str:
        """By what the model is known again."""
        return sample(self.program, keys_of(self.program))

    @cached_property
    def fixed(self) -> dict[str, Tensor]:
        """The model's parameters."""
        return {name: self.program.params[name] for name in self.program.params}

    @cached_property
    def weights(self) -> list[str]:
        """The matrices of products with hidden states, but for the output head."""
        graph, logits = self.program.step.graph, self.program.step.output_nodes()["logits"]
        nodes = [n for n in graph.find_nodes(op="call_function", target=LINEAR) if n is not logits]
        found = (str(n.args[1].target) for n in nodes if _is_param(n.args[1]))
        return list(dict.fromkeys(name for name in found if name.endswith(_SUFFIX)))

    def start(self, inner: int, seed: int) -> Parts:
        """A matrix [N,K] gets b a, of a [r,K] and b [N,r], which is 0."""
        generator = torch.Generator().manual_seed(seed)
        parts = dict[str, Tensor]()
        for name in self.weights:
            rows, columns = self.fixed[name].shape
            rank = min(inner, rows, columns)
            parts[f"{name}.a"] = torch.randn(rank, columns, generator=generator) / columns**0.5
            parts[f"{name}.b"] = torch.zeros(rows, rank)
        return {0: parts}

    def logits(self, tokens: Tensor, parts: Parts) -> Tensor:
        """Of each slot [B,T,V], of tokens [B,T] with masks; where a model says what follows a token, slot 0 has none,
        and gets its own.
        """
        added = {
            name: self.fixed[name] + parts[0][f"{name}.b"] @ parts[0][f"{name}.a"]
            for name in self.weights
        }
        inputs = feeds(self.program, "step", tokens)
        wanted = [self.program.step.output_nodes()["logits"]]
        found: Tensor
        (found,) = evaluate(wanted, self.fixed | added, inputs, value_of=References().value)
        return torch.cat([found[:, :1], found[:, :-1]], 1) if self.shift else found

    @property
    def shift(self) -> bool:
        diffusion = self.program.facts.diffusion
        return diffusion is not None and diffusion.shift

    @property
    def mask(self) -> int:
        """Raises InputError where the model has none."""
        diffusion = self.program.facts.diffusion
        if diffusion is None or diffusion.mask is None:
            raise InputError(
                "dparallel: the model decodes token by token; give a masked-diffusion model (mask_token_id in its "
                "config.json)"
            )
        return diffusion.mask


class CertainRun(Run):
    """A step is one answer."""

    folder = True

    @classmethod
    def takes(cls, method: type[Any]) -> bool:
        """See Kind."""
        return issubclass(method, Dparallel)

    @classmethod
    def lacks(cls, options: TrainOptions) -> str | None:
        """See Kind."""
        return None if options.out else "an adapter is a folder of its own; give out=DIR"

    @classmethod
    def opened(
        cls, method: Any, source: Source, options: TrainOptions
    ) -> tuple[Tuned, TrainOptions]:
        """See Run. `samples` x `rows` prompts are answered, of half of `length` tokens each."""
        tuned = Tuned(source.program, method)
        mask = tuned.mask
        options = replace(options, length=min(options.length, tuned.program.facts.max_context))
        half = options.length // 2
        loop = DllmLowconf(block=method.block)
        tables = {"loop": {"use": loop.use, "block": method.block}}
        threads = options.threads or None
        with optimize(
            source.path, tables, verify=False, threads=threads, progress=source.progress
        ) as model:
            texts = [
                (
                    torch.from_numpy(prompt[-half:]),
                    torch.from_numpy(decoded(model, loop, prompt[-half:], half)),
                )
                for prompt, _ in questions(source, options)
            ]
        texts = [(prompt, answer) for prompt, answer in texts if len(answer) > 1]
        if not texts:
            raise InputError(
                "dparallel: the model answers none of the prompts; give others, text=… or tasks=…"
            )
        source.own_rows = lambda length, rows, seed: _drawn(texts, method.block, mask, seed)
        return tuned, options

    def learn(self, ids: Tensor, known: Tensor) -> dict[str, float]:
        """One step on ids [3,N]: an answer behind its prompt, and the same with either half of a block's masks; known
        [2,N]: which those are.
        """
        text, shown, picked = ids[0], ids[1:], known > 0
        logits = self.soft.logits(shown, self.parts)
        losses, entropies, right = list[Tensor](), list[Tensor](), list[Tensor]()
        for row, where in zip(logits, picked, strict=True):
            if not where.any():
                continue
            odds, want = row[where], text[where]
            losses.append(F.cross_entropy(odds, want))
            sure = (odds / SHARP).log_softmax(-1)
            correct = odds.argmax(-1) == want
            right.append(correct.float().mean())
            if correct.any():
                entropies.append(-(sure.exp() * sure).sum(-1)[correct].mean())
        loss, entropy = sum(losses, torch.zeros(())), sum(entropies, torch.zeros(()))
        self.descend(loss + (1.0 if self.soft.shift else 2.0) * entropy)
        return {
            "loss": loss.item() / len(losses),
            "entropy": entropy.item() / max(1, len(entropies)),
            "right": torch.stack(right).mean().item(),
        }

    def write(self, out: Path, about: Mapping[str, str], by: Mapping[str, Any]) -> None:
        """A LoRA adapter, as peft saves one."""
        tensors, ranks = dict[str, Tensor](), dict[str, int]()
        for name in self.soft.weights:
            module = name.removesuffix(_SUFFIX)
            for part in "ab":
                tensor = self.parts[0][f"{name}.{part}"].detach().contiguous()
                tensors[f"base_model.model.{module}.lora_{part.upper()}.weight"] = tensor
            ranks[module] = len(self.parts[0][f"{name}.a"])
        usual = max(ranks.values())
        patterns = {module: rank for module, rank in ranks.items() if rank != usual}
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.soft.program.facts.name,
            "r": usual,
            "lora_alpha": usual,
            "rank_pattern": patterns,
            "alpha_pattern": patterns,
            "target_modules": sorted(ranks),
            "bias": "none",
        }
        with AtomicOutputDir(out) as folder:
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_file(tensors, folder / WEIGHTS, {**about, "format": "pt"})


def _drawn(texts: list[tuple[Tensor, Tensor]], block: int, mask: int, seed: int) -> Iterator[Batch]:
    """For ever an answer behind its prompt, and the two of it with masks: of a block of the answer each mask is in
    one of them, what is behind the block in both; all three [3,N]. And which are of the block [2,N].
    """
    generator = torch.Generator().manual_seed(seed)

    def below(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    while True:
        prompt, answer = texts[below(len(texts))]
        text = torch.cat([prompt, answer])
        start = len(prompt) + block * below(-(-len(answer) // block))
        stop = min(start + block, len(text))
        half = torch.rand(stop - start, generator=generator) < 0.5
        where = torch.zeros(2, len(text), dtype=torch.bool)
        where[0, start:stop], where[1, start:stop] = half, ~half
        shown = text.repeat(2, 1).masked_fill(where, mask)
        shown[:, stop:] = mask
        yield torch.cat([text[None], shown]), where.float()


def _is_param(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr"
