"""Programs as text: what is written reads back, and what cannot be read is told with its place."""

from pathlib import Path

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.compiler.assemble import assemble
from accel.compiler.pipeline import pipeline
from accel.ir.capture.examples import example
from accel.ir.errors import TextError
from accel.ir.facts import Facts
from accel.ir.parser.read import parse
from accel.ir.program import State
from accel.ir.recipe import Recipe
from accel.ir.region import Region
from accel.ir.spec import verify
from accel.ir.state import Part
from accel.passes import run
from accel.passes.depth.by_call import ByCall
from accel.passes.drive import run_both_ways
from accel.passes.kv.select import Select
from accel.passes.kv.select.quest import Quest

GOLDEN = Path(__file__).parent / "golden"
SMALL = """\
step(tokens: i64[B,T], positions: i64[B,T]):
  embed: f32[11,8]
  %0: f32[B,T,8] = embedding(embed, tokens)
  norm: f32[8]
  %1: f32[B,T,8] = accel.rms_norm(%0, norm, 1e-06)
  %2: f32[B,T,11] = linear(%1, embed)
  return logits=%2
"""
LAYERS = """\
state:
  kv.0.k: f32[B,2,C,4] = state(role='k', layer=0, fill=0)

step(tokens: i64[B,T], positions: i64[B,T], run: bool[2] = [True, False]):
  embed: f32[11,8]
  %0: f32[B,T,8] = embedding(embed, tokens)
  %1: bool[] = select.int(run, 0, 0)
  %2: (f32[B,T,8]) = layer.0(%1, %0)
  %3: f32[B,T,8] = getitem(%2, 0)
  %4: bool[] = select.int(run, 0, 1)
  %5: (f32[B,T,8]) = layer.1(%4, %3)
  %6: f32[B,T,8] = getitem(%5, 0)
  %7: f32[B,T,11] = linear(%6, embed)
  return logits=%7

layer.0(run: bool[], x: f32[B,T,8]):
  blocks.0.w: f32[8,8]
  %0: f32[B,T,8] = linear(x, blocks.0.w)
  return %0
 otherwise(run: bool[], x: f32[B,T,8]):
  return x

layer.1: as layer.0
"""


# What is written reads back


@pytest.mark.parametrize("name", ["llama", "latent"])
def test_a_golden_program_reads_back(name):
    text = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert parse(text).text() == text


