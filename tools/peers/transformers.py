"""transformers in float32: `eager`, or with decode steps under `torch.compile` over a static cache.

Prompts are not compiled, as transformers' own `generate` does not compile them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers")
INSTALL = "transformers and torch"
VARIANTS = ("eager", "compile")


def sources() -> list[Path]:
    return []


def file_name(variant: str, context: int, batch: int) -> str:
    return ""


class Session:
    def __init__(self, model: Any, step: Any, cache: Any):
        self.model, self.step, self.cache = model, step, cache
        self.length = 0
        self.first: Any = None

    def run(self, call: Any, tokens: Any, position: int) -> Any:
        import torch

        with torch.no_grad():
            places = torch.arange(position, position + tokens.shape[1])
            logits = call(
                tokens,
                past_key_values=self.cache,
                cache_position=places,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            return logits[:, -1].argmax(-1)[:, None]

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        import torch

        self.cache.reset() if self.step is not self.model else self.cache.crop(0)
        self.first = self.run(self.model, torch.tensor(prompts), 0)
        self.length = len(prompts[0])
        return self.first[:, 0].tolist()

    def decode(self, new: int) -> list[float]:
        if self.step is self.model:
            self.cache.crop(self.length)  # a static cache needs none: positions say what is seen
        tokens, seconds = self.first, []
        for i in range(new):
            start = time.perf_counter()
            tokens = self.run(self.step, tokens, self.length + i)
            seconds.append(time.perf_counter() - start)
        return seconds

    def close(self) -> None:
        self.cache = None


class Model:
    def __init__(self, path: Path, variant: str, threads: int):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.step = torch.compile(self.model) if variant == "compile" else self.model
        self.vocabulary = self.model.config.vocab_size

    def session(self, batch: int, room: int) -> Session:
        from transformers import DynamicCache, StaticCache

        if self.step is self.model:
            return Session(self.model, self.step, DynamicCache(config=self.model.config))
        return Session(
            self.model, self.step, StaticCache(config=self.model.config, max_cache_len=room)
        )


def load(path: Path, variant: str, threads: int) -> Model:
    return Model(path, variant, threads)
