"""A GGUF file with one thing changed loads to the same weights, or is refused in words: never to other weights.

Left out is what makes another whole file: blocks of another type of the same size, two tensors of one shape whose names
are exchanged, another rotation.
"""

import random
import resource
import time

import pytest
import torch

from accel.compiler.load.source import open_source
from accel.ir.errors import AccelError
from accel.ir.weights import reading

from .gguf_case import Type, bpe, spm, write
from .gguf_mutants import mutants, parts
from .test_gguf import MODELS, made

SLOWEST = 10.0  # seconds for one mutant
MOST = 400 << 10  # KiB by which memory grows over all of them
RAW = ("Error:", "Exception", "object has no", "cannot be loaded")


def weights(path):
    """name -> value."""
    loaded = open_source(path).load()
    with reading(loaded.stored):
        named = loaded.model.state_dict(keep_vars=True)
        return {n: loaded.stored[t].read() if t in loaded.stored else t for n, t in named.items()}


def fault(path, want, told):
    """What is wrong with how a mutant is taken; "" where nothing is."""
    start, said = time.perf_counter(), []
    for act in (weights, lambda path: open_source(path).tokenizer):
        try:
            found = act(path)
        except AccelError as error:
            said.append(str(error))
            if str(path) not in str(error) or any(word in str(error) for word in RAW):
                return f"says {error}"
            if told and told not in str(error):
                return f"does not name {told}: {error}"
        except Exception as error:
            return f"raises {error!r}"
        else:
            if act is weights and (other := _other(found, want)):
                return f"loads other weights: {other}"
    took = time.perf_counter() - start
    return f"takes {took:.0f} s" if took > SLOWEST else ""


def _other(found, want):
    if found.keys() != want.keys():
        return str(sorted(found.keys() ^ want.keys())[:3])
    return ", ".join(n for n in want if not torch.equal(found[n], want[n]))


def faults(path, rng=None, count=0):
    """Of the mutants of a file, or of so many of them."""
    whole, want = parts(path.read_bytes()), weights(path)
    assert whole.bytes() == path.read_bytes()
    every = list(mutants(whole))
    chosen = rng.sample(every, count) if rng else every
    place, found = path.with_name("mutant.gguf"), []
    for what, told, make in chosen:
        place.write_bytes(make())
        if wrong := fault(place, want, told):
            found.append(f"{what}: {wrong}")
    return len(chosen), found


def file(name, folder, kind="F32", words=bpe):
    arch, config, more = MODELS[name]
    return write(made(config()), arch, folder / "m.gguf", kind, more=[*words(), *more])


def test_some_mutants(tmp_path):
    count, found = faults(file("llama", tmp_path), random.Random(3), 20)
    assert not found and count == 20


def test_other_weights_are_seen(tmp_path):
    """The control: floats of another type of the same size, which no reader can tell apart."""
    path = file("llama", tmp_path, "F16")
    want, whole = weights(path), parts(path.read_bytes())
    assert not fault(path, want, "")
    at = next(i for i, one in enumerate(whole.tensors) if one[2] == Type.F16)
    whole.tensors[at][2] = Type.BF16
    path.write_bytes(whole.bytes())
    assert fault(path, want, "").startswith("loads other weights: ")


KINDS = [("llama", "F32", bpe), ("qwen2moe", "F16", spm), ("mixtral", "Q8_0", bpe), ("gemma3", "Q4_0", spm),
         ("gpt2", "F32", bpe), ("phi3", "F32", bpe), ("yarn", "F32", bpe)]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "name, kind, words", KINDS, ids=lambda value: getattr(value, "__name__", value)
)
def test_every_mutant(name, kind, words, tmp_path):
    path = file(name, tmp_path, kind, words)
    weights(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count, found = faults(path)
    assert not found, f"{len(found)} of {count}:\n" + "\n".join(found)
    assert count > 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST
