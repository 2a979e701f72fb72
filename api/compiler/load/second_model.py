"""Another model that a pass goes by, beside the one that is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accel.compiler.load.source import open_source
from accel.ir.capture.capture import capture
from accel.ir.errors import RecipeError
from accel.ir.facts import Facts
from accel.ir.program import Program
from accel.passes import Pass, run
from accel.passes.state.latent import Latent
from accel.runtime.inputs.text import Tokenizer


def second_model(
    steps: Sequence[Pass], every: Sequence[Pass], facts: Facts, tokenizer: Tokenizer | None
) -> Program | None:
    """The model whose folder one of `steps` names, without state, recognised by those of the passes of `every` model
    that come before state; None: none names one. `facts`, `tokenizer`: of the model that is compiled.

    Raises AccelError: there is no such folder, or its tokens are others.
    """
    named = next((step for step in steps if step.second_model_folder), None)
    if named is None:
        return None
    path, who = Path(named.second_model_folder), type(named).__name__
    if not path.is_dir():
        raise RecipeError(f"{who}: {path} is not a folder; set `aux` to a Hugging Face directory")
    source = open_source(path)
    loaded = source.load()
    program = capture(loaded.model, facts.max_context, loaded.stored)
    check_tokens(who, path, program.facts, facts, source.tokenizer, tokenizer)
    until = next(i for i, step in enumerate(every) if isinstance(step, Latent))
    run(program, every[:until])
    return program


def check_tokens(
    who: str,
    path: Path,
    theirs: Facts,
    ours: Facts,
    other: Tokenizer | None,
    tokenizer: Tokenizer | None,
) -> None:
    """Raise RecipeError where token ids of one model say something else to the other."""
    if theirs.vocab_size != ours.vocab_size:
        raise RecipeError(
            f"{who}: {path} has {theirs.vocab_size} tokens, and {ours.name} {ours.vocab_size}; set `aux` to a model "
            "of the same tokens"
        )
    if other is None or tokenizer is None:
        return
    for i in range(ours.vocab_size):
        if (a := other.decode([i])) != (b := tokenizer.decode([i])):
            raise RecipeError(
                f"{who}: token {i} is {a!r} in {path} and {b!r} in {ours.name}; set `aux` to a model of the same tokens"
            )