@pytest.mark.few(1)
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_a_captured_program_reads_back_and_so_does_what_passes_make_of_it(captured, name):
    program = captured(name)
    assert parse(program.text()).text() == program.text()
    run(program, pipeline())
    text = program.text()
    again = parse(text, facts=program.facts, params=program.params)
    assert again.text() == text and again.state == program.state
    verify(again, "reading")
    tokens, _ = example(2, 13, program.facts.vocab_size)
    for (got, _), (want, _) in zip(
        run_both_ways(again, tokens), run_both_ways(program, tokens), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.long
@pytest.mark.parametrize(
    "step", [ByCall(), Select(Quest(dense_layers=0))], ids=lambda s: type(s).__name__
)
def test_regions_that_may_be_left_out_read_back(captured, step):
    program = captured("llama")
    run(program, pipeline(recipe_passes=[step]))
    again = parse(program.text(), params=program.params)
    assert again.text() == program.text() and "\n otherwise(" in again.text()
    assert again.step.defaults.keys() == program.step.defaults.keys()
    for name, value in program.step.defaults.items():
        assert torch.equal(again.step.defaults[name], value)


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", ["mikv", "kivi-2", "promptdistill", "paged-prefix"])
def test_programs_of_several_entries_read_back(captured, recipe):
    """Shapes that are written are those that the operators give: of mikv's second layer they were the first's."""
    program = captured("llama")
    run(program, pipeline(recipe_passes=assemble(Recipe.load(recipe)).passes))
    again = parse(program.text())
    assert again.text() == program.text() and again.state == program.state
    assert {n: e.inputs for n, e in again.entries.items()} == {
        n: e.inputs for n, e in program.entries.items()
    }


def test_inputs_that_a_pass_adds_to_a_copy_have_no_default_in_the_other(captured):
    program = captured("llama")
    run(program, pipeline())
    ByCall().run(program.copy())
    assert not program.step.defaults


@pytest.mark.long
def test_a_program_that_passes_ran_over_after_it_was_read(captured):
    """Symbols of a program that was read are as good as those of a capture."""
    program = captured("llama")
    again = parse(program.text(), facts=program.copy().facts, params=program.params)
    run(program, pipeline())
    run(again, pipeline())
    assert again.text() == program.text()


@pytest.mark.parametrize("text", [SMALL, LAYERS])
def test_a_text_by_hand_reads_back(text):
    assert parse(text).text() == text


def test_state_reads_back():
    (state,) = parse(LAYERS).state
    assert state == State(Part.KEYS, 0, "float32", ("B", 2, "C", 4))


def test_a_region_that_is_left_out_is_left_out():
    program = parse(LAYERS)
    tokens, positions = example(2, 5, 11)
    inputs = {"tokens": tokens, "positions": positions}
    first = program.run("step", inputs)["logits"]  # layer.1 does not run
    all_of_it = program.run("step", {**inputs, "run": torch.tensor([True, True])})["logits"]
    embed, w = program.params["embed"], program.params["blocks.0.w"]
    want = embed[tokens] @ w.T
    torch.testing.assert_close(first, want @ embed.T)
    torch.testing.assert_close(all_of_it, want @ program.params["blocks.1.w"].T @ embed.T)


def test_types_and_lines_that_say_nothing_may_be_left_out():
    bare = SMALL.replace("%0: f32[B,T,8]", "%e").replace("(%0,", "(%e,")
    bare = "# the smallest model\n\n" + bare.replace("  norm", "\n  # a weight\n  norm")
    assert parse(bare).text() == SMALL


def test_weights_are_those_given_or_else_noise_by_their_name():
    one, two = parse(SMALL), parse(SMALL.replace("  norm", "  scale").replace(" norm,", " scale,"))
    assert torch.equal(one.params["embed"], two.params["embed"])
    assert not torch.equal(one.params["norm"], two.params["scale"])
    mine = torch.ones(8)
    assert parse(SMALL, params={"norm": mine}).params["norm"] is mine
    assert (
        not parse(SMALL.replace("f32[8]", "i64[8]").replace("norm, 1e-06", "embed, 1"))
        .params["norm"]
        .any()
    )


def test_facts_are_those_given_or_of_the_logits():
    assert parse(SMALL).facts.vocab_size == 11
    facts = Facts("mine", vocab_size=9, max_context=7)
    assert parse(SMALL, facts=facts).facts is facts


def test_a_weight_whose_name_is_no_name_or_an_input_s():
    text = (
        SMALL.replace("  norm: f32[8]", "  %1: f32[8] = weight('positions')")
        .replace("%1: f32[B", "%2: f32[B")
        .replace("(%0, norm", "(%0, %1")
        .replace("%2: f32[B,T,11] = linear(%1", "%3: f32[B,T,11] = linear(%2")
        .replace("=%2", "=%3")
    )
    program = parse(text)
    assert program.text() == text and "positions" in program.params
    odd = text.replace("'positions'", "'a name'")
    assert parse(odd).text() == odd


def test_a_layer_with_names_that_no_number_tells():
    """What layers share by chance is told; what differs in more than names is written out."""
    text = LAYERS.replace("layer.1: as layer.0", "layer.1: as layer.0 with blocks.0.w = blocks.0.w")
    program = parse(text)
    assert program.text() == text and "blocks.1.w" not in program.params
    _, second = (n.target for n in program.nodes() if isinstance(n.target, Region))
    (product,) = second.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    product.target = torch.ops.aten.matmul.default
    assert "layer.1(run: bool[], x: " in program.text()


def test_sizes_are_written_in_letters_and_in_their_order():
    text = SMALL.replace("  return", "  %3: f32[B*T,11] = reshape(%2, [-1, 11])\n  return")
    text = text.replace("logits=%2", "logits=%2, flat=%3")
    assert parse(text).text() == text
    grown = (
        "step(tokens: i64[B,C/16+2*T]):\n  %0: i64[B,1,C/16+2*T] = unsqueeze(tokens, 1)\n"
        "  return logits=%0\n"
    )
    assert parse(grown).text() == grown


def test_numbers_read_back_as_they_are():
    text = SMALL.replace("1e-06", "0.31622776601683794").replace(
        "  return", "  %3: f32[B,T,11] = clamp(%2, -inf, inf)\n  return"
    )
    program = parse(text)
    assert program.text() == text
    (norm,) = program.nodes(torch.ops.accel.rms_norm.default)
    assert norm.args[2] == 0.31622776601683794


PARTS = st.one_of(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True),
    st.sampled_from(["0", "17", "{a,b.c}", "inf", "None", "rope", "é", "%0"]),
    st.text(max_size=4),
)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    st.lists(PARTS, min_size=1, max_size=3).map(".".join).filter(lambda name: name != "embed"),
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.floats(allow_nan=False),
    st.permutations("BTCNPQ"),
)
def test_any_names_sizes_and_numbers_read_back(name, sizes, number, letters):
    """A weight may be called anything, and which letter is which says nothing."""
    vocab, width = sizes
    text = SMALL.replace("8]", "W]").replace("11", str(vocab)).replace("W]", f"{width}]")
    program = parse(text.replace("[B,T", f"[{letters[0]},{letters[1]}"))
    graph = program.step.graph
    (holder,) = (n for n in graph.find_nodes(op="get_attr") if n.target == "norm")
    holder.target = name
    (norm,) = program.nodes(torch.ops.accel.rms_norm.default)
    norm.update_arg(2, number)
    text = program.text()
    again = parse(text)
    assert again.text() == text and again.params[name].shape == (width,)
    (norm,) = again.nodes(torch.ops.accel.rms_norm.default)
    assert norm.args[2] == number and norm.args[1].target == name


