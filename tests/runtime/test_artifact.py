"""Artifacts that are damaged, tampered with, or not artifacts: each is refused in words, never with
a bare traceback.
"""

import copy
import json
import os
import shutil

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ir.errors import ArtifactError
from accel.lowering.onnx.threads import default_threads, physical_cores
from accel.runtime.artifact.artifact import copy_artifact, open_artifact
from accel.runtime.backends.onnx.backend import OrtBackend
from accel.runtime.model.load import load


def refused(path, words):
    with pytest.raises(ArtifactError, match=words) as caught:
        load(path)
    assert str(path.name) in str(caught.value)


def test_a_whole_artifact_opens(toy, damaged):
    artifact = open_artifact(toy.path)
    assert artifact.facts.vocab_size == toy.vocab and artifact.state == tuple(toy.state)
    assert set(artifact.files) == {"step.onnx", "weights.bin", "tokenizer.json"}
    open_artifact(damaged())  # the control: a copy is whole
    assert artifact.recipe["tables"]["loop"]["use"] == "autoregressive" and artifact.report


def test_what_is_not_an_artifact(toy, tmp_path):
    with pytest.raises(ArtifactError, match="did you mean 'artifact'"):
        open_artifact(toy.path.with_name("artifakt"))
    refused(tmp_path / "nowhere" / "at-all", "does not exist")
    refused(toy.path / "accel.json", "give its folder")
    refused(toy.path / "step.onnx", "is a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no accel.json")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    refused(tmp_path / "hf", "Hugging Face model.*accel-compile build")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "\x00", "[" * 100_000, '{"format": 3}', '"x"']
)
def test_a_manifest_that_is_no_manifest(damaged, text):
    path = damaged()
    (path / "accel.json").write_text(text)
    refused(path, "accel.json")


def put(*keys, value):
    def change(raw):
        for key in keys[:-1]:
            raw = raw[key]
        raw[keys[-1]] = value

    return change


def both(*changes):
    return lambda raw: [change(raw) for change in changes]


def drop(*keys):
    def change(raw):
        for key in keys[:-1]:
            raw = raw[key]
        del raw[keys[-1]]

    return change


EDITS = [
    (put("format", value=1), "format 1 is of an older accel"),
    (put("format", value=4), "format 4 is newer .* needs accel 0.1.0, which wrote it, or newer$"),
    (
        both(put("format", value=4), put("accel", value="x; pip install y")),
        "it needs a newer accel$",
    ),
    (put("format", value="1"), "format is '1' .str., not an integer"),
    (put("format", value=0), "format is 0"),
    (drop("format"), "format is missing"),
    (drop("state"), "state is missing"),
    (put("state", 1, "shape", 1, value=True), r"state\[1\].shape\[1\] is True"),
    (put("state", 1, "shape", 1, value=-2), r"state\[1\].shape\[1\] is -2"),
    (put("state", 1, "shape", 0, value="Z"), r"state\[1\].shape\[0\] is 'Z'"),
    (put("state", 1, "shape", 0, value=[]), r"state\[1\].shape\[0\]"),
    (put("state", 1, "dtype", value="float31"), "did you mean 'float32'"),
    (lambda raw: raw["state"].append(raw["state"][0]), "two state values have the same name"),
    (
        put("state", 1, "name", value="kv.pos"),
        r"state\[1\]: this accel knows no state kv.pos with role k",
    ),
    (put("state", 1, "role", value="keys"), r"state\[1\]: .* kv.0.k with role keys and layer 0"),
    (put("state", 1, "layer", value=3), r"state\[1\]: .* kv.0.k with role k and layer 3"),
    (put("state", 1, "fill", value=None), "fill is None"),
    (put("state", 1, "home", value="maped"), "did you mean 'mapped'"),
    (put("state", 0, value=3), r"state\[0\] is 3"),
    (put("model", "vocab_size", value=0), "model.vocab_size is 0"),
    (put("model", "eos", value=[9999]), r"model.eos\[0\] is 9999"),
    (put("model", "max_context", value=1.5), "model.max_context is 1.5"),
    (put("model", "layers", value=[1]), r"model.layers\[0\]"),
    (put("entries", value={}), "no 'step'"),
    (put("entries", "step", "file", value="step.onx"), "did you mean 'step.onnx'"),
    (put("entries", "step", "inputs", value=[1]), r"entries.step.inputs\[0\] is 1"),
    (put("files", "step.onnx", "sha256", value="abc"), "64 hexadecimal"),
    (put("files", "step.onnx", "bytes", value=-1), "files.step.onnx.bytes is -1"),
    (put("files", "weights.bin", "bytes", value=1), "has .* bytes, not 1;"),
    (put("files", "gone.bin", value={"bytes": 1, "sha256": "0" * 64}), "'gone.bin' is missing"),
    (put("files", "../x", value={"bytes": 1, "sha256": "0" * 64}), "not a plain path"),
    (put("files", "/etc/passwd", value={"bytes": 1, "sha256": "0" * 64}), "not a plain path"),
    (put("files", "a\\..\\x", value={"bytes": 1, "sha256": "0" * 64}), "not a plain path"),
    (put("target", value="triton"), "'triton' is not 'onnx'"),
]


