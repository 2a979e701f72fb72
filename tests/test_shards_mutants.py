"""A safetensors file with one thing of its header changed loads to the same weights, or is refused in words."""

import json
import random
import shutil

import pytest
import torch
import transformers as hf

from accel.compiler.load.source import open_source

from .test_gguf import SIZES, made
from .test_gguf_mutants import fault, weights

HUGE = 2**60


def mutants(header, data):
    """(what is changed, whose name an error tells or "", the bytes)."""

    def of(changed, more=data, text=None):
        told = text or json.dumps(changed).encode()
        return len(told).to_bytes(8, "little") + told + more

    names = [name for name in header if name != "__metadata__"]
    for length in (0, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
        yield f"{length} bytes", "", of(header)[:length]
    for length in (0, 1, HUGE, 2**64 - 1):
        yield f"header of {length}", "", length.to_bytes(8, "little") + of(header)[8:]
    yield "bytes behind", "", of(header, data + bytes(8))
    for text in (b"[]", b"{", b"3", b"\xff", b"[" * 100000):
        yield f"header {text[:3]!r}", "", of(None, text=text)
    for at, name in enumerate(names):
        entry = header[name]
        start, end = entry["data_offsets"]
        other = header[names[at - 1]]["data_offsets"]
        values = [
            ("data_offsets", v)
            for v in (
                [start + 4, end + 4],
                [start, end - 4],
                other,
                [end, start],
                [0, HUGE],
                [-4, end],
                [start],
                "x",
                None,
            )
        ]
        values += [
            ("shape", v)
            for v in (
                [*entry["shape"], 1],
                entry["shape"][::-1],
                [],
                [-1, *entry["shape"][1:]],
                [0],
                [HUGE, HUGE],
                ["a"],
                "x",
                None,
                [True],
            )
        ]
        values += [
            ("dtype", v) for v in ("F16", "I32", "I16", "BOOL", "F8_E4M3", "XX", "", None, 3)
        ]
        for key, value in values:
            if value != entry[key]:
                yield f"{name} {key} {value}", name, of({**header, name: {**entry, key: value}})
        yield f"{name} without", "", of({k: v for k, v in header.items() if k != name})
        yield (
            f"{name} renamed",
            "",
            of({(k + "x" if k == name else k): v for k, v in header.items()}),
        )
        whole = json.dumps(header)[:-1] + f', "{name}": {json.dumps(header[names[at - 1]])}}}'
        yield f"{name} twice", name, of(None, text=whole.encode())
        yield f"{name} no object", name, of({**header, name: 3})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    made(hf.LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def faults(folder, rng=None, count=0):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    want, found = weights(folder), []
    every = list(mutants(json.loads(whole[8 : 8 + length]), whole[8 + length :]))
    chosen = rng.sample(every, count) if rng else every
    for what, told, data in chosen:
        file.write_bytes(data)
        if wrong := fault(folder, want, told):
            found.append(f"{what}: {wrong}")
    file.write_bytes(whole)
    return len(chosen), found


def test_some_mutants(saved):
    count, found = faults(saved, random.Random(1), 25)
    assert not found and count == 25


@pytest.mark.long
def test_every_mutant(saved):
    count, found = faults(saved)
    assert not found, f"{len(found)} of {count}:\n" + "\n".join(found)
    assert count > 500


def test_what_the_model_has_no_place_for_is_told_of(saved, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "more"
    shutil.copytree(saved, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (note,) = open_source(folder).load().notes
    assert "does not use 1 tensor (model.layers.0.self_attn.q_proj.bias)" in note
