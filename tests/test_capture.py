"""Capture: what it refuses and in which words, what it leaves as it was, and the traps of exporting."""

import models
import parity
import pytest
import torch
import torch.nn.functional as F
from models import tiny
from torch import nn
from torch.export import Dim

from accel import CaptureError, PassError, optimize
from accel.compiler.smoke.tiny_models import CONTEXT, small_config, small_model
from accel.ir.capture.capture import capture
from accel.ir.capture.examples import example
from accel.ir.program import Program

BOTH = ({0: Dim("B", min=1), 1: Dim("T", min=1)},)


class Around(nn.Module):
    """The tiny model inside another forward."""

    def __init__(self, forward):
        super().__init__()
        self.inner, self.call, self.calls = tiny(), forward, 0

    def forward(self, tokens):
        return self.call(self, tokens)


def same(program: Program, model: nn.Module, sizes=((1, 1), (2, 3), (3, 17), (5, 7))) -> None:
    for batch, length in sizes:
        tokens, positions = example(batch, length, program.facts.vocab_size, seed=length)
        got = program.run("step", {"tokens": tokens, "positions": positions})["logits"]
        torch.testing.assert_close(got, parity.logits(model, tokens), atol=1e-4, rtol=1e-4)


def exported(model: nn.Module, *inputs, shapes=BOTH):
    return torch.export.export(model, inputs, dynamic_shapes=shapes, strict=False)


# Refusals


@pytest.mark.parametrize("what", [3, None, models.PlainSdpa, {"a": 1}, lambda tokens: tokens])
def test_what_is_no_module_is_refused(what):
    with pytest.raises(
        CaptureError, match="cannot capture a .*; give an nn.Module, a Hugging Face"
    ):
        optimize(what)


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        (lambda self, t: self.inner(t)[:, -1], r"shape \[5, 31\] and dtype torch.float32"),
        (lambda self, t: self.inner(t).long(), "dtype torch.int64"),
        (lambda self, t: None, "NoneType"),
        (lambda self, t: {"hidden": self.inner(t)}, "dict"),
        (lambda self, t: 3, "int"),
    ],
)
def test_a_forward_without_logits_is_refused(forward, found):
    with pytest.raises(CaptureError, match=rf"Around.forward returned .*{found}.*, not logits"):
        capture(Around(forward))


@pytest.mark.parametrize(
    "pack",
    [lambda x: (x, 3), lambda x: {"logits": x}, lambda x: [x]],
    ids=["tuple", "dict", "list"],
)
def test_logits_are_found_in_what_is_returned(pack):
    model = Around(lambda self, t: pack(self.inner(t)))
    same(capture(model), model.inner)


def test_a_forward_that_does_not_take_token_ids_is_refused():
    model = Around(lambda self, t: self.inner.head(t))
    with pytest.raises(CaptureError, match=r"Around.forward failed on token ids \[B,T\].*mat1"):
        capture(model)