@pytest.mark.parametrize("change, words", EDITS, ids=[words for _, words in EDITS])
def test_edited_manifests(damaged, change, words):
    refused(damaged(change), words)


def test_an_edit_that_parses_is_found_by_the_digest(damaged):
    edit = put("model", "max_context", value=99)
    refused(damaged(edit, keep_digest=True), "accel.json was changed after the build")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_json_gives_a_bare_error(toy, data):
    """Any value at any place: an ArtifactError, or still an artifact."""
    from accel.runtime.artifact.manifest import parse

    raw = copy.deepcopy(json.loads((toy.path / "accel.json").read_text()))
    node = raw
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(node[key], (dict, list)) and node[key] and data.draw(st.booleans())):
            break
        node = node[key]
    junk = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.just([])
        | st.just({})
    )
    node[key] = data.draw(
        junk | st.lists(junk, max_size=2) | st.dictionaries(st.text(), junk, max_size=2)
    )
    try:
        parse(raw)
    except ArtifactError:
        pass


@pytest.mark.parametrize("name", ["weights.bin", "step.onnx", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "empty"])
def test_damaged_files(damaged, name, damage):
    path = damaged()
    content = bytearray((path / name).read_bytes())
    if damage == "gone":
        (path / name).unlink()
    else:
        content[len(content) // 2] ^= 1
        kept = {"flip": len(content), "cut": len(content) - 1, "empty": 0}[damage]
        (path / name).write_bytes(content[:kept])
    flipped = "changed or damaged|changed after the build|not an ONNX"
    refused(path, {"flip": flipped, "gone": "missing"}.get(damage, "bytes, not"))


def test_links_out_of_the_folder(damaged, tmp_path):
    path = damaged()
    shutil.move(path / "weights.bin", tmp_path / "elsewhere.bin")
    (path / "weights.bin").symlink_to(tmp_path / "elsewhere.bin")
    refused(path, "link out of the artifact")


def external(toy, tmp_path, **entries):
    """An artifact, whole by its own checksums, whose graph keeps its first weight where `entries`
    say.
    """
    folder = tmp_path / "art"
    shutil.copytree(toy.path, folder)
    model = onnx.load(str(folder / "step.onnx"), load_external_data=False)
    for item in model.graph.initializer[0].external_data:
        item.value = str(entries.get(item.key, item.value))
    (folder / "step.onnx").write_bytes(model.SerializeToString())
    toy.seal(folder, toy.manifest())
    return folder


@pytest.mark.parametrize(
    "entries, words",
    [
        ({"location": "../secret.bin"}, "must be listed"),
        ({"location": "/etc/passwd"}, "must be listed"),
        ({"location": "./weights.bin"}, "must be listed"),
        ({"location": "*/_ORT_MEM_ADDR_/*"}, "must be listed"),
        ({"location": "other.bin"}, "must be listed"),
        ({"offset": 10**9}, "which has"),
        ({"offset": -4}, "not a number of 0"),
        ({"offset": "1_0"}, "not a number of 0"),
        ({"length": 10**12}, "which has"),
        ({"length": "many"}, "not a number"),
        ({"length": 4}, "onnxruntime"),
    ],
)
def test_weights_outside_their_file(toy, tmp_path, entries, words):
    with pytest.raises(ArtifactError, match=words):
        load(external(toy, tmp_path, **entries)).generate([1], 1)


def test_state_that_differs_from_the_graph(damaged):
    for change, words in [
        (put("state", 1, "shape", value=["B", 2, "C", 9]), "accel.json.*in the graph"),
        (put("state", 1, "dtype", value="float16"), "float16"),
        (lambda raw: raw["state"][1].update(name="kv.9.k", layer=9), "disagree on kv.0.k"),
        (lambda raw: raw["state"].pop(), "disagree on kv.0.v"),
    ]:
        path = damaged(change)
        with pytest.raises(ArtifactError, match=words):
            load(path).session()
        shutil.rmtree(path)


def test_a_graph_that_onnxruntime_refuses(toy, tmp_path):
    folder = tmp_path / "bad"
    shutil.copytree(toy.path, folder)
    model = onnx.load(str(folder / "step.onnx"), load_external_data=False)
    model.graph.node[0].op_type = "NoSuchOperator"
    (folder / "step.onnx").write_bytes(model.SerializeToString())
    toy.seal(folder, toy.manifest())
    with pytest.raises(ArtifactError, match="onnxruntime .* cannot open"):
        load(folder).generate([1], 1)


def test_a_copy_is_whole_and_its_own(toy, tmp_path):
    copy_artifact(open_artifact(toy.path), tmp_path / "a" / "copy")
    again = open_artifact(tmp_path / "a" / "copy")
    assert again.manifest == open_artifact(toy.path).manifest
    assert not os.path.samefile(again.path / "weights.bin", toy.path / "weights.bin")
    copy_artifact(again, again.path)  # onto itself
    assert open_artifact(again.path).manifest == again.manifest
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["copy"]


def test_what_is_written_into_a_copy_stays_there(toy, tmp_path):
    before = (toy.path / "weights.bin").read_bytes()
    copy_artifact(open_artifact(toy.path), tmp_path / "copy")
    with (tmp_path / "copy" / "weights.bin").open("r+b") as file:
        file.write(bytes(16))
    assert (toy.path / "weights.bin").read_bytes() == before
    open_artifact(toy.path)


def test_decode_steps_bind_nothing(toy, monkeypatch):
    """Python work of a decode step must not grow with the state: everything is bound once."""
    import onnxruntime

    count = []
    for name in ("bind_ortvalue_input", "bind_ortvalue_output"):
        plain = getattr(onnxruntime.IOBinding, name)
        monkeypatch.setattr(
            onnxruntime.IOBinding, name, lambda *a, plain=plain: (count.append(1), plain(*a))[1]
        )
    with toy.session() as session:
        session.run([[1, 2, 3]])
        session.run([[4]])
        bound = len(count)
        assert bound > 0, "the control: the counter sees bindings"
        for _ in range(5):
            session.run([[4]])
        assert len(count) == bound


def test_threads_and_cores(toy, monkeypatch):
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)
    for told, threads in (
        ("3", 3),
        ("2,1", 2),
        ("0", physical_cores()),
        ("many", physical_cores()),
    ):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        assert default_threads() == threads
    engine = OrtBackend(open_artifact(toy.path), threads=1)
    assert engine.session is engine.session and engine.threads == 1
    assert engine.session.get_session_options().intra_op_num_threads == 1


def test_names_that_a_build_gives_are_taken(toy, tmp_path):
    """A chat template may be called anything that a file may; what ONNX Runtime reads as an address may not."""
    for name, taken in (("additional_chat_templates/ rag + v2 ä.jinja", True), ("*/x", False)):
        path = toy.write(tmp_path / str(taken))
        (path / name).parent.mkdir()
        (path / name).write_text("{{ x }}")
        toy.seal(path, toy.manifest())
        if taken:
            assert name in open_artifact(path).files
        else:
            refused(path, "not a plain path")
