"""Small real artifacts, of which tests damage copies."""

import functools

import models
import pytest

import accel


@pytest.fixture(scope="session")
def artifact(tmp_path_factory):
    """artifact(recipe) -> the folder of a small Llama's build by it, made once; nobody may change it."""
    folder = tmp_path_factory.mktemp("trust")

    @functools.cache
    def get(recipe):
        layers, models.LAYERS = models.LAYERS, 2
        try:
            model = models.llama()
        finally:
            models.LAYERS = layers
        draft = {"draft": {"use": "model", "path": str(get("base"))}} if recipe == "draft" else None
        out = folder / recipe
        accel.optimize(model, draft or recipe, out=out, max_context=64, verify=False).close()
        return out

    return get
