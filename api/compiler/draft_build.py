"""The model that drafts for a model, a smaller one or itself by another recipe: where a build takes it from, where it
lies in an artifact, and that it fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from accel.compiler.assemble import Plan, assemble
from accel.compiler.build_options import BuildOptions
from accel.compiler.load.heads import Config, Target, class_names
from accel.compiler.load.heads._folder import HeadFolder, head_at
from accel.compiler.load.source import Source, open_source
from accel.ir.encoder import EncoderFacts
from accel.ir.errors import RecipeError
from accel.ir.facts import Facts
from accel.ir.fields import MANIFEST
from accel.ir.invariants import Invariant
from accel.ir.program import Program
from accel.ir.recipe import Recipe
from accel.ir.weights import Stored
from accel.runtime.artifact.artifact import copy_artifact, open_artifact
from accel.runtime.artifact.manifest import DRAFT_FOLDER
from accel.runtime.inputs.text import Tokenizer, same_tokens
from accel.runtime.loop import HOST
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.model.load import load
from accel.runtime.speculation.follow import Follower
from accel.runtime.speculation.round_cost import unmeasured_cost

Build = Callable[[Facts, Stored | None, Tokenizer | None, Path | None], CompiledModel]
Compile = Callable[[Source, Recipe, BuildOptions, Path | None], CompiledModel]
PLAIN = "autoregressive"  # the loop of a recipe that drafts nothing
TREES = {
    "draft": {"use": "token-recycling"}
}  # a recipe whose calls may be trees; nobody decodes by it
FILLS = {"loop": {"use": "dllm-lowconf"}}  # nor by this one, of a model that fills masks


def own_plan(plan: Plan, max_context: int) -> Plan | None:
    """The plan by which the model itself drafts: the drafter's recipe, and the weights as the target has them; None
    where it does not. Raises RecipeError, before any work, where its sessions could not take drafts back, where it
    would have other weights, or where a draft is longer than the context.
    """
    draft = plan.methods.get("draft")
    recipe = None if draft is None else draft.draft_recipe()
    if recipe is None:
        return None
    name, use = f"recipe '{plan.recipe.name}'", plan.recipe.tables["draft"]["use"]
    theirs, ours = recipe.tables.get("weights"), plan.recipe.tables.get("weights")
    if theirs is not None and theirs != ours:
        raise RecipeError(
            f"{name}: draft = {use} drafts by the model's own weights, and recipe '{recipe.name}' sets others "
            f"(weights = {theirs['use']}); leave [weights] out of it, or build that model by itself and give its path"
        )
    tables = {a: t for a, t in recipe.tables.items() if (a, t["use"]) != ("loop", PLAIN)}
    if host := [axis for axis in tables if axis in HOST]:
        raise RecipeError(
            f"{name}: draft = {use} drafts by recipe '{recipe.name}', which sets {host[0]}; a model that drafts is run "
            f"token by token, so leave [{host[0]}] out of it"
        )
    length = plan.methods.get("length")
    longest = 0 if length is None else length.begin(unmeasured_cost).limit()
    if longest >= max_context:
        raise RecipeError(
            f"{name}: length = {plan.recipe.tables['length']['use']} drafts {longest} tokens, beyond max_context = "
            f"{max_context}; give fewer, or more room: max_context=…"
        )
    trees = TREES if "tree" in plan.methods and plan.methods["tree"].branches else {}
    tables = {**tables, **({} if ours is None else {"weights": ours}), **trees}
    own = assemble(Recipe(name=f"{plan.recipe.name}: draft", tables=tables))
    for axis, method in own.methods.items():
        if Invariant.REWIND in method.breaks:
            raise RecipeError(
                f"{name}: draft = {use} drafts by recipe '{recipe.name}', and takes back what is rejected, but with "
                f"{axis} = {own.recipe.tables[axis]['use']} no token can be taken back; "
                "give one that evicts after the prompt only, such as snapkv"
            )
    if "recipe" in plan.recipe.tables["draft"]:  # by name: no path of this machine
        table = {**plan.recipe.tables["draft"], "recipe": recipe.name}
        plan.recipe = replace(plan.recipe, tables={**plan.recipe.tables, "draft": table})
    return own


def share(self_draft: Program, target: Program, calibrated: bool) -> None:
    """Let the program that drafts read the target's parameters. Raises RecipeError where one of a name holds other
    numbers. `calibrated`: rounding them went by what the program computes, so each program rounds in its own way, and
    the target's are taken.
    """
    for name in self_draft.params:
        if name not in target.params:
            continue
        here, there = self_draft.params.stored(name), target.params.stored(name)
        same = here.blank.shape == there.blank.shape and here.blank.dtype == there.blank.dtype
        if here is not there and not (
            same and (calibrated or self_draft.params[name].equal(target.params[name]))
        ):
            raise RecipeError(
                f"the model drafts by its own weights, but by the draft's recipe parameter {name!r} is another one; "
                "leave out of that recipe what changes weights, or build that model by itself and give its path"
            )
        self_draft.params[name] = there


def check_draft(plan: Plan, target: Facts, tokenizer: Tokenizer | None) -> None:
    """Raise RecipeError where the model that a recipe's drafter names cannot draft for a target, as far as its files
    say, with both sides. `tokenizer`: the target's.
    """
    draft = plan.methods.get("draft")
    path: Path | None = None if draft is None else draft.draft_folder()
    if path is None:
        return
    source = _source(plan, path, target)
    if not (path / MANIFEST).is_file():
        _check_kind(plan, source.format.method if isinstance(source, HeadFolder) else None, path)
    if isinstance(source, HeadFolder):
        _check_head(source, target)
    if (path / MANIFEST).is_file():
        _check(plan, source, target, tokenizer, open_artifact(path).facts)
    else:
        _check_tokens(source, target, tokenizer, source.vocab_size)
    if Invariant.DRAFT_MODEL in plan.methods["loop"].relies and tokenizer and source.has_tokenizer:
        if not same_tokens(tokenizer, source.tokenizer):
            raise RecipeError(
                f"loop.{plan.methods['loop'].use}: {path} has another tokenizer than the model, and this loop gives it "
                f"tokens, not text; use loop = speculative, or {_another(path)}"
            )


def builder(plan: Plan, compile_model: Compile, options: BuildOptions) -> Build | None:
    """What makes the model that a recipe's drafter names, in a folder (None: here) as an artifact; None where it names
    none. `compile_model` builds a Hugging Face directory or a GGUF file, with the options of the target. Raises
    RecipeError before any work.
    """
    draft = plan.methods.get("draft")
    path: Path | None = None if draft is None else draft.draft_folder()
    if path is None:
        return None
    if not path.is_dir() and not open_source(path).has_weights:
        what = "is no GGUF file" if path.is_file() else "does not exist"
        raise RecipeError(
            f"recipe '{plan.recipe.name}': draft.model: {path} {what}; set `path` to an artifact (accel-compile "
            "build), or to a Hugging Face directory or a GGUF file, which is then built as part of this build"
        )
    if not (path / MANIFEST).is_file():
        assemble(_recipe(plan))
    return partial(_build, plan, compile_model, path, options)


def at_home(plan: Plan, source: Source | None) -> Plan:
    """The plan, with the target's directory or file as that of a head which lies within it. Raises RecipeError where
    it has none, CaptureError where that holds none.
    """
    draft = plan.methods.get("draft")
    if draft is None or not draft.within or draft.path:
        return plan
    if source is None:
        raise RecipeError(
            f"recipe '{plan.recipe.name}': draft = {draft.use} takes its head from the directory or the GGUF file of "
            "the model, and this one has none; set `path` to the model's Hugging Face directory"
        )
    found = head_at(source.path, method=draft.use)
    if found is not None and found.format.check is not None:
        found.format.check(found.path, found.json)
    table = {**plan.recipe.tables["draft"], "path": str(source.path)}
    return assemble(replace(plan.recipe, tables={**plan.recipe.tables, "draft": table}))


def _recipe(plan: Plan) -> Recipe:
    """That of a draft model which is built along."""
    weights = plan.methods["draft"].weights
    tables = {"weights": {"use": weights}} if weights else {}
    if plan.methods["draft"].fills:
        return Recipe(name=f"{plan.recipe.name}: draft", tables={**tables, **FILLS})
    trees = TREES if _grows(plan) else {}
    return Recipe(name=f"{plan.recipe.name}: draft", tables={**tables, **trees})


def _grows(plan: Plan) -> bool:
    """Whether calls of the draft model are trees."""
    if plan.methods["draft"].independent:
        return False
    shaped = "tree" in plan.methods and plan.methods["tree"].branches
    return bool(shaped or plan.methods["loop"].grows or plan.methods["draft"].blocks)


def _build(
    plan: Plan,
    compile_model: Compile,
    path: Path,
    options: BuildOptions,
    target: Facts,
    output_head: Stored | None,
    tokenizer: Tokenizer | None,
    folder: Path | None,
) -> CompiledModel:
    """`output_head`, `tokenizer`: the target's. Raises RecipeError where the model cannot draft for the target, and
    InputError where its sessions cannot.
    """
    if (path / MANIFEST).is_file():
        if folder is not None:
            copy_artifact(open_artifact(path), folder)
        model = load(folder or path)
        try:
            if not plan.methods["draft"].fills:
                check_rewind(model, plan)
        except BaseException:
            model.close()
            raise
    else:
        own = replace(
            options,
            max_context=target.max_context,
            max_batch=target.max_batch,
            tokenizer=None,
            calibration=None,
            dump=None,
            merge_adapter=None,
            adapters={},
        )
        source = _source(plan, path, target, output_head)
        model = compile_model(source, _recipe(plan), own, folder)
        try:
            _check(plan, source, target, tokenizer, model.facts)
        except RecipeError:
            model.close()
            raise
    if folder is not None:  # the recipe that the artifact keeps names what it holds
        table = {**plan.recipe.tables["draft"], "path": DRAFT_FOLDER}
        plan.recipe = replace(plan.recipe, tables={**plan.recipe.tables, "draft": table})
    return model


def _source(plan: Plan, path: Path, target: Facts, output_head: Stored | None = None) -> Source:
    """What lies there: a head of the target, or a model."""
    use = plan.recipe.tables["draft"]["use"]
    if (path / MANIFEST).is_file():
        return open_source(path)
    caches = tuple((layer.num_kv_heads, layer.head_dim) for layer in target.layers)
    windows, shares = (
        tuple(getattr(one, n) for one in target.layers) for n in ("window", "shares")
    )
    told = Target(target.num_layers, output_head, caches, windows, shares)
    return head_at(path, use, told) or open_source(path)


def check_rewind(model: CompiledModel, plan: Plan) -> None:
    """Raise InputError where sessions of a model that drafts cannot take drafts back, or grow those of a recipe."""
    Follower(model, 1, _grows(plan)).close()


def _check(
    plan: Plan, source: Source, target: Facts, tokenizer: Tokenizer | None, facts: Facts
) -> None:
    """Raise RecipeError where a model cannot draft for the target, with both sides."""
    path = source.path
    use, fills = plan.recipe.tables["draft"]["use"], plan.methods["draft"].fills
    head = facts.draft_head
    _check_kind(plan, None if head is None else head.drafter, path)
    if fills and facts.diffusion is None:
        raise RecipeError(
            f"draft.{use}: {path} decodes token by token; give a masked-diffusion model (mask_token_id in its "
            "config.json), or draft = model"
        )
    if not fills and facts.diffusion is not None:
        raise RecipeError(
            f"draft.{use}: {path} is a masked-diffusion model; use draft = gad, or give a model that decodes token by "
            "token"
        )
    if facts.diffusion is not None and facts.diffusion.mask is None:
        raise RecipeError(
            f"draft.{use}: {path} has no token that stands for what is to be filled; set mask_token_id in its "
            "configuration"
        )
    if facts.encoder is not None:
        _check_encoder(use, fills, path, target, facts.encoder)
    if facts.max_batch < target.max_batch:
        raise RecipeError(
            f"draft.model: {path} was built for batches of up to {facts.max_batch}, but the "
            f"model for {target.max_batch}; build it with max_batch={target.max_batch}"
        )
    _check_tokens(source, target, tokenizer, facts.vocab_size)
    if fills and tokenizer is not None and source.has_tokenizer:
        if not same_tokens(tokenizer, source.tokenizer):
            raise RecipeError(
                f"draft.{use}: {path} has another tokenizer than the model, and fills masks by its own tokens; "
                f"{_another(path)}"
            )


def _check_encoder(use: str, fills: bool, path: Path, target: Facts, encoder: EncoderFacts) -> None:
    """Raise RecipeError where the encoder of a model that drafts cannot read what the target's reads."""
    if not fills:
        raise RecipeError(
            f"draft.{use}: {path} has an encoder; a model that drafts token by token must be a decoder"
        )
    theirs = target.encoder
    if theirs is None:
        raise RecipeError(
            f"draft.{use}: {path} has an encoder, and the model has none whose source it could read; give a decoder"
        )
    if (theirs.features, theirs.vocab_size) != (encoder.features, encoder.vocab_size):
        raise RecipeError(
            f"draft.{use}: the encoder of {path} reads {_reads(encoder)}, and the model's {_reads(theirs)}; give one "
            "that reads the same"
        )
    if encoder.max_length < theirs.max_length:
        raise RecipeError(
            f"draft.{use}: the encoder of {path} takes {encoder.max_length} tokens, and the model's "
            f"{theirs.max_length}; build it with max_context={theirs.max_length}"
        )


