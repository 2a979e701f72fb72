"""What the engine reads of a graph's external data, without the package `onnx`, is what that package reads."""

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from accel.runtime.artifact.graph import graph_of


def tensor(name, **where):
    found = TensorProto(name=name, dims=[1], data_type=TensorProto.FLOAT)
    if where:
        found.data_location = TensorProto.EXTERNAL
    else:
        found.raw_data = b"\0\0\0\0"
    for key, value in where.items():
        found.external_data.add(key=key, value=str(value))
    return found


@pytest.fixture(scope="module")
def model():
    """External tensors at each place where ONNX takes one, beside others that lie in the file."""

    def constant(name):
        return helper.make_node("Constant", [], [name], value=tensor(name, location=name))

    inner = helper.make_graph(
        [constant("deep")], "inner", [], [], [tensor("branch", location="b", offset=8, length=4)]
    )
    ifs = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    many = helper.make_node(
        "Many", [], ["z"], graphs=[inner], tensors=[tensor("listed", location="l")]
    )
    sparse = helper.make_sparse_tensor(tensor("v", location="v"), tensor("i", location="i"), [4])
    node = helper.make_node("Sparse", [], ["s"], one=sparse)
    graph = helper.make_graph(
        [ifs, many, node], "outer", [], [], [tensor("here"), tensor("ä", location="w", x="y")]
    )
    graph.sparse_initializer.append(sparse)
    function = helper.make_function("f", "F", [], ["o"], [constant("in a function")], [])
    made = helper.make_model(graph, functions=[function])
    made.training_info.add(algorithm=inner)
    return made


def by_onnx(message):
    """Every external tensor in a message, wherever it is, by the descriptors of the package."""
    if isinstance(message, TensorProto):
        if any(e.key == "location" for e in message.external_data):  # else onnxruntime refuses it
            yield (
                message.name,
                tuple(sorted({e.key: e.value for e in message.external_data}.items())),
            )
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if field.is_repeated else [value]:
                yield from by_onnx(one)


def by_accel(data):
    return {(t.name, tuple(sorted(t.place.items()))) for t in graph_of(data).external}


def test_each_place_is_read_as_onnx_reads_it(model):
    want = set(by_onnx(model))
    assert {name for name, _ in want} == {
        "deep",
        "branch",
        "listed",
        "v",
        "i",
        "ä",
        "in a function",
    }
    assert by_accel(model.SerializeToString()) == want


def test_a_tensor_that_names_a_file_is_external_whatever_its_flag(model):
    changed = onnx.ModelProto.FromString(model.SerializeToString())
    changed.graph.initializer[1].data_location = TensorProto.DEFAULT
    assert ("ä", (("location", "w"), ("x", "y"))) in by_accel(changed.SerializeToString())


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_bytes_hide_a_tensor(model, data):
    """Bytes changed, cut or put in: an error, or at least the tensors that the package finds."""
    whole = bytearray(model.SerializeToString())
    at = data.draw(st.integers(0, len(whole) - 1))
    end = data.draw(st.integers(at, min(at + 4, len(whole))))
    whole[at:end] = data.draw(st.binary(max_size=6))
    try:
        want = set(by_onnx(onnx.ModelProto.FromString(bytes(whole))))
    except Exception:  # protobuf's DecodeError has no public base
        return
    try:
        found = by_accel(bytes(whole))
    except ValueError:
        return
    assert {name for name, _ in want} <= {name for name, _ in found}


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"\x3a\x05ab", b"\x80" * 11, b"\x38\x01", b"\x0b", b"no graph at all"]
)
def test_what_is_no_graph(data):
    with pytest.raises(ValueError):
        graph_of(data)
