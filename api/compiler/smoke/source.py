"""What `smoke` is given, as a small model: a directory, a configuration, a type's name, a module."""

from __future__ import annotations

import copy
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.compiler.load.config import auto_class, check_type
from accel.compiler.load.source import open_source
from accel.compiler.smoke.clone import clone
from accel.compiler.smoke.tiny_models import randomise, seeded, small_config, written_out
from accel.ir.capture.inspect import inspect
from accel.ir.errors import CaptureError, unknown


@dataclass(frozen=True)
class Source:
    """A model in eval mode, what to call it, its layers (0: not told), and what to say of it."""

    name: str
    model: nn.Module
    layers: int = 0
    notes: list[str] = field(default_factory=list)


def small_model(model: Any, trust_remote_code: bool = False) -> Source:
    """The small random-weight model that stands for what was given.

    Raises:
        CaptureError: there is no such model, or no small one can be made of it.
    """
    if isinstance(model, nn.Module) and inspect(model).hugging_face:
        return _cloned(model.config, type(model))
    if isinstance(model, nn.Module):
        return _as_it_is(model, type(model).__name__)
    if hasattr(model, "to_diff_dict"):
        check_type(model.model_type, type(model).__name__, model.to_dict())
        return _cloned(model)
    if not isinstance(model, (str, Path)):
        raise CaptureError(
            f"cannot make a small model of a {type(model).__name__}; give a model directory, a config.json, "
            "a transformers configuration or model type, package.module:callable, or an nn.Module"
        )
    path = Path(model)
    if path.exists():
        config = open_source(path).config(trust_remote_code)  # its weights are not read
        return _cloned(config, trust_remote_code=trust_remote_code)
    name = str(model)
    if ":" in name:
        return _as_it_is(_called(name), name)
    if (
        isinstance(model, Path)
        and len(path.parts) > 1
        or "/" in name
        or name.endswith((".json", ".gguf"))
    ):
        raise CaptureError(f"{model} does not exist; give a directory with a config.json")
    return _of_type(name)


def _cloned(config: Any, make: Any = None, trust_remote_code: bool = False) -> Source:
    """The clone of a configuration, by `make`, or else by transformers' class with an output head."""

    def made(small: Any) -> nn.Module:
        return of_config(small, trust_remote_code)

    found = clone(config, make or made)
    return _source(type(found.model).__name__, found.model, found.notes)


def _of_type(name: str) -> Source:
    """A model type of transformers in its default form."""
    check_type(name, "model type")
    with seeded():
        model = of_config(small_config(name))
    return _source(name, written_out(randomise(model, name)), [])


def of_config(config: Any, trust_remote_code: bool = False) -> nn.Module:
    """The language model that transformers makes of a configuration, with new weights."""
    given = {"trust_remote_code": True} if trust_remote_code else {}
    auto = auto_class(config.to_dict())
    try:
        model = auto.from_config(config, **given)
    except AttributeError:  # a configuration of several parts, of which the class takes the text's
        model = auto.from_config(config.get_text_config(), **given)
    assert isinstance(model, nn.Module)
    return model


def _source(name: str, model: nn.Module, notes: list[str]) -> Source:
    config: Any = model.config
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    return Source(name, model.eval(), layers if isinstance(layers, int) else 0, notes)


def _as_it_is(model: nn.Module, name: str) -> Source:
    notes = ["used unchanged: its own sizes and weights"]
    if any(p.is_floating_point() and p.dtype is not torch.float32 for p in model.parameters()):
        model = copy.deepcopy(model).float()
        notes.append("compared in float32, in which accel computes")
    return Source(name, model.eval(), notes=notes)


def _called(reference: str) -> nn.Module:
    """The module that `package.module:callable` returns; the working folder's modules are found too."""
    place, _, name = reference.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(place)
    except Exception as error:
        raise CaptureError(
            f"{reference}: importing {place} failed: {type(error).__name__}: {error}; give "
            "package.module:callable of an importable module"
        ) from error
    finally:
        sys.path.remove(here)
    if not hasattr(module, name):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise CaptureError(f"{reference}: {unknown(f'in {place}, a callable', name, known)}")
    made = getattr(module, name)
    if callable(made) and not isinstance(made, nn.Module):
        try:
            made = made()
        except Exception as error:
            raise CaptureError(
                f"{reference}: the call failed: {type(error).__name__}: {error}; it must take no arguments"
            ) from error
    if not isinstance(made, nn.Module):
        raise CaptureError(
            f"{reference} returned a {type(made).__name__}, not an nn.Module; give a callable that returns one"
        )
    return made
