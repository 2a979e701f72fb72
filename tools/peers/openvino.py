"""OpenVINO GenAI, over a model folder that optimum-intel exported: it is not prepared here. `file`: a GGUF as it is, of
the types and architectures that it reads (not Q4_K_M, in 2026.4).
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

PACKAGES = ("openvino_genai",)
INSTALL = "openvino-genai"
VARIANTS = ("int4", "int8", "float32")
GGUF = ("file",)


def file_name(variant: str, context: int, batch: int) -> str:
    return "" if variant in GGUF else variant


def sources() -> list[Path]:
    return []


def prepare(checkpoint: Path, out: Path, variant: str, context: int, batch: int) -> None:
    import sys

    formats = {"int4": "int4", "int8": "int8", "float32": "fp32"}
    sys.exit(
        f"OpenVINO's models are not converted here: run `optimum-cli export openvino --model {checkpoint} "
        f"--weight-format {formats[variant]} DIR` (of optimum-intel) and give openvino:{variant}=DIR"
    )


class Session:
    def __init__(self, pipe: Any):
        self.pipe = pipe
        self.prompts: Any = None

    def generate(self, new: int) -> Any:
        import openvino_genai as ov

        options = ov.GenerationConfig(max_new_tokens=new, ignore_eos=True, eos_token_id=0)
        return self.pipe.generate(self.prompts, options)

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        import numpy as np
        import openvino

        self.prompts = openvino.Tensor(np.array(prompts, np.int64))
        return [row[0] for row in self.generate(1).tokens]

    def decode(self, new: int) -> list[float]:
        """Its pipeline cannot go back, so that every call runs the prompts too, outside the steps."""
        ends = self.generate(new + 1).perf_metrics.raw_metrics.m_new_token_times  # milliseconds
        return [(end - start) / 1e3 for start, end in pairwise(ends)]

    def close(self) -> None:
        self.prompts = None


class Model:
    def __init__(self, path: Path, threads: int):
        import openvino_genai as ov

        self.pipe = ov.LLMPipeline(str(path), "CPU", INFERENCE_NUM_THREADS=threads)
        if path.is_file():
            self.vocabulary = len(self.pipe.get_tokenizer().get_vocab())
        else:
            self.vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]

    def session(self, batch: int, room: int) -> Session:
        return Session(self.pipe)


def load(path: Path, variant: str, threads: int) -> Model:
    return Model(path, threads)
