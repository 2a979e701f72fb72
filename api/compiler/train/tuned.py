"""A causal model all of whose weights learn, and the folder that it is saved as."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from accel.compiler.load.shards import SINGLE, read_shards
from accel.ir.entries.step import LOGITS
from accel.ir.errors import InputError
from accel.ir.program import Program, evaluate
from accel.ir.state import state_of, writes_state
from accel.passes.calibrate import feeds
from accel.passes.gradients import References
from accel.runtime.artifact.atomic import AtomicOutputDir

Weights = Mapping[str, Tensor]
_COPIED = (
    "config.json", "generation_config.json", "*token*", "vocab*", "merges.txt", "chat_template*", "*.py"
)  # fmt: skip


@dataclass
class Tuned:
    """The model of a Hugging Face directory as a program over state."""

    program: Program
    folder: Path

    @cached_property
    def fixed(self) -> dict[str, Tensor]:
        """The program's parameters, as they are."""
        return {name: self.program.params[name] for name in self.program.params}

    @cached_property
    def stored(self) -> dict[str, Tensor]:
        """The tensors of the directory's files. Raises InputError where it is none."""
        if not self.folder.is_dir():
            raise InputError(
                f"{self.folder} is no Hugging Face directory, as which a tuned model is saved; give the directory that "
                "it was made from"
            )
        return read_shards(self.folder).tensors

    def start(self) -> dict[str, Tensor]:
        """The weights that learn: those of the files that the program reads. Raises InputError where there are none."""
        found = {
            name: value.float().clone()
            for name, value in self.fixed.items()
            if value.is_floating_point() and _same_size(self.stored.get(name), value)
        }
        if not found:
            raise InputError(
                f"{self.folder}: its tensors have other names than transformers gives them; save the model with "
                "model.save_pretrained(...)"
            )
        return found

    def logits(self, tokens: Tensor, weights: Weights, **inputs: Tensor) -> Tensor:
        """[B,T,V] of tokens [B,T], with gradients of the weights. inputs: of the step, that are not as for a text."""
        found: Tensor
        (found,) = evaluate(
            [self.program.step.output_nodes()[LOGITS]],
            {**self.fixed, **weights},
            {**feeds(self.program, "step", tokens), **inputs},
            value_of=References().value,
        )
        return found.float()

    @torch.no_grad()
    def draw(
        self, tokens: Tensor, count: int, weights: Weights, generator: torch.Generator
    ) -> Tensor:
        """Tokens [B,T] and so many more [B,T+count], drawn from the model at temperature 1."""
        batch, length = tokens.shape
        room = torch.zeros(batch, length + count, dtype=torch.int64)
        given = feeds(self.program, "step", room)
        params, outputs = {**self.fixed, **weights}, self.program.step.output_nodes()
        new, done = tokens, 0
        for _ in range(count):
            places = torch.arange(done, done + new.shape[1]).repeat(batch, 1)
            given |= {
                "tokens": new,
                "positions": places,
                "slots": torch.full((batch,), done),
                "rows": torch.full((batch, 1), new.shape[1] - 1),
            }
            found = dict(zip(outputs, evaluate(outputs.values(), params, given), strict=True))
            given |= {state_of(n): value for n, value in found.items() if writes_state(n)}
            done += new.shape[1]
            odds = found[LOGITS][:, -1].float().softmax(-1)
            new = torch.multinomial(odds, 1, generator=generator)
            tokens = torch.cat([tokens, new], 1)
        return tokens

    def save(
        self,
        out: Path,
        weights: Weights,
        about: Mapping[str, str],
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """A folder as the one that it was, with these weights in the formats that they had. config: what its
        configuration says, too.
        """
        tensors = {
            name: (
                weights[name].detach().to(value.dtype) if name in weights else value
            ).contiguous()
            for name, value in self.stored.items()
        }
        with AtomicOutputDir(out) as folder:
            for file in {file for pattern in _COPIED for file in self.folder.glob(pattern)}:
                shutil.copyfile(file, folder / file.name)
            if config:
                file = folder / "config.json"
                stated = {**json.loads(file.read_text(encoding="utf-8")), **config}
                file.write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
            save_file(tensors, folder / SINGLE, {**about, "format": "pt"})


def _same_size(stored: Tensor | None, value: Tensor) -> bool:
    return stored is not None and stored.is_floating_point() and stored.shape == value.shape
