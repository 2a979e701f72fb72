"""Parts of `s3d` for models of tests."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from accel.passes.state.extra_ids import ROWS
from accel.passes.state.masks import DOWN, LAYERS, UP
from accel.passes.trained import ALL, first_product, write
from accel.runtime.draft.s3d import S3d

from .prefill_case import built, module

_FOLDER = TemporaryDirectory()


def part_of(name="llama", masks=4, **ends):
    """A file of random numbers for a small model and a method with these ends, and its tensors."""
    program = built(name).program
    method, generator = S3d(masks=masks, **ends), torch.Generator().manual_seed(0)
    width, count = module(name).get_input_embeddings().weight.shape[1], len(program.facts.layers)
    tensors = {
        ROWS: torch.randn(masks, width, generator=generator),
        DOWN: torch.randn(width, 3, generator=generator),
        UP: torch.randn(3, width, generator=generator),
        LAYERS: torch.from_numpy(method.of_layers(count)).float(),
    }
    file = Path(_FOLDER.name) / f"{name}-{masks}-{'-'.join(map(str, ends.values()))}.safetensors"
    write(method, file, {ALL: tensors}, first_product(program, program.step), {})
    return str(file), tensors


def tables(name="llama", **options):
    """The tables of a recipe with such a part."""
    draft = {"use": "s3d", "trained": part_of(name, **options)[0], **options}
    return {"draft": draft, "depth": {"use": "by-call"}}
