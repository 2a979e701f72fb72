"""Sessions that are saved and opened: whatever a recipe keeps, they give the bits of the session that went on. Files
that are not whole, or are another model's, are refused.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from typer.testing import CliRunner

import accel
from accel import cli
from accel.compiler.smoke.tiny_models import small_model
from accel.ir.errors import AccelError, ArtifactError, InputError, SavedSessionError
from accel.ir.facts import Facts
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.model.compiled import CompiledModel
from accel.runtime.model.requests import prompt_behind
from accel.runtime.rows import declared
from accel.runtime.session import file as session_file
from accel.runtime.session.core import SessionCore
from accel.runtime.session.observers import observer_classes
from accel.runtime.session.state._marks import Marks

from .diffusion_case import LONGEST, MASK, Filler
from .kv_case import evicting
from .laws.test_invariants import METHODS, tables
from .prefill_case import built
from .runtime.test_rows import growing
from .test_encoder_decoder import make
from .test_session_capabilities import CASES
from .trust.conftest import Mutated

MORE = {  # recipes whose sessions know what those of CASES do not
    "clusterkv": tables("kv.select=clusterkv"),
    "sentencekv": tables("kv.select=sentencekv"),
    "tokenselect": tables("kv.select=tokenselect"),
    "shadowkv": tables("kv.select=shadowkv"),
    "laq": tables("kv.score=laq"),
    "window": tables("window=newest"),
}
OTHERS = ["mamba", "falcon_h1", "filler", "t5"]  # kinds of models
RECIPES = {**{name: case for name, (case, _) in CASES.items() if name not in OTHERS}, **MORE}
NAMES = [*RECIPES, *OTHERS]
LIKE_OTHERS = {  # whose sessions know the same as those of other names
    *("snapkv", "snapkv-chunk", "snapkv-every", "kv-int8", "unified-skip", "sentencekv"),
    "falcon_h1",
}
TOKENS = np.random.default_rng(7).integers(3, MASK, (2, 70))


@pytest.fixture(scope="module")
def model(stateful):
    """model(name) -> a model of a recipe or of a kind, on the eager target; made once."""
    made = {}

    def get(name):
        if name in made:
            return made[name]
        if name == "filler":
            loop = {
                "loop": {"use": "dllm-threshold", "block": 8, "threshold": 0.5},
                "canvas": {"use": "dllm-blockcache"},
            }
            found = accel.optimize(
                Filler(True).eval(), loop, target="eager", max_context=LONGEST, max_batch=2
            )
        elif name == "t5":
            found = accel.optimize(make("t5"), target="eager", max_context=64, max_batch=2)
        elif name in OTHERS:
            case = evicting(stateful(name), CASES[name][0]) if CASES[name][0] else None
            program = stateful(name) if case is None else case.program
            recipe = {"name": name, "tables": {} if case is None else case.tables}
            program.facts.max_batch = 2
            found = CompiledModel(
                EagerBackend(program), program.facts, recipe=recipe, weights=lambda: ""
            )
        else:
            found = built("mistral" if name == "window" else "llama", tables=RECIPES[name])
        return made.setdefault(name, found)

    return get


def begun(model, lengths=(40, 33)):
    """A session of two rows that holds prompts, was decoded from, and taken back where it can be."""
    session = model.session(2)
    if model.facts.encoder is not None:
        session.encode(TOKENS[:, :9])
    session.prompt(TOKENS[:, :40], lengths)
    for i in range(40, 45):
        session.run(TOKENS[:, [i]])
    try:
        session.rewind(session.lengths - 2)
    except InputError:
        assert session.capabilities.back == 0
    return session


def went_on(session):
    """Logits of more tokens: single ones, several, another prompt, other rows; and what is kept after a rewind."""
    out = [session.run(TOKENS[:, [i]]) for i in range(45, 48)]
    out.append(session.run(TOKENS[:, 48:52]))
    out.append(session.prompt(TOKENS[:, 52:60], [8, 5]))
    session.select([1, 0])
    out.append(session.run(TOKENS[:, [60]]))
    low = np.maximum(session.held_from, session.lengths - 2)
    if session.capabilities.back != 0:
        session.rewind(low)
        out.append(session.run(TOKENS[:, [61]]))
    return out


def law(model, path):
    """Bit for bit; and that a file was written changes nothing."""
    with begun(model) as session, session.fork() as untouched:
        session.save(path)
        with model.open_session(path) as opened:
            assert opened.lengths.tolist() == session.lengths.tolist()
            assert opened.capabilities == session.capabilities
            assert opened.held_from.tolist() == session.held_from.tolist()
            runs = [went_on(one) for one in (untouched, session, opened)]
    for want, same, got in zip(*runs, strict=True):
        assert np.array_equal(want, same), "a session that was saved goes on otherwise"
        assert np.array_equal(want, got), "the opened session differs"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in LIKE_OTHERS else ()) for n in NAMES]
)
def test_an_opened_session_goes_on_as_the_saved_one(model, name, tmp_path):
    law(model(name), tmp_path / "one.session")


@pytest.mark.long
@pytest.mark.parametrize(("axis", "use"), [one for one in METHODS if one[0] != "kv.file"])
def test_sessions_of_every_method(axis, use, tmp_path):
    law(built("llama", tables=tables(f"{axis}={use}")), tmp_path / "one.session")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["snapkv", "kivi-4", "quest", "promptdistill", "paged-prefix", "calm"]
)
def test_sessions_on_onnx(name, tmp_path):
    law(built("llama", "onnx", RECIPES[name]), tmp_path / "one.session")


def test_recurrent_state_on_onnx(tmp_path):
    """Its buffers change places from call to call, and are written."""
    with accel.optimize(small_model("mamba"), max_context=128, max_batch=2, verify=False) as mamba:
        law(mamba, tmp_path / "one.session")


@pytest.mark.long
def test_every_observer_is_saved(model):
    """Those of no case have nothing to know."""
    names = [name for name in NAMES if name not in LIKE_OTHERS]
    seen = {type(one) for name in names for one in model(name).session(2)._core.observers}
    unseen = {
        kind.__name__ for kind in set(observer_classes()) - seen if declared(kind) != ({}, [])
    }
    assert not unseen


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "kind"), [("h2o", "EvictionState"), ("kivi-4", "BlockCodecState"), ("mamba", "RecurrentHistory"),
                       ("paged-prefix", "PrefixCache"), ("promptdistill", "PromptPruning"),
                       ("clusterkv", "UnitGroups")],
)  # fmt: skip
def test_the_law_catches_an_observer_that_forgets(model, name, kind, tmp_path, monkeypatch):
    (cls,) = (cls for cls in observer_classes() if cls.__name__ == kind)
    monkeypatch.setattr(cls, "restore", lambda self, backend, numbers, lengths: None)
    with pytest.raises((AssertionError, IndexError, ValueError, RuntimeError, AccelError)):
        law(model(name), tmp_path / "one.session")


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "one.session"
    with begun(model("base")) as session:
        session.save(path, tokens=[TOKENS[0, :43], TOKENS[1, :36]])
    return path


def test_the_file_is_as_long_as_its_tokens(model, saved):
    """Slots that no token uses are not in it; tokens are."""
    with model("base").open_session(saved) as opened:
        assert [row.tolist() for row in opened.tokens] == [
            TOKENS[0, :43].tolist(),
            TOKENS[1, :36].tolist(),
        ]
        held = opened.stats["kv_bytes"] * int(opened.lengths.max()) // 256
    assert held < saved.stat().st_size < held + 8000
    assert os.listdir(saved.parent) == [saved.name]


def test_a_changed_byte_anywhere_is_refused(model, saved, tmp_path):
    data, copy = saved.read_bytes(), tmp_path / "copy"
    size = int.from_bytes(data[:8], "little")
    places = [
        0,
        8,
        40,
        size // 2,
        8 + size - 1,
        8 + size,
        (8 + size + len(data)) // 2,
        len(data) - 1,
    ]
    for place in places:
        copy.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(SavedSessionError, match="copy"):
            model("base").open_session(copy)


def test_a_cut_or_foreign_file_is_refused(model, saved, tmp_path):
    data, copy = saved.read_bytes(), tmp_path / "copy"
    for part in (b"", data[:4], data[:500], data[:-1], data + b"0", b"a text of mine"):
        copy.write_bytes(part)
        with pytest.raises(SavedSessionError, match="is no saved session, or was cut or damaged"):
            model("base").open_session(copy)
    with pytest.raises(SavedSessionError, match="does not exist"):
        model("base").open_session(tmp_path / "none")
    with pytest.raises(SavedSessionError, match="is a folder"):
        model("base").open_session(tmp_path)


def rewritten(path, out, change=lambda told: None, drop=()):
    """A file whose header says something else, with the right digest."""
    with safe_open(path, framework="np") as file:
        told = json.loads(file.metadata()["accel.session"])
        arrays = {name: file.get_tensor(name) for name in file.keys() if name not in drop}
    change(told)
    told["digest"] = session_file.digest(told)
    save_file(arrays, out, {"accel.session": json.dumps(told)})
    return out


def test_a_missing_buffer_is_refused(model, saved, tmp_path):
    copy = rewritten(saved, tmp_path / "copy", drop=["state/kv.1.k"])
    with pytest.raises(SavedSessionError, match="state/kv.1.k is missing"):
        model("base").open_session(copy)
    assert model("base").open_session(rewritten(saved, copy)).length == [43, 36]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format 2 is not 1"),
        ({"tables": "0"}, "is of recipe .*open it with the model that saved it"),
        ({"layout": "0"}, "a cache of another layout"),
        ({"weights": "0"}, "is of another model than"),
        ({"lengths": [43] * 9}, "has 9 rows, and max_batch is 3"),
        ({"lengths": [43, 999]}, "has a row of 999 tokens, and max_context is 128"),
    ],
)
def test_what_does_not_fit_is_refused(model, saved, tmp_path, change, words):
    copy = rewritten(saved, tmp_path / "copy", lambda told: told.update(change))
    with pytest.raises(SavedSessionError, match=words):
        model("base").open_session(copy)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["base", "snapkv"])
def test_whatever_a_header_says_is_an_error_or_a_session(model, name, tmp_path):
    """With the right digest, as somebody can write it."""
    path, refused = tmp_path / "one.session", 0
    with begun(model(name)) as session:
        session.save(path, tokens=[TOKENS[row, :n] for row, n in enumerate(session.lengths)])
    for seed in range(120):

        def change(told, seed=seed):
            changed = Mutated(told, seed, leave=("digest", "arrays")).raw
            told.clear()
            told.update(changed)

        try:
            with model(name).open_session(rewritten(path, tmp_path / "copy", change)) as opened:
                opened.run(TOKENS[: opened.batch, [40]])
        except (SavedSessionError, InputError) as error:
            assert "\n" not in str(error)
            refused += 1
    assert 60 < refused < 120  # the control: some changes do not matter


def test_another_model_is_refused(model, saved):
    with pytest.raises(SavedSessionError, match="is of recipe"):
        model("snapkv").open_session(saved)
    other = built("qwen2")
    with pytest.raises(SavedSessionError, match="another layout|another model"):
        other.open_session(saved)


def test_a_full_disk_leaves_the_file_and_the_session(model, saved, tmp_path):
    copy = tmp_path / "one.session"
    copy.write_bytes(saved.read_bytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with begun(model("base")) as session, session.fork() as untouched:
        session.run(TOKENS[:, 30:34])
        untouched.run(TOKENS[:, 30:34])
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(SavedSessionError, match="cannot be written .* free some space"):
                session.save(copy)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert os.listdir(tmp_path) == [copy.name] and copy.read_bytes() == saved.read_bytes()
        assert np.array_equal(session.run(TOKENS[:, [40]]), untouched.run(TOKENS[:, [40]]))
        session.save(copy)
        with model("base").open_session(copy) as opened:
            assert opened.lengths.tolist() == session.lengths.tolist()


def test_a_file_of_others_is_not_replaced(model, tmp_path):
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    with (
        begun(model("base")) as session,
        pytest.raises(SavedSessionError, match="is no saved session"),
    ):
        session.save(mine)
    assert mine.read_text() == "mine"


def test_a_path_that_the_user_may_not_see_is_named(model, tmp_path, monkeypatch):
    def locked(path):
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("is_file", "is_dir"):
        monkeypatch.setattr(Path, name, locked)
    with pytest.raises(SavedSessionError, match="one.session cannot be looked at .Permission"):
        model("base").open_session(tmp_path / "one.session")
    with pytest.raises(ArtifactError, match="artifact cannot be looked into .Permission denied"):
        accel.load(tmp_path / "artifact")


def test_tokens_that_are_not_of_the_rows_are_refused(model, tmp_path):
    with model("base").session() as session:
        session.run(TOKENS[:1, :3])
        for tokens in ([[5], [6, 7]], 5, "ab", [], [[[5]]], [5, [6]]):
            with pytest.raises(InputError, match="token ids .n. of each row, 1 of them"):
                session.save(tmp_path / "one.session", tokens)
        for tokens in ([5, 6, 7], [[5, 6, 7]], np.array([5, 6, 7]), torch.tensor([5, 6, 7])):
            session.save(tmp_path / "one.session", tokens)
            with model("base").open_session(tmp_path / "one.session") as opened:
                assert opened.tokens[0].tolist() == [5, 6, 7]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """The bundled model on ONNX Runtime."""
    folder = tmp_path_factory.mktemp("bundled")
    reference = Path(accel.__file__).parent / "reference"
    accel.optimize(
        str(reference), max_context=256, max_batch=2, out=folder / "artifact", verify=False
    ).close()
    return folder / "artifact"


@pytest.mark.long
def test_a_prompt_is_computed_once(artifact, tmp_path):
    """In another process' model: the tokens of the whole prompt, of which only the question runs."""
    system, question = "def add(a, b):\n    return a + b\n" * 4, "def sub("
    path = tmp_path / "system.session"
    with accel.load(artifact) as model, model.prompt_session(system) as session:
        session.save(path)
    with accel.load(artifact) as model, model.open_session(path) as session:
        whole = [*session.tokens[0].tolist(), *model.tokenizer.encode(question, special=False)]
        want = model.generate(whole, 12, eos=[])
        for _ in range(2):  # a fork leaves the opened one as it was
            with session.fork() as fork:
                stream = model.stream(question, 12, eos=[], session=fork)
                text = "".join(stream)
                assert stream.tokens == want.tokens[0] and text == want.text[0]
                assert fork.stats["tokens"] < session.length
        law(model, tmp_path / "law.session")
        session.run([[5]])
        with pytest.raises(InputError, match="has run others since"):
            model.stream(question, session=session)


