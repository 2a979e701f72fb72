"""kv-float32, and what a recipe with weights in few bits stores the cache as that says nothing of it."""

import models
import pytest

import accel


def dtypes(name, recipe):
    made = accel.optimize(models.make(name, 2), recipe, max_context=64, target="eager")
    return {s.dtype for s in made.program.state if s.stored}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        ("base", "float32"),
        ("float16", "float32"),
        ("int8", "float16"),
        (["int8", "prompt-lookup"], "float16"),
        (["int8", "kv-float32"], "float32"),
        (["int8", "kv-float16"], "float16"),
        (["int8", "snapkv"], "float32"),
        (["int8", "continuous-batching"], "float16"),
    ],
)
def test_weights_in_few_bits_keep_halves_where_nothing_is_said_of_the_cache(recipe, dtype):
    assert dtypes("llama", recipe) == {dtype}


def test_a_model_without_a_cache_is_built():
    assert not dtypes("mamba", "int8")
