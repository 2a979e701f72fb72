"""Files of the loop's methods: found by what methods declare, copied by a build, found again by a load."""

import dataclasses
import json

import pytest

from accel.ir.axis import Axis
from accel.ir.errors import ArtifactError, RecipeError
from accel.runtime.artifact import shipped
from accel.runtime.artifact.shipped import check_shipped, located, ship
from accel.runtime.loop import HOST

METHODS = [
    (axis, use)
    for axis in HOST
    for use in Axis(axis, f"accel.runtime.{axis}").names()
    if Axis(axis, f"accel.runtime.{axis}").method(use).files
]


ALONE = [one for one in METHODS if one[0] != "draft"]  # of which a recipe has one


def law(tmp_path, shipping, locating, alone=ALONE[0]):
    """A copy of each file of a method, and of a stack's members, is what a load reads; the given tables stay."""
    sources, tables, members = tmp_path / "given", {}, []
    chosen = [one for one in METHODS if one[0] == "draft" or one == alone]
    for axis, use in chosen:
        table = {"use": use}
        for option in Axis(axis, f"accel.runtime.{axis}").method(use).files:
            source = sources / axis / use / f"{option}.bin"
            source.mkdir(parents=True) if len(members) % 2 else source.parent.mkdir(parents=True)
            (source / "inner" if source.is_dir() else source).write_text(f"{axis} {use} {option}")
            table[option] = str(source)
        tables[axis] = table
        if axis == "draft":
            members.append(table)
    if members:
        tables["draft"] = {"use": "stack", "members": ["sam", *members]}
    before = json.dumps(tables)
    check_shipped(tables, HOST)
    (tmp_path / "artifact").mkdir()
    kept = shipping(tables, HOST, tmp_path / "artifact")
    assert json.dumps(tables) == before and str(tmp_path) not in json.dumps(kept)
    sources.rename(tmp_path / "gone")
    (tmp_path / "artifact").rename(tmp_path / "moved")
    folder = tmp_path / "moved"
    files = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    found = locating(kept, HOST, folder, files)
    check_shipped(found, HOST)
    read = 0
    for where, table, option in shipped._named(found, HOST):
        path = shipped._source(where, table, option)
        text = (path / "inner" if path.is_dir() else path).read_text()
        assert text == f"{where.partition('.')[0]} {table['use']} {option}"
        read += 1
    assert read == len(chosen) > 2


@pytest.mark.parametrize("alone", ALONE, ids=" ".join)
def test_every_file_ships(tmp_path, alone):
    assert ("draft", "rest") in METHODS
    law(tmp_path, ship, located, alone)


def test_a_build_that_keeps_the_given_path_is_caught(tmp_path):
    with pytest.raises(AssertionError):
        law(tmp_path, lambda tables, axes, folder: tables, located)


def test_a_load_that_reads_elsewhere_is_caught(tmp_path):
    with pytest.raises(RecipeError, match="was moved"):
        law(tmp_path, ship, lambda tables, *_: tables)


@pytest.mark.parametrize("name", ["../head", "/etc/passwd", "data"])
@pytest.mark.parametrize("files", [["step.onnx"], ["data/other", "step.onnx"]])
def test_a_path_out_of_the_artifact_is_refused(tmp_path, name, files):
    """A stranger's artifact reads nothing else of the machine's; an empty option names what comes with accel."""
    for empty in ({"use": "specdec-pp"}, {"use": "specdec-pp", "trained": ""}):
        assert located({"length": empty}, HOST, tmp_path, files) == {"length": empty}
    tables = {"draft": {"use": "stack", "members": ["sam", {"use": "rest", "datastore": name}]}}
    if (name, files[0]) == ("data", "data/other"):  # a folder of it
        found = located(tables, HOST, tmp_path, files)
        assert found["draft"]["members"][1]["datastore"] == str(tmp_path / "data")
        return
    with pytest.raises(ArtifactError, match=f"draft.1.rest: datastore = '{name}' is no file of"):
        located(tables, HOST, tmp_path, files)


@pytest.mark.parametrize(
    "tables", [None, [], {"draft": 5}, {"draft": {"use": 5}}, {"length": {"trained": []}}]
)
def test_what_is_no_table_is_left_to_the_methods(tmp_path, tables):
    assert located(tables, HOST, tmp_path, ["step.onnx"]) == tables


def test_declared_options_are_options():
    for axis, use in METHODS:
        method = Axis(axis, f"accel.runtime.{axis}").method(use)
        assert set(method.files) <= {field.name for field in dataclasses.fields(method)}