@pytest.mark.long
def test_the_command_line_saves_and_goes_on(artifact, tmp_path):
    path = tmp_path / "one.session"
    system, rest = "import os\nimport", " sys\n"

    def run(*words):
        done = CliRunner().invoke(cli.app, ["run", str(artifact), *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert run("--prompt", system, "--save-session", str(path)) == ""
    got = json.loads(run("--prompt", rest, "--session", str(path), "--max-tokens", "6", "--json"))
    with accel.load(artifact) as model:
        ids = [*model.tokenizer.encode(system), *model.tokenizer.encode(rest, special=False)]
        assert got["tokens"] == model.generate(ids, 6).tokens[0]
    assert run("--prompt", rest, "--session", str(path), "--max-tokens", "6") == got["text"] + "\n"


KILLED = """
import os, sys
import numpy as np
from accel.runtime.session import file
save_file = file.save_file

def dies(arrays, path, metadata):
    save_file(arrays, path, metadata)
    os.truncate(path, os.path.getsize(path) // 2)
    os._exit(9)

file.save_file = dies
file.write(sys.argv[1], {}, {"x": np.ones(1000)})
"""


def test_a_process_that_dies_leaves_the_old_file(model, saved, tmp_path):
    """The next one that saves there removes what it left."""
    copy = tmp_path / "one.session"
    copy.write_bytes(saved.read_bytes())
    died = subprocess.run([sys.executable, "-c", KILLED, str(copy)])
    assert died.returncode == 9 and copy.read_bytes() == saved.read_bytes()
    assert len(os.listdir(tmp_path)) == 2
    with model("base").open_session(copy) as opened:
        opened.save(copy)
    assert os.listdir(tmp_path) == [copy.name]


def test_no_prompt_behind_a_session_is_named():
    session = SimpleNamespace(tokens=[np.array([3, 4])], length=2)
    letters = SimpleNamespace(encode=lambda text, special: [5] * len(text))
    assert prompt_behind(session, "ab", None, Facts("toy", 8, 64), letters).tolist() == [3, 4, 5, 5]
    with pytest.raises(InputError, match="the prompt is empty"):
        prompt_behind(session, "", None, Facts("toy", 8, 64), letters)


def test_marks_of_the_next_call_are_saved():
    marks = Marks.new(2).coming([[0, 1, 1], [2, -1, -1]], [2, -1], [3, 1])
    again = (
        Marks.new(2).restored(marks.numbers()).begun(growing(np.array([4, 4]), np.array([7, 5])))
    )
    assert again.units[:, 4:].tolist() == [[0, 1, 1], [2, -1, -1]]
    assert (
        again.question.tolist() == [6, -1] and Marks.new(2).restored(again.numbers()).next is None
    )
    with pytest.raises(InputError, match="3 tokens of row 0 are marked, but the call has 1"):
        Marks.new(2).restored(marks.numbers()).begun(growing(np.array([4, 4]), np.array([5, 5])))


# Rows


def law_of_rows(model):
    """A row that is exported goes on as a session of it does, bit for bit, and changes nothing where it was."""
    with begun(model) as session, session.fork() as untouched, session.fork() as picked:
        data = session.export_row(1)
        picked.select([1])
        with model.import_row(data) as one:
            assert one.lengths.tolist() == picked.lengths.tolist()
            assert one.held_from.tolist() == picked.held_from.tolist()
            if joins := session.capabilities.joins:
                with session.fork() as whole:
                    whole.leave(1)
                    whole.join(model.import_row(data))
                    both = [whole.run(TOKENS[:, [i]]) for i in (45, 46)]
            runs = [[x.run(TOKENS[:, [i]]) for i in (45, 46)] for x in (untouched, session)]
            alone = [[x.run(TOKENS[1:, [i]]) for i in (45, 46)] for x in (picked, one)]
    for want, same in zip(*runs, strict=True):
        assert np.array_equal(want, same), "a session of which a row was exported goes on otherwise"
    for want, got in zip(*alone, strict=True):
        assert np.array_equal(want, got), "the row goes on otherwise"
    for want, got in zip(runs[0], both if joins else runs[1], strict=True):
        assert np.abs(want - got).max() < 1e-3, "the row that joins goes on otherwise"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "filler"])
def test_an_exported_row_goes_on(model, name):
    law_of_rows(model(name))


def test_another_row_is_caught(model, monkeypatch):
    right = SessionCore.of_rows
    monkeypatch.setattr(SessionCore, "of_rows", lambda self, rows: right(self, rows * 0))
    with pytest.raises(AssertionError):
        law_of_rows(model("base"))


def test_bytes_that_are_not_whole_are_refused(model):
    with begun(model("base")) as session:
        data = session.export_row()
        with pytest.raises(InputError, match="2 is not a row"):
            session.export_row(2)
    changed = bytearray(data)
    changed[-5] ^= 1
    for wrong, why in (
        (b"", "no saved session"),
        (data[:-40], "no saved session"),
        (bytes(changed), "was changed or damaged"),
        (data.replace(b'\\"format\\": 1', b'\\"format\\": 7'), "format 7 is not"),
    ):
        with pytest.raises(SavedSessionError, match=why):
            model("base").import_row(wrong)
    with pytest.raises(SavedSessionError, match="this row is of recipe"):
        model("snapkv").import_row(data)
