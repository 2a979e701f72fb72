"""Pass keys beyond the length that the bundled model was trained on: the whole cache, and tokens chosen of it.

    python tools/bench/beyond.py [--lengths 1000,2048,4096] [--prompts 12] [--read 256]

Prompts are the model's own `pass_key` task, the key anywhere in them; the first part is one call, what is beyond goes
in calls of 32 tokens, each of which chooses, as generated tokens do. A row says how many of the keys greedy decoding
gives exactly. The model's folder is copied, and its configuration says as many positions as are needed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from turns import head, row

import accel
from accel.ir.sizes import FEW
from accel.reference.tasks import __file__ as reference
from accel.reference.tasks import lines_for, pass_key
from accel.runtime.model.compiled import CompiledModel

MODEL = Path(reference).parent
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
FIRST = 512  # tokens of the first call


def asked(length: int, number: int) -> tuple[str, str]:
    """A prompt of about so many tokens, and its answer."""
    pieces = pass_key(random.Random(number), lines_for("pass_key", length))
    at = next(i for i, (_, is_answer) in enumerate(pieces) if is_answer)
    return "".join(text for text, _ in pieces[:at]), pieces[at][0]


def longer(positions: int, out: Path) -> Path:
    """The model with so many positions."""
    shutil.copytree(MODEL, out, ignore=lambda _, names: [n for n in names if n not in FILES])
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = positions
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def right(model: CompiledModel, prompt: str, answer: str) -> bool:
    """Whether greedy decoding gives the answer."""
    assert model.tokenizer is not None
    ids, want = (model.tokenizer.encode(t, special=False) for t in (prompt, answer))
    with model.session() as session:
        logits = session.run(np.array([ids[:FIRST]]), last_only=True)
        for start in range(FIRST, len(ids), FEW):
            logits = session.run(np.array([ids[start : start + FEW]]), last_only=True)
        for token in want:
            if int(logits[0, -1].argmax()) != token:
                return False
            logits = session.run([[token]])
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="1000,2048,4096", help="tokens of prompts")
    parser.add_argument("--prompts", type=int, default=12, help="of each length")
    parser.add_argument("--read", type=int, default=256, help="tokens that a choice reads")
    options = parser.parse_args()
    lengths = [int(n) for n in options.lengths.split(",")]
    if min(*lengths, options.prompts, options.read) < 1:
        parser.error("--lengths, --prompts and --read take 1 or more")
    warnings.filterwarnings("ignore")
    own = {"use": "tokenselect", "tokens_read": options.read, "sinks": 16, "window": 64}
    forms: dict[str, dict[str, Any]] = {
        "the whole cache": {},
        '`tokenselect`, `at = "list"`': {"kv.select": {**own, "at": "list"}},
        "… no dense layers": {"kv.select": {**own, "at": "list", "dense_layers": 0}},
        '… `at = "text"`, no dense layers': {"kv.select": {**own, "dense_layers": 0}},
    }
    head("pass keys", *(f">{n} tokens, of {options.prompts}" for n in lengths))
    with tempfile.TemporaryDirectory() as place:
        positions = max(lengths) + 512
        folder = longer(positions, Path(place) / MODEL.name)
        for told, tables in forms.items():
            build = accel.optimize(folder, tables or "base", max_context=positions, verify=False)
            with build as model:
                counts = [
                    sum(right(model, *asked(n, i)) for i in range(options.prompts)) for n in lengths
                ]
            row(told, *map(str, counts))


if __name__ == "__main__":
    main()