# What cannot be read


def changed(old: str, new: str, text: str = SMALL) -> str:
    assert old in text
    return text.replace(old, new, 1)


TWO = SMALL + "\nnext(tokens: i64[B,T]):\n  %0: int = sym_size.int(tokens, 0)\n  return b=%0\n"
ERRORS = {
    "near operator": (
        changed("accel.rms_norm(", "accel.rmsnorm("),
        "line 5, column 20: operator 'accel.rmsnorm' does not exist; did you mean 'accel.rms_norm'?",
    ),
    "far operator": (
        changed("accel.rms_norm(", "accel.zzzzzz("),
        "line 5, column 20: operator 'accel.zzzzzz' does not exist; those of accel: accel.add_layer_norm,",
    ),
    "overload": (
        changed("linear(%1, embed)", "transpose(%1, 1, 2)"),
        "line 6, column 21: 'transpose' has several forms; write one of transpose.int",
    ),
    "near overload": (
        changed("linear(%1, embed)", "add.Tenser(%1, %1)"),
        "line 6, column 21: operator 'add.Tenser' does not exist; write one of add.Tensor",
    ),
    "function": (
        changed("linear(%1, embed)", "operator.flordiv(4, 2)"),
        "line 6, column 21: operator 'operator.flordiv' does not exist",
    ),
    "near weight": (
        changed("linear(%1, embed)", "linear(%1, embd)"),
        "line 6, column 32: input or weight 'embd' does not exist; did you mean 'embed'?; a weight has a "
        "line above that says what it is, such as embd: f32[48]",
    ),
    "near value": (
        changed("linear(%1, embed)", "linear(%11, embed)"),
        "line 6, column 28: value '%11' does not exist; did you mean '%1'?; a line above has to give it",
    ),
    "a weight of other sizes": (
        changed("  norm: f32[8]", "  norm: f32[8]\n  norm: f32[9]"),
        "line 5, column 9: weight 'norm' is f32[8] elsewhere, and f32[9] here",
    ),
    "a weight in letters": (
        changed("norm: f32[8]", "norm: f32[E]"),
        "line 4, column 9: weight 'norm' has sizes in numbers, as in f32[48,40]",
    ),
    "a weight that is an input": (
        changed("norm: f32[8]", "tokens: f32[8]"),
        "line 4, column 3: 'tokens' is an input too; write %name: f32[8] = weight('tokens')",
    ),
    "one value twice": (
        changed("%2: f32", "%1: f32"),
        "line 6, column 21: %1 is a value above; give this one another number",
    ),
    "a default": (
        changed("= [True, False]", "= [True, [False]]", LAYERS),
        "line 4, column 45: the value of input 'run' is one number, or equal lists of them",
    ),
    "a default that is no number": (
        changed("= [True, False]", "= tokens", LAYERS),
        "line 4, column 45: the value of input 'run' is one number, or equal lists of them",
    ),
    "a size by nothing": (
        changed("i64[B,T]", "i64[B,T//0]"),
        "line 1, column 14: size 'T//0' is no number, letter or sum of them",
    ),
    "operands": (
        changed("linear(%1, embed)", "linear(%1, norm, norm, norm)"),
        "line 6, column 21: linear does not take these operands: ",
    ),
    "schema": (
        changed("linear(%1, embed)", "linear(%1, norm, norm, norm)"),
        "; it is aten::linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    ),
    "shapes": (
        changed("embed: f32[11,8]", "embed: f32[11,7]"),
        "line 3, column 7: embedding gives f32[B,T,7], not f32[B,T,8]; write the type that it gives",
    ),
    "dtype": (
        changed("%2: f32[B,T,11]", "%2: f16[B,T,11]"),
        "line 6, column 7: linear gives f32[B,T,11], not f16[B,T,11]",
    ),
    "near type": (
        changed("norm: f32[8]", "norm: f23[8]"),
        "line 4, column 9: type 'f23' does not exist; did you mean 'f32'?",
    ),
    "letter": (
        changed("%2: f32[B,T,11]", "%2: f32[B,S,11]"),
        "line 6, column 7: size 'S' does not exist; known: B, T",
    ),
    "size": (
        changed("i64[B,T]", "i64[B,T+]"),
        "line 1, column 14: size 'T+' is no number, letter or sum of them, as in 2*T+1",
    ),
    "open bracket": (
        changed("norm: f32[8]", "norm: f32[8"),
        "line 4, column 12: this '[' is not closed; write the sizes as in f32[B,T,48]",
    ),
    "comma": (
        changed("(%0, norm,", "(%0 norm,"),
        "line 5, column 38: 'norm', where ',' or ')' should stand",
    ),
    "end of line": (
        changed("(%0, norm, 1e-06)", "(%0, norm, 1e-06"),
        "line 5, column 50: the line ends, where ',' or ')' should stand",
    ),
    "too much": (
        changed("1e-06)", "1e-06) %3"),
        "line 5, column 52: '%3', where the line's end should stand",
    ),
    "no operator": (
        changed("= linear(%1", "= %1 + (%1"),
        "line 6, column 21: '%1', where an operator, such as add.Tensor or accel.rope should stand",
    ),
    "names first": (
        changed("linear(%1, embed)", "linear(input=%1, embed)"),
        "where an argument with its name (those without come first) should stand",
    ),
    "torch": (
        changed("linear(%1, embed)", "to.dtype(%1, torch.float33)"),
        "line 6, column 34: 'torch.float33' is no dtype, layout or memory format of torch",
    ),
    "device": (
        changed("linear(%1, embed)", "arange(3, device=device(kind='cpu'))"),
        "line 6, column 38: write a device as device(type='cpu')",
    ),
    "nothing returned": (
        changed("  return logits=%2\n", ""),
        "line 1, column 1: step returns nothing; end it with a line 'return …'",
    ),
    "after the end": (
        SMALL + "  %3: f32[8] = neg(norm)\n",
        "line 8, column 3: step has returned; a line of another begins with its name",
    ),
    "a number returned": (
        changed("logits=%2", "logits=2"),
        "line 7, column 17: what is returned is a value (%0), an input or a weight",
    ),
    "half named": (
        changed("logits=%2", "logits=%2, %1"),
        "line 7, column 3: name each output, as in an entry, or none, as in a region",
    ),
    "no names": (
        changed("logits=%2", "%2"),
        "step returns values without names and no entry stands before it: write return logits=… in an entry",
    ),
    "nothing": (
        "# only this\n",
        "the text has no entry; it begins with step(tokens: i64[B,T], …):",
    ),
    "indented": (
        "  embed: f32[11,8]\n" + SMALL,
        "line 1, column 3: this line is indented and belongs to no entry",
    ),
    "two inputs": (
        changed("positions:", "tokens:"),
        "line 1, column 24: there are two inputs 'tokens'; name one otherwise",
    ),
    "two entries": (
        SMALL + "\n" + SMALL,
        "line 9, column 1: there are two entries 'step'; name one otherwise",
    ),
    "an entry's input": (
        changed("positions: i64[B,T]", "positions: int"),
        "line 1, column 35: input 'positions' of an entry is a tensor, such as i64[B,T]",
    ),
    "a word as a name": (
        changed("step(", "weight("),
        "line 1, column 1: 'weight' is no name for an entry or a region; choose another",
    ),
    "weight without a type": (
        changed("norm: f32[8]", "%n = weight('norm')"),
        "line 4, column 8: write a weight as %n: f32[48] = weight('name')",
    ),
    "a region by a near name": (
        changed("layer.0(%1", "layr.0(%1", LAYERS),
        "line 8, column 22: operator 'layr.0' does not exist; did you mean 'layer.0'?",
    ),
    "a region like none": (
        changed("as layer.0", "as layer.9", LAYERS),
        "line 23, column 13: region 'layer.9' does not exist; did you mean 'layer.0'?; it has to stand above",
    ),
    "a region of no entry": (
        changed("as layer.0", "as layer.0 of stop", LAYERS),
        "line 23, column 24: entry 'stop' does not exist; did you mean 'step'?",
    ),
    "as before any entry": (
        "layer.1: as layer.0\n",
        "line 1, column 13: region 'layer.0' does not exist; known: none; it has to stand above",
    ),
    "neither inputs nor as": (
        changed("layer.1: as layer.0", "layer.1: like layer.0", LAYERS),
        "line 23, column 10: 'like', where 'as' and the region that layer.1 is like",
    ),
    "two regions": (
        changed("layer.1: as layer.0", "layer.0(x: f32[B]):\n  return x", LAYERS),
        "line 23, column 1: there are two regions 'layer.0'; name one otherwise",
    ),
    "a region that nobody calls": (
        LAYERS + "\nlayer.2: as layer.0\n",
        "line 25, column 1: step calls no region 'layer.2'; call it, or take it out",
    ),
    "too few values": (
        changed("layer.0(%1, %0)", "layer.0(%0)", LAYERS),
        "line 8, column 22: layer.0 takes 2 values, without names; 1 stand here",
    ),
    "a region that takes less when left out": (
        changed(" otherwise(run: bool[], x", " otherwise(x", LAYERS),
        "layer.0 and its 'otherwise' take equally many values",
    ),
    "a region that calls itself": (
        changed("linear(x, blocks.0.w)", "layer.0(run, x)", LAYERS),
        "layer.0 calls itself; a region may call others only",
    ),
    "a region's input": (
        changed("x: f32[B,T,8]):\n  blocks", "x: f32[B,T,9]):\n  blocks", LAYERS),
        "input 'x' gives f32[B,T,8], not f32[B,T,9]",
    ),
    "an entry left out": (
        SMALL + " otherwise(x: f32[B]):\n  return x\n",
        "an entry has no 'otherwise'; a region may have one",
    ),
    "left out twice": (
        changed("\nlayer.1", " otherwise(x: f32[B]):\n  return x\n\nlayer.1", LAYERS),
        "layer.0 has one 'otherwise'; take this one out",
    ),
    "state without sizes": (
        changed("kv.0.k: f32[B,2,C,4]", "kv.0.k: f32", LAYERS),
        "line 2, column 11: a state value is a tensor, such as f32[B,2,C,10]",
    ),
    "near field of state": (
        changed("role='k'", "rol='k'", LAYERS),
        "line 2, column 3: what is said of state, 'rol' does not exist; did you mean 'role'?",
    ),
    "state told by half": (
        changed(", fill=0", "", LAYERS),
        "line 2, column 3: say of 'kv.0.k' all of state(role=…, layer=…, fill=…)",
    ),
    "state of another name": (
        changed("role='k'", "role='v'", LAYERS),
        "line 2, column 3: there is no state value 'kv.0.k' with role='v', layer=0, fill=0",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_read_is_told_with_its_place(name):
    text, said = ERRORS[name]
    with pytest.raises(TextError) as caught:
        parse(text)
    assert said in str(caught.value)


@pytest.mark.long
@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([SMALL, LAYERS]),
    st.integers(0, 10**6),
    st.integers(0, 3),
    st.text("()[]:=,.%'{}0a9 \n-*/TB#", max_size=2),
)
def test_a_text_with_a_slip_reads_back_or_is_told(text, place, lost, put):
    place %= len(text)
    try:
        program = parse(text[:place] + put + text[place + lost :])
    except TextError as error:
        assert str(error).startswith(("line ", "the text has no entry"))
    else:
        assert parse(program.text()).text() == program.text()


def test_a_weight_that_the_text_does_not_read():
    with pytest.raises(TextError, match="weight 'nrm' does not exist; did you mean 'norm'?"):
        parse(SMALL, params={"nrm": torch.ones(8)})
    with pytest.raises(
        TextError, match=r"line 4, .* 'norm' is f32\[9\] elsewhere, and f32\[8\] here"
    ):
        parse(SMALL, params={"norm": torch.ones(9)})


def test_two_entries():
    assert parse(TWO).text() == TWO and list(parse(TWO).entries) == ["step", "next"]
