"""What no caller should give: each is one accel error that names the thing and the next act, and the model goes on."""

import sys

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, save

import accel
from accel.ir.errors import AccelError, ArtifactError, OutOfMemoryError
from accel.ir.recipe import Recipe
from accel.lowering.onnx.ort import ort
from accel.runtime.backends.onnx.open import _Session
from accel.runtime.decode.sampling_params import SamplingParams

HUGE = 10**400
CALLS = {
    "no tokens": (lambda m: m.session().run([[]]), "takes \\[1, T\\] with T >= 1"),
    "an empty list to stream": (lambda m: m.stream([]), "give text, token ids"),
    "an empty list": (lambda m: m.generate([]), "give text, token ids"),
    "an empty text": (lambda m: m.generate(""), "give at least one token"),
    "bytes": (lambda m: m.generate(b"abc"), "are bytes; give text"),
    "a lone surrogate": (lambda m: m.generate("a\ud800b"), "U\\+D800\\) at place 1"),
    "a temperature beyond floats": (lambda m: m.generate("a", temperature=HUGE), "temperature"),
    "a top_p beyond floats": (lambda m: m.generate("a", temperature=1.0, top_p=HUGE), "top_p"),
    "a temperature of 5000 digits": (
        lambda m: m.generate("a", temperature=10**5000),
        "temperature = a number of 16610 bits",
    ),
    "a stop of two lines": (lambda m: m.generate("a", stop=["a\nb", 3]), "give a non-empty string"),
    "a logit bias beyond floats": (
        lambda m: m.generate("a", logit_bias={3: 10**400}),
        "give a number",
    ),
    "a penalty beyond float32": (
        lambda m: m.generate("a", repetition_penalty=1e-60),
        "from 1e-9 to 1e9",
    ),
    "a sparse tensor": (lambda m: m.generate(torch.zeros(2, 2).to_sparse()), "gives no values"),
    "an array for a switch": (
        lambda m: SamplingParams(ignore_eos=np.zeros(2)),
        "give True or False",
    ),
    "an array beside params": (
        lambda m: m.generate("a", stop=np.zeros(2), sampling_params=SamplingParams()),
        "put all into",
    ),
    "too many threads": (lambda m: accel.load(m.artifact.path, threads=10**11), "from 1 to 1024"),
    "no path": (lambda m: accel.load(None), "None is a NoneType, not a path"),
    "no session that joins": (lambda m: m.session().join(None), "give another session"),
    "no threads": (lambda m: m.session().spread(0), "threads = 0"),
    "threads in words": (lambda m: m.session().spread("two"), "threads = 'two'"),
    "a negative seed": (lambda m: m.generate("a", seed=-1), "seed = -1"),
    "a token beyond all": (lambda m: m.generate([10**30]), "give token ids"),
    "an end beyond all": (lambda m: m.generate("a", eos=[10**30]), "give token ids"),
    "no kernels": (lambda m: accel.load(m.artifact.path, kernels=None), "kernels = None: give one"),
    "array of kernels": (
        lambda m: accel.load(m.artifact.path, kernels=np.array([5.0, 2.0])),
        "kernels = array",
    ),
    "NUL in an artifact's path": (lambda m: accel.load("a\0b"), "NUL character"),
    "NUL in an output's path": (lambda m: m.save("a\0b"), "NUL character"),
    "NUL in a recipe's path": (lambda m: Recipe.load("./a\0.toml"), "cannot be read as a recipe"),
    "a path too long": (lambda m: accel.load("x" * 5000), "give a shorter one"),
    "an output's name too long": (lambda m: m.save("x" * 5000), "give a shorter one"),
    "an unknown user": (lambda m: accel.load("~no-such-user/x"), "no such user"),
    "an unknown user's output": (lambda m: m.save("~no-such-user/x"), "no such user"),
}
TEXTS = {
    "a number of 5000 digits": (
        "[kv.score]\nuse = 'snapkv'\nwindow = " + "9" * 5000,
        "not valid TOML",
    ),
    "lists in lists": ("a = " + "[" * 5000 + "]" * 5000, "lie too deep"),
    "NUL": ("a = '\0'", "not valid TOML"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_is_an_error_with_the_next_act(toy, name):
    call, told = CALLS[name]
    with accel.load(toy.path) as model:
        want = model.generate([3, 4], max_new_tokens=4).tokens
        with pytest.raises(AccelError, match=told) as error:
            call(model)
        assert "\n" not in str(error.value)
        assert model.generate([3, 4], max_new_tokens=4).tokens == want


@pytest.mark.skipif(sys.platform == "win32", reason="NUL in a file")
@pytest.mark.parametrize("name", TEXTS)
def test_a_bad_recipe_is_an_error_with_its_place(tmp_path, name):
    text, told = TEXTS[name]
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(AccelError, match=told) as error:
        Recipe.load(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_a_call_that_memory_is_too_small_for(tmp_path):
    """onnxruntime's arena, and C++ where there is none: a MemoryError; what else it says is not."""
    graph = helper.make_graph(
        [helper.make_node("Expand", ["x", "s"], ["y"])], "g",
        [helper.make_tensor_value_info(name, kind, size)
         for name, kind, size in (("x", TensorProto.FLOAT, [2]), ("s", TensorProto.INT64, [2]))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "m"])],
    )  # fmt: skip
    file = tmp_path / "graph.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    for arena in (True, False):
        options = ort.SessionOptions()
        options.log_severity_level, options.enable_cpu_mem_arena = 4, arena
        session = _Session(file, options)
        for shape, kind in (([2**45, 2], OutOfMemoryError), ([2, 3], ArtifactError)):
            with pytest.raises(AccelError) as error:
                session.run(None, {"x": np.ones(2, np.float32), "s": np.array(shape)})
            assert type(error.value) is kind and "\n" not in str(error.value)