class Branch(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.blocks = tiny(), nn.ModuleList([nn.Identity(), Branch()])

    def forward(self, tokens):
        x = self.inner(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_branch_on_values_is_refused_by_module_and_guard():
    with pytest.raises(CaptureError) as caught:
        capture(Deep())
    text = str(caught.value)
    assert "Deep cannot be captured: blocks.1 (Branch.forward, line" in text
    assert "Could not guard on data-dependent expression" in text
    assert "rewrite that line with torch.where" in text and len(text) < 600


def test_a_branch_on_the_length_is_refused_not_narrowed():
    model = Around(lambda self, t: self.inner(t) * (2 if t.shape[1] > 9 else 1))
    with pytest.raises(
        CaptureError, match=r"for some numbers of tokens, where .*T <= 9, and otherwise"
    ):
        capture(model)


def counted(self, tokens):
    self.calls += 1
    return self.inner(tokens) * self.calls


@pytest.mark.parametrize(
    "forward",
    [counted, lambda self, t: F.dropout(self.inner(t), 0.5, training=True)],
    ids=["counter", "dropout"],
)
def test_state_and_randomness_are_refused(forward):
    with pytest.raises(
        CaptureError, match="differs from the module by .* Python state or randomness"
    ):
        capture(Around(forward))


def test_weights_without_values_are_refused():
    with pytest.raises(CaptureError, match="PlainSdpa has weights on the meta device"):
        capture(tiny().to("meta"))


def test_tokens_mixed_outside_attention_are_refused():
    model = Around(lambda self, t: self.inner(t) + self.inner(t).cumsum(1))
    with pytest.raises(
        PassError, match="mixes tokens outside attention; accel can cache only attention"
    ):
        optimize(model, target="eager", max_context=32)


# Exported programs


def test_an_exported_program_is_taken():
    model = tiny()
    program = capture(exported(model, example(5, 7, 31)[0]))
    same(program, model)
    assert program.facts.vocab_size == 31
    with optimize(exported(model, example(5, 7, 31)[0]), max_context=64, max_batch=3) as compiled:
        tokens = example(3, 9, 31)[0]
        got = torch.from_numpy(compiled.logits(tokens.numpy()))
        torch.testing.assert_close(got, parity.logits(model, tokens), atol=1e-4, rtol=1e-4)
        assert compiled.facts.parameters == sum(p.numel() for p in model.parameters())


class Given(nn.Module):
    """Positions are given, or a mask that accel does not know."""

    def __init__(self):
        super().__init__()
        self.inner = tiny()

    def forward(self, tokens, positions):
        x = self.inner.tokens(tokens) + self.inner.positions(positions)
        for block in self.inner.blocks:
            x = block(x)
        return self.inner.head(self.inner.norm(x))


def test_positions_may_be_an_input():
    model, (tokens, positions) = Given(), example(5, 7, 31)
    program = capture(exported(model, tokens, positions, shapes=BOTH * 2))
    same(program, model.inner)
    shifted = program.run("step", {"tokens": tokens, "positions": positions + 3})["logits"]
    with torch.no_grad():
        torch.testing.assert_close(shifted, model(tokens, positions + 3))
    same(capture(model), model.inner)


def test_exported_programs_that_do_not_fit_are_refused():
    tokens = example(5, 7, 31)[0]
    with pytest.raises(CaptureError, match="fixes T = 7; export again with dynamic_shapes"):
        capture(exported(tiny(), tokens, shapes=({0: Dim("B", min=1)},)))
    with pytest.raises(CaptureError, match="fixes B = 5; export again"):
        capture(exported(tiny(), tokens, shapes=({1: Dim("T", min=1)},)))
    with pytest.raises(CaptureError, match=r"takes \['tokens', 'positions'\]; .* wrap the model"):
        capture(wide(tokens))
    first = exported(Around(lambda self, t: self.inner(t)[:, -1]), tokens)
    with pytest.raises(CaptureError, match=r"output has shape .*, not logits \[B,T,V\]"):
        capture(first)


def wide(tokens):
    """An ExportedProgram with a float input beside the tokens."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny()

        def forward(self, tokens, positions):
            return self.inner(tokens) * positions

    shapes = (BOTH[0], None)
    return torch.export.export(Scaled(), (tokens, torch.ones(1)), dynamic_shapes=shapes)


# The module afterwards


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_left_as_it_was(fails):
    model = Deep() if fails else Around(lambda self, t: self.inner(t))
    model.train()
    model.inner.blocks[0].mlp.eval()
    before = {n: m.training for n, m in model.named_modules()}
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    if fails:
        with pytest.raises(CaptureError):
            capture(model)
    else:
        capture(model)
    assert {n: m.training for n, m in model.named_modules()} == before
    assert all(torch.equal(t, weights[n]) for n, t in model.state_dict().items())


def test_the_attention_implementation_is_left_as_it_was(monkeypatch):
    model = models.make("llama", 1)
    model.set_attn_implementation("eager")
    program = capture(model)
    assert model.config._attn_implementation == "eager"
    names = {str(n.target) for n in program.nodes()}
    assert "aten.scaled_dot_product_attention.default" in names, "captured in the shorter form"


@pytest.mark.parametrize(
    "fields", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}]
)
def test_a_scale_that_some_versions_of_sdpa_leave_out_is_kept(fields):
    from transformers import GPT2LMHeadModel

    model = models.randomise(GPT2LMHeadModel(small_config("gpt2", **fields)), "gpt2")
    program = capture(model)
    model.set_attn_implementation("eager")
    plain = GPT2LMHeadModel(small_config("gpt2", attn_implementation="eager")).eval()
    plain.load_state_dict(model.state_dict())
    tokens = torch.arange(9)[None]
    assert (parity.logits(model, tokens) - parity.logits(plain, tokens)).abs().max() > 0.1
    same(program, model)


# Precision and ties


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_computed_in_float32(dtype):
    model = tiny().to(dtype)
    with optimize(model, max_context=64) as compiled:
        tokens = example(1, 9, 31)[0]
        got = torch.from_numpy(compiled.logits(tokens.numpy()))
        assert any(str(dtype).split(".")[1] in note for note in compiled.report["notes"])
    want = parity.logits(tiny().to(dtype).float(), tokens)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert next(model.parameters()).dtype is dtype, "the user's module keeps its precision"


def test_tied_weights_stay_one():
    model = tiny()
    program = capture(model)
    assert "head.weight" not in program.params
    weights = sum(t.numel() for t in program.params.values())
    assert weights == program.facts.parameters == sum(p.numel() for p in model.parameters())
    loose = tiny()
    loose.head.weight = nn.Parameter(loose.head.weight.detach().clone())
    assert capture(loose).facts.parameters == program.facts.parameters + 31 * 12


# Traps of torch.export


@pytest.mark.few(1)
@pytest.mark.parametrize(("heads", "size"), [(5, 7), (7, 5), (11, 13)])
def test_sizes_of_the_model_do_not_fix_the_length(heads, size):
    """The lengths tried first while tracing are sizes of this model."""
    model = models.PlainSoftmax(vocab=17, width=heads * size, heads=heads, size=size + 1, layers=1)
    model = models.randomise(model, "odd")
    program = capture(model)
    lengths = {heads, size, size + 1, 2, 17}
    same(program, model, [(b, t) for b in (1, heads, 2) for t in lengths])


def test_examples_are_contiguous():
    assert all(t.is_contiguous() for t in example(3, 5, 9))


def test_a_buffer_that_ends_lowers_the_context():
    model = models.randomise(models.PlainSoftmax(layers=1), "buffer")  # its mask is 256 long
    with optimize(model, max_context=1000) as compiled:
        assert compiled.facts.max_context == 256
        assert any("max_context is 256" in note for note in compiled.report["notes"])
        tokens = example(1, 256, 93)[0]
        got = torch.from_numpy(compiled.logits(tokens.numpy()))
        torch.testing.assert_close(got, parity.logits(model, tokens), atol=1e-3, rtol=1e-3)


def test_writes_in_place_and_nested_graphs_are_taken():
    def forward(self, tokens):
        with torch.no_grad():
            x = self.inner(tokens)
        return x.mul_(2).add_(1)

    model = Around(forward)
    program = capture(model)
    same(program, model)
    with optimize(model, target="eager", max_context=32) as compiled:
        tokens = example(1, 5, 31)[0]
        got = torch.from_numpy(compiled.logits(tokens.numpy()))
        torch.testing.assert_close(got, parity.logits(model, tokens), atol=1e-4, rtol=1e-4)


def test_a_comparison_in_place_gives_numbers():
    """x.gt_(y) keeps the type of x; x > y, which is bool, may not stand for it."""

    def forward(self, tokens):
        x = self.inner(tokens)
        return (x * 2).gt_(0.1) * x

    model = Around(forward)
    program = capture(model)
    same(program, model)
    (node,) = program.nodes(torch.ops.aten.gt.Scalar)
    assert node.meta["val"].dtype == torch.bool


def test_a_compiled_module_is_taken_as_the_module_it_was():
    program = capture(torch.compile(tiny()))
    same(program, tiny())
    assert program.facts.name == "PlainSdpa" and "tokens.weight" in program.params


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["mpt", "xglm"])
def test_the_configurations_own_limit_ends_the_context(kind):
    """MPT computes its biases up to there; XGLM's table is two longer, and it writes into positions."""
    model = small_model(kind)
    program = capture(model)
    assert program.facts.max_context == CONTEXT
    same(program, model)


def test_a_model_that_refines_a_canvas_is_refused():
    """In words: export says only that a length is a constant."""

    class Refines(torch.nn.Module):
        def forward(self, input_ids, decoder_input_ids=None, self_conditioning_logits=None):
            return torch.zeros(len(input_ids), 8, 16)

    with pytest.raises(CaptureError, match="Refines refines a canvas .* give one with config.mask"):
        capture(Refines(), max_context=32)
