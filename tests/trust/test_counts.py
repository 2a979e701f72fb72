"""A count that a caller gives is refused, or the work ends: no option hangs, fills the memory, or meets a traceback."""

import dataclasses
import sys

import models
import numpy as np
import pytest

import accel
from accel.compiler.build_options import MOST, BuildOptions
from accel.compiler.explain.explain import explain
from accel.ir.axis import WHOLE, find_axes, ranges
from accel.ir.errors import AccelError, InputError, RecipeError, shown
from accel.ir.recipe import Recipe, bundled
from accel.ir.tables import Tables
from accel.lowering.onnx.threads import MOST_THREADS, default_threads
from accel.passes.trained import Trained
from accel.runtime.inputs.infill import FORMS
from accel.runtime.inputs.prompts import LONGEST_STOP, MOST_STOPS
from accel.runtime.loop import Base

from ..diffusion_case import Filler

AXES = find_axes()
LARGE, HUGE = 10**9, (2**63, 2**70, 10**5000)
PROMPT = [5, 6, 7, 8] * 8
SIZES = {"max_context": 64, "max_batch": 4, "verify": False}


def counts(method):
    """Its options that count: name -> the most that is declared, or what any takes."""
    return {
        f.name: largest(ranges(method)[f.name])
        for f in dataclasses.fields(method)
        if type(f.default) is int and f.init
    }


def largest(allowed):
    """The most that a range lets pass."""
    if allowed is not None and allowed.one_of:
        return max(allowed.one_of)
    return WHOLE if allowed is None or allowed.most is None else allowed.most


OPTIONS = [
    (axis, use, option, most)
    for axis in AXES
    for use in AXES[axis].names()
    for option, most in counts(AXES[axis].method(use)).items()
]
BUILT = [  # a trained part fits no random model
    (axis, use, option, most)
    for axis, use, option, most in OPTIONS
    if not issubclass(kind := AXES[axis].method(use), Trained | Tables)
    and not hasattr(kind, "trained")
]
SAMPLED = ("beams", "followers", "drafts", "blocks")


def named(value):
    return value if isinstance(value, str) else shown(value)


def test_there_are_options():
    assert len(OPTIONS) > 40 and sum(most < WHOLE for *_, most in OPTIONS) > 15


@pytest.mark.parametrize(("axis", "use", "option", "most"), OPTIONS, ids=named)
def test_a_count_beyond_its_limit_is_refused(axis, use, option, most):
    for value in (most + 1, *HUGE):
        with pytest.raises(RecipeError) as refusal:
            AXES[axis].build(use, **{option: value})
        for part in (f"{axis}.{use}: {option} ", shown(value), str(most)):
            assert part in str(refusal.value)


@pytest.fixture
def memory():
    """No more than 12 GiB of addresses, so that what fills the memory fails here and nowhere else."""
    if not sys.platform.startswith("linux"):
        pytest.skip("a limit of memory that is tried on Linux only")
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """An artifact that drafts for the model of the tests."""
    folder = tmp_path_factory.mktemp("draft") / "artifact"
    accel.optimize(models.llama(), "token-recycling", out=folder, **SIZES).close()  # trees, too
    return folder


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """An artifact of a causal model with the tokens of the one that fills masks."""
    folder = tmp_path_factory.mktemp("second") / "artifact"
    accel.optimize(Filler(False, causal=True), out=folder, **SIZES).close()
    return folder


def tables(axis, use, request):
    """The smallest bundled recipe of a method, or what it needs beside it; sizes small."""
    needs = {
        "length": {"draft": "prompt-lookup"}, "verify": {"draft": "prompt-lookup"},
        "tree": {"draft": "token-recycling"}, "kv.when": {"kv.score": "knorm"},
        "kv.keep": {"kv.score": "knorm"}, "kv.refine": {"kv.score": "knorm"},
    }  # fmt: skip
    recipes = [Recipe.load(name).tables for name in bundled()]
    own = [t for t in recipes if t.get(axis, {}).get("use") == use]
    other = {a: {"use": u} for a, u in needs.get(axis, {}).items()}
    found = dict(min(own, key=len)) if own else {**other, axis: {"use": use}}
    if "kv.score" in found:
        found.setdefault("kv.budget", {"use": "uniform"})
    if use == "layerskip":
        found["depth"] = {"use": "by-call"}
    found = {a: {**t, **AXES[a].small(t["use"])} for a, t in found.items()}
    if found.get("draft", {}).get("use") == "model":
        fills = (
            AXES["loop"].method(found.get("loop", {"use": "speculative"})["use"]).masked_diffusion
        )
        found["draft"]["path"] = str(request.getfixturevalue("second" if fills else "draft"))
    return found


def generated(recipe):
    """Build and generate: greedy, sampled, and two rows at once."""
    loop = recipe.get("loop", {"use": "autoregressive"})["use"]
    module = Filler(False) if AXES["loop"].method(loop).masked_diffusion else None
    prompt = PROMPT[:9] if module else PROMPT
    spells = AXES["loop"].method(loop).check is not Base.check  # its tokenizer has to
    text = {"tokenizer": text_tokenizer()} if spells else {}
    with accel.optimize(module or models.llama(), recipe, **SIZES, **text) as compiled:
        compiled.generate([prompt], max_new_tokens=8)
        compiled.generate([prompt[:7], prompt], max_new_tokens=8)
        if not module and not getattr(AXES["loop"].method(loop), "searches", False):
            compiled.generate([prompt], max_new_tokens=8, temperature=0.9, seed=1)