def _reads(encoder: EncoderFacts) -> str:
    """What an encoder is given."""
    if encoder.features:
        return f"features {list(encoder.features)}"
    return f"{encoder.vocab_size} tokens"


def _check_kind(plan: Plan, head: str | None, path: Path) -> None:
    """Raise RecipeError where a drafter takes a head and is given a model, or another's head, or the other way round.
    head: the drafter that takes what is there; None: it is a model.
    """
    use, wants = plan.recipe.tables["draft"]["use"], plan.methods["draft"].head
    if wants and head is None:
        raise RecipeError(
            f"draft.{use}: {path} holds a model, not a head; set `path` to the folder of a head, or use draft = "
            "model"
        )
    if head is not None and (head != use or not wants):
        raise RecipeError(
            f"draft.{use}: {path} holds a head, which drafts by what the model computes; use draft = {head} for it, or "
            f"give {'another head' if wants else 'a model'}"
        )


def _check_head(source: HeadFolder, target: Facts) -> None:
    """Raise RecipeError where a head was made for states of another width, CaptureError where a folder has none."""
    if source.format.check is not None:
        source.format.check(source.path, source.json)
    wide, config = source.format.target_width(source.sizes), target.config
    inner = config.get("text_config", config)
    width = inner.get("hidden_size", inner.get("n_embd", wide))
    kind = str(inner.get("model_type", ""))
    if source.format.unscaled and kind.startswith("gemma"):
        raise RecipeError(
            f"draft: {source.path} reads the embedding of a {kind} without its scale, which accel gives with it; use "
            "another drafter"
        )
    made_for, own = _verifiers(source.json), class_names(inner) or class_names(config)
    if made_for and own and not {*map(_family, made_for)} & {*map(_family, own)}:
        raise RecipeError(
            f"draft: {source.path} was trained for {made_for[0]} (speculators_config.verifier of its config.json), and "
            f"the model is {own[0]}; give a head that was trained for this model"
        )
    if width != wide:
        raise RecipeError(
            f"draft: {source.path} reads states of {wide} numbers, and the model's are of {width}; give a head that "
            f"was trained for this model, or train one: accel-compile train {source.format.method} MODEL"
        )


