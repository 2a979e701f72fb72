"""Small real artifacts, of which tests damage copies."""

import copy
import functools
import hashlib
import json
import random

import models
import pytest

import accel

from ..diffusion_case import Filler

EVICTS = {
    "kv.score": {"use": "snapkv", "window": 4},
    "kv.budget": {"use": "uniform", "tokens_kept": 8},
}
PROMPT = [(7 * i) % 37 + 3 for i in range(30)]


@pytest.fixture(scope="session")
def artifact(tmp_path_factory):
    """artifact(name) -> the folder of a small model's build by a recipe, made once; nobody may change it."""
    folder = tmp_path_factory.mktemp("trust")

    @functools.cache
    def module(kind):
        return Filler(shift=False) if kind == "diffusion" else models.make(kind, 2)

    @functools.cache
    def get(name):
        recipe = {"evicts": EVICTS, "diffusion": "dllm-threshold"}.get(name, name)
        if name == "draft":
            recipe = {"draft": {"use": "model", "path": str(get("base"))}}
        model = module(name if name == "diffusion" else "llama")
        out = folder / name
        accel.optimize(model, recipe, out=out, max_context=64, verify=False).close()
        return out

    return get


class Mutated:
    """A random change of one place of a JSON value."""

    def __init__(self, raw, seed, leave=("files", "digest")):
        self.raw, self.rng = copy.deepcopy(raw), random.Random(seed)
        node = {k: v for k, v in self.raw.items() if k not in leave}
        holder, self.where = self.raw, []
        while True:
            keys = list(node) if isinstance(node, dict) else range(len(node))
            key = self.rng.choice(list(keys))
            self.where.append(key)
            node = holder[key]
            if not (isinstance(node, (dict, list)) and node and self.rng.random() < 0.85):
                break
            holder = node
        self.how = self.rng.choice(["delete", "type", "other", "huge", "negative", "swap", "more"])
        getattr(self, f"_{self.how}")(holder, key, node)

    def __str__(self):
        return f"{self.how} {'.'.join(map(str, self.where))}"

    def _delete(self, holder, key, value):
        del holder[key]

    def _type(self, holder, key, value):
        others = [None, True, 3, -1, 0.5, "x", [], {}, [1], {"a": 1}, float("nan"), float("inf")]
        holder[key] = self.rng.choice([o for o in others if type(o) is not type(value)])

    def _other(self, holder, key, value):
        if isinstance(value, bool):
            holder[key] = not value
        elif isinstance(value, (int, float)):
            holder[key] = value + self.rng.choice([1, 2, -1, 0.5])
        elif isinstance(value, str):
            texts = [value + "x", value[:-1], "", "kv-int8", "float16", "step", "0", value.upper()]
            holder[key] = self.rng.choice(texts)
        else:
            holder[key] = type(value)()

    def _huge(self, holder, key, value):
        holder[key] = self.rng.choice([10**9, 1 << 62, 1 << 64, 10**30, 1e300, "x" * 100_000])

    def _negative(self, holder, key, value):
        holder[key] = self.rng.choice([-1, -2, -(10**9), -0.5, 0])

    def _swap(self, holder, key, value):
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        other = self.rng.choice(keys)
        holder[key], holder[other] = holder[other], holder[key]

    def _more(self, holder, key, value):
        if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(value))
        else:
            holder[f"{key}.1" if isinstance(key, str) else key] = copy.deepcopy(value)


def sealed(folder):
    """Recompute an artifact's checksums, as one who knows the format can."""
    raw = json.loads((folder / "accel.json").read_text())
    for name in raw["files"]:
        data = (folder / name).read_bytes()
        raw["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write(folder, raw)


def write(folder, raw):
    """A manifest with the digest that it must have."""
    rest = {k: v for k, v in raw.items() if k != "digest"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    (folder / "accel.json").write_text(json.dumps({**rest, "digest": digest}))


def tokens(path):
    """Four greedy tokens after PROMPT, with the model's own end of sequence."""
    with accel.load(path, threads=1) as model:
        return model.generate(PROMPT, 4).tokens[0]