CASES = [
    pytest.param(
        axis, use, option, min(most, LARGE), marks=() if option in SAMPLED else pytest.mark.long,
        id=f"{axis}-{use}-{option}",
    )
    for axis, use, option, most in BUILT
]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("axis", "use", "option", "value"), CASES)
def test_the_largest_count_ends(axis, use, option, value, memory, request):
    recipe = tables(axis, use, request)
    recipe[axis][option] = value
    try:
        generated(recipe)
    except AccelError as refusal:
        assert option in str(refusal)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("axis", "use"), dict.fromkeys(o[:2] for o in BUILT))
def test_all_counts_at_their_largest_together_end(axis, use, memory, request):
    recipe = tables(axis, use, request)
    recipe[axis] |= {o: min(m, LARGE) for o, m in counts(AXES[axis].method(use)).items()}
    try:
        generated(recipe)
    except AccelError:
        pass


def test_a_tree_has_so_many_nodes():
    chain = [[0] * depth for depth in range(1, 1000)]
    with pytest.raises(RecipeError, match="999 paths .* at most 512"):
        AXES["tree"].build("static", paths=chain)
    assert len(AXES["tree"].build("static", paths=chain[:512]).paths) == 512


# Builds and loads


@pytest.mark.parametrize("name", MOST)
def test_sizes_of_a_build_have_a_limit(name):
    for value in (MOST[name] + 1, *HUGE):
        with pytest.raises(RecipeError, match=f"{name} is .*{MOST[name]}"):
            BuildOptions(**{name: value})
    with pytest.raises(RecipeError, match="max_context is"):
        explain("base", models.tiny(), max_context=2**70)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_largest_sizes_build(memory):
    most = {name: size for name, size in MOST.items() if name != "threads"}
    with accel.optimize(models.tiny(), verify=False, **most) as compiled:
        assert len(compiled.generate([[1, 2]] * 3, max_new_tokens=2).tokens) == 3


def test_threads_have_a_limit(build, monkeypatch):
    path = build("llama").compiled.artifact.path
    for value in (MOST_THREADS + 1, *HUGE):
        with pytest.raises(InputError, match=f"threads = .* from 1 to {MOST_THREADS}"):
            accel.load(path, threads=value)
    for text in ("1000000000", "9" * 5000):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert default_threads() <= MOST_THREADS


# Requests


@pytest.mark.timeout(300)
@pytest.mark.parametrize("value", [LARGE, *HUGE], ids=shown)
def test_a_request_of_any_size_ends_at_the_context(value, build, memory):
    model = build("llama").compiled
    room = model.facts.max_context
    (row,) = model.generate([PROMPT], max_new_tokens=value, eos=[]).tokens
    assert len(row) == room - len(PROMPT) + 1 or len(row) == room - len(PROMPT)
    options = {"top_k": value, "temperature": 1.0, "seed": value}
    assert len(model.generate([PROMPT], 2, **options).tokens[0]) <= 2
    with pytest.raises(InputError, match="batch"):
        model.session(batch=value)
    with pytest.raises(InputError):
        model.generate([[value]], 2)
    with pytest.raises(InputError):
        model.generate([PROMPT], 2, eos=[value])


@pytest.mark.parametrize("value", [LARGE, *HUGE], ids=shown)
def test_a_session_refuses_any_size(value, build):
    with build("llama").compiled.session(2) as session:
        session.run([PROMPT[:5]] * 2)
        calls = {
            "run": lambda: session.run([[value], [1]]),
            "lengths": lambda: session.run([[1], [1]], lengths=[value, 1]),
            "rewind": lambda: session.rewind(value),
            "select": lambda: session.select([value, 0]),
            "edit": lambda: session.edit(value, value + 1, [1]),
            "edit to": lambda: session.edit(0, value, [1]),
            "edit row": lambda: session.edit(0, 1, [1], row=value),
            "write": lambda: session.write([[1], [1]], value),
            "guess": lambda: session.guess([[1], [1]], np.zeros((1, 1), bool), lengths=[value, 1]),
        }
        for name, call in calls.items():
            with pytest.raises(InputError):
                call()
                pytest.fail(f"{name} took {shown(value)}")
        assert session.lengths.tolist() == [5, 5]


@pytest.mark.long
def test_stop_strings_are_few_and_short():
    with accel.optimize(
        models.llama(), tokenizer=text_tokenizer(), target="eager", verify=False
    ) as model:
        for stop in (["x"] * (MOST_STOPS + 1), ["x" * (LONGEST_STOP + 1)], "x" * 10**7):
            with pytest.raises(InputError, match=f"at most {MOST_STOPS}.*{LONGEST_STOP}"):
                model.generate([PROMPT], 2, stop=stop)
        most = [f"{i:02}" + "a" * (LONGEST_STOP - 2) for i in range(MOST_STOPS)]
        assert model.generate([PROMPT], 2, stop=most).tokens


def text_tokenizer():
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds

    vocabulary = {f"w{i}": i for i in range(98)}
    vocabulary |= {name: 98 + i for i, name in enumerate(FORMS[1].marks)}
    tokenizer = Tokenizer(kinds.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer
