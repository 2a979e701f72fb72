"""Manifests that were changed by someone who recomputed the checksums: each is refused with an accel error, or the
model gives the tokens that it gave before.
"""

import json
import shutil

import pytest

from accel.ir.errors import AccelError
from accel.runtime.artifact.artifact import bind

from .conftest import Mutated, sealed, tokens, write

RECIPES = ["base", "int4", "evicts", "kv-int8", "draft", "diffusion"]


def attacked(source, folder, seeds, inner="", bound=False):
    """What mutations of the manifest do, by seed: "refused", "same", or what went wrong. `bound`: the graphs too are
    changed to go with it.
    """
    shutil.copytree(source, folder)
    file = folder / inner / "accel.json"
    raw, outer = json.loads(file.read_text()), json.loads((folder / "accel.json").read_text())
    want, found = tokens(folder), {}
    for seed in seeds:
        mutated = Mutated(raw, seed)
        if mutated.raw == raw:
            continue
        if inner:
            write(folder, outer)
        if bound:
            try:
                bind(file.parent, mutated.raw)
                write(file.parent, mutated.raw)
                sealed(file.parent)
            except (AccelError, KeyError, OSError, TypeError):
                continue  # no graphs to write into
        else:
            write(file.parent, mutated.raw)
        if inner:
            sealed(folder)
        try:
            got = tokens(folder)
            found[seed] = "same" if bound or got == want else f"{mutated}: {got}, not {want}"
        except AccelError:
            found[seed] = "refused"
        except Exception as error:
            found[seed] = f"{mutated}: {type(error).__name__}: {error}"
    return found


def wrong(found):
    return [each for each in found.values() if each not in ("refused", "same")]


@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_changed_manifest(artifact, tmp_path, recipe):
    found = attacked(artifact(recipe), tmp_path / "copy", range(60))
    assert wrong(found) == []
    assert list(found.values()).count("refused") > len(found) // 4, "the control: it changes things"


def test_a_changed_manifest_of_a_draft_model(artifact, tmp_path):
    found = attacked(artifact("draft"), tmp_path / "copy", range(40), "draft")
    assert wrong(found) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", ["kv-int8", "diffusion"])
def test_a_manifest_that_graphs_were_changed_to_go_with(artifact, tmp_path, recipe):
    """It is then another model, which may have other tokens: it runs, or is refused with an accel error."""
    found = attacked(artifact(recipe), tmp_path / "copy", range(60), bound=True)
    assert wrong(found) == [] and len(set(found.values())) == 2


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_five_hundred_manifests_that_graphs_go_with(artifact, tmp_path, recipe):
    assert wrong(attacked(artifact(recipe), tmp_path / "copy", range(500), bound=True)) == []


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_thousand_changed_manifests(artifact, tmp_path, recipe):
    assert wrong(attacked(artifact(recipe), tmp_path / "copy", range(1000, 2000))) == []