def _verifiers(head: Config) -> list[str]:
    """The architectures that a head of speculators' format names as its target's."""
    told: Any = head.get("speculators_config")
    verifier = told.get("verifier") if isinstance(told, dict) else None
    return class_names(verifier) if isinstance(verifier, dict) else []


def _family(architecture: str) -> str:
    """The name of an architecture without what its model is for."""
    return architecture.partition("For")[0].lower()


def _another(path: Path) -> str:
    """What to do where a draft model is not of the model's tokens."""
    bundled = path.resolve().is_relative_to(Path(str(files("accel.reference"))).resolve())
    own = "the bundled one is of the bundled model; " if bundled else ""
    return f"{own}set `path` to a model of the same tokens: an artifact, a Hugging Face directory or a GGUF file"


def _check_tokens(
    source: Source, target: Facts, tokenizer: Tokenizer | None, size: int | None
) -> None:
    path = source.path
    sides = ("the model", tokenizer), ("the draft model", source.has_tokenizer)
    lack = [who for who, there in sides if not there]
    if size not in (None, target.vocab_size) and lack:
        raise RecipeError(
            f"draft.model: {path} has {size} tokens and the model {target.vocab_size}, and {' and '.join(lack)} no "
            "tokenizer by which texts could go from one to the other; give one (tokenizer.json) to both, or "
            f"{_another(path)}"
        )
