"""onnxruntime-genai with weights of 4 bits, as its model builder makes them for a CPU, or of float32."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

PACKAGES = ("onnxruntime_genai",)
INSTALL = "onnxruntime-genai"
VARIANTS = ("int4", "float32")
BUILDER = "onnxruntime_genai.models.builder"
NEEDS = ("torch", "transformers", "onnx_ir", "onnx", "onnxruntime")


def file_name(variant: str, context: int, batch: int) -> str:
    return variant


def sources() -> list[Path]:
    return []


def prepare(checkpoint: Path, out: Path, variant: str, context: int, batch: int) -> None:
    import runpy
    import shutil
    import sys
    import tempfile
    from importlib.util import find_spec

    if lacking := [name for name in NEEDS if find_spec(name) is None]:
        sys.exit(
            f"onnxruntime-genai's model builder needs {', '.join(lacking)}, which {sys.executable} lacks: "
            "install them there, or give --packages a folder of packages that has them"
        )
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        made = Path(folder) / "model"
        precision = {"int4": "int4", "float32": "fp32"}[variant]
        sys.argv = ["builder", "-i", str(checkpoint), "-o", str(made), "-p", precision, "-e", "cpu"]
        sys.argv += ["-c", f"{folder}/cache"]
        if variant == "int4":
            sys.argv += ["--extra_options", "int4_accuracy_level=4"]
        runpy.run_module(BUILDER, run_name="__main__")
        shutil.rmtree(out, ignore_errors=True)
        made.rename(out)


class Session:
    def __init__(self, model: Any, batch: int, room: int):
        self.model, self.batch, self.room = model, batch, room
        self.generator: Any = None
        self.prompts: list[list[int]] = []
        self.first: Any = None

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        import numpy as np
        import onnxruntime_genai as og

        self.generator = None
        params = og.GeneratorParams(self.model)
        params.set_search_options(
            max_length=self.room, min_length=self.room, batch_size=self.batch, do_sample=False
        )
        generator = og.Generator(self.model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        self.first = generator.get_next_tokens()
        self.generator, self.prompts = generator, prompts
        return [int(t) for t in self.first]

    def back(self) -> None:
        """To the end of the prompts, with the next tokens picked but not run."""
        if self.batch > 1:  # it rewinds one row only
            self.prefill(self.prompts)
            return
        import numpy as np

        length = len(self.prompts[0])
        if self.generator.token_count() > length + 1:
            self.generator.rewind_to(length)
            self.generator.append_tokens(np.array([self.first], np.int32).reshape(1, 1))
            self.generator.generate_next_token()

    def decode(self, new: int) -> list[float]:
        self.back()
        seconds = []
        for _ in range(new):
            start = time.perf_counter()
            self.generator.generate_next_token()
            seconds.append(time.perf_counter() - start)
        return seconds

    def close(self) -> None:
        self.generator = None


class Model:
    def __init__(self, path: Path, threads: int):
        import onnxruntime_genai as og

        config = og.Config(str(path))
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = og.Model(config)
        facts = json.loads((path / "genai_config.json").read_text())
        self.vocabulary = facts["model"]["vocab_size"]

    def session(self, batch: int, room: int) -> Session:
        return Session(self.model, batch, room)


def load(path: Path, variant: str, threads: int) -> Model:
    return Model(path, threads)
