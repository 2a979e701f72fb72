"""From a run to `api/reference`, and the measurements that its README reports."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import Checkpoints
from reference_data import (
    BOS,
    EOS,
    HELD_OUT,
    PAD,
    REFERENCE,
    SPECIAL,
    encode,
    functions,
    sources,
    tasks,
)
from reference_model import Llama, Shape
from reference_readme import readme
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

LENGTHS = (100, 250, 500, 1000, 1500)
WINDOW = 1024
LOGGED = 100
HEADS, WRITTEN = 50, 96  # functions that are completed, and tokens of each


def config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "float16",
    }


def _tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[PAD],
        "model_max_length": shape.positions,
        "clean_up_tokenization_spaces": False,
    }


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Written beside its place and then renamed: readers see the old file or the new one."""
    new = path.with_name(f".{path.name}.new")
    write(new)
    new.chmod(0o644)
    os.replace(new, path)


def write_json(path: Path, value: Any) -> None:
    replace(path, lambda path: path.write_text(json.dumps(value, indent=2) + "\n"))


def export(folder: Path) -> None:
    """The run's newest checkpoint as float16 weights with everything `transformers` needs beside them."""
    state = Checkpoints(folder).load()
    assert state is not None, folder
    shape = Shape(**state["shape"])
    weights = {f"model.{k}": v.half().contiguous() for k, v in state["model"].items()}
    REFERENCE.mkdir(parents=True, exist_ok=True)
    write_json(REFERENCE / "config.json", config(shape))
    write_json(REFERENCE / "tokenizer_config.json", _tokenizer_config(shape))
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    write_json(REFERENCE / "generation_config.json", {**special, "do_sample": False})
    replace(
        REFERENCE / "model.safetensors", lambda path: save_file(weights, path, {"format": "pt"})
    )
    log = compact({"trained": state["count"]}, folder / "log.jsonl")
    replace(REFERENCE / "training.json", lambda path: path.write_text(log))
    print(f"exported step {state['count']['step']} to {REFERENCE.name}/")


def compact(facts: dict[str, Any], log: Path) -> str:
    """The facts of a run and about `LOGGED` entries of its log as JSON, the last one too, one to a line: changes can be
    read.
    """
    lines = log.read_text().splitlines()
    chosen = ",\n".join(lines[:: -max(1, len(lines) // LOGGED)][::-1])
    return f'{json.dumps(facts)[:-1]}, "lines": [\n{chosen}\n]}}\n'


def load(folder: Path = REFERENCE) -> Llama:
    """The exported float16 weights, widened: what is measured is what is shipped."""
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    model = Llama(
        Shape(
            config["vocab_size"],
            config["hidden_size"],
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["intermediate_size"],
            config["max_position_embeddings"],
            config["rope_theta"],
            config["rms_norm_eps"],
            config["head_dim"],
        )
    )
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in weights.items()})
    return model.eval()


def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))


def windows(tokenizer: Tokenizer) -> Tensor:
    """[N, WINDOW + 1] of the held-out files; each window is read without what came before it."""
    ids = encode(tokenizer, sources()[1]).astype(np.int64)
    count = (len(ids) - 1) // WINDOW
    return torch.tensor(np.stack([ids[i * WINDOW : (i + 1) * WINDOW + 1] for i in range(count)]))


def held_out(model: Llama, tokenizer: Tokenizer) -> dict[str, Any]:
    """Perplexity on the held-out files, and how often each exit's choice is the last layer's."""
    held = windows(tokenizer)
    loss, agree = 0.0, np.zeros(model.shape.layers)
    for window in held:
        states = list(model.states(window[None, :-1]))
        logits = [model.head(state)[0] for state in states]
        loss += float(F.cross_entropy(logits[-1], window[1:]))
        chosen = logits[-1].argmax(-1)
        agree += [float((row.argmax(-1) == chosen).float().mean()) for row in logits]
    return {
        "files": len(HELD_OUT),
        "tokens": len(held) * WINDOW,
        "perplexity": round(float(np.exp(loss / len(held))), 3),
        "agreement": [round(float(x) / len(held), 3) for x in agree],
    }


def recalls(model: Llama, tokenizer: Tokenizer, prompt: str, answer: str) -> bool:
    """Whether greedy decoding gives the answer exactly.

    One pass over prompt and answer decides it: greedy decoding leaves the answer at the first
    position where the argmax does, and up to there it has read the same tokens.
    """
    start = tokenizer.encode(prompt).ids
    wanted = tokenizer.encode(answer, add_special_tokens=False).ids
    *_, state = model.states(torch.tensor([start + wanted[:-1]]))
    chosen = model.head(state[0, len(start) - 1 :]).argmax(-1)
    return bool((chosen == torch.tensor(wanted)).all())


def recall(model: Llama, tokenizer: Tokenizer, prompts: int) -> dict[str, dict[str, float]]:
    """Share of exact answers by task and prompt length, on prompts no training seed produced."""
    found: dict[str, dict[str, float]] = {}
    for task in tasks.TASKS:
        for length in LENGTHS:
            rng = random.Random(f"evaluate {task} {length}")
            right = sum(
                recalls(model, tokenizer, *tasks.make(task, rng, length)) for _ in range(prompts)
            )
            found.setdefault(task, {})[str(length)] = right / prompts
        print(task, found[task], flush=True)
    return found


def written(model: Llama, tokenizer: Tokenizer, prompt: str) -> str:
    """What follows, greedily, up to `WRITTEN` tokens or the end of the text."""
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    start = ids.shape[1]
    while ids.shape[1] < start + WRITTEN:
        *_, state = model.states(ids)
        token = model.head(state[:, -1:]).argmax(-1)
        if int(token) == EOS:
            break
        ids = torch.cat([ids, token], 1)
    return str(tokenizer.decode(ids[0, start:].tolist()))


def completed(model: Llama, tokenizer: Tokenizer) -> dict[str, Any]:
    """How many heads of held-out functions the model completes to something that parses."""
    found = [head for text in sources()[1] for head in functions.heads(text)]
    chosen = found[:: max(1, len(found) // HEADS)][:HEADS]
    right = sum(functions.completes(head, written(model, tokenizer, head)) for head in chosen)
    return {"asked": len(chosen), "parse": right}


@torch.no_grad()
def evaluate(prompts: int) -> None:
    """Measures `api/reference` and writes evaluation.json and README.md there."""
    started = time.monotonic()
    model, tokenizer = load(), load_tokenizer()
    result: dict[str, Any] = {"held_out": held_out(model, tokenizer)}
    print(result["held_out"], flush=True)
    result["functions"] = completed(model, tokenizer)
    print(result["functions"], flush=True)
    result["prompts"] = prompts
    result["recall"] = recall(model, tokenizer, prompts)
    result["seconds"] = round(time.monotonic() - started)
    result["parameters"] = sum(p.numel() for p in model.parameters())
    write_json(REFERENCE / "evaluation.json", result)
    write_readme()


def write_readme() -> None:
    """README.md, from what was measured."""
    told = [
        json.loads((REFERENCE / name).read_text())
        for name in (
            "training.json",
            "evaluation.json",
            "draft/training.json",
            "diffusion/training.json",
            "blocks/training.json",
        )
    ]
    replace(REFERENCE / "README.md", lambda path: path.write_text(readme(load().shape, *told)))
