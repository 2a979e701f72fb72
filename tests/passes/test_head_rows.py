"""The output head computes the tokens that are asked for alone, whatever lies beside its logits."""

import pytest
import torch

from accel.ir.parser.read import parse
from accel.ir.spec import verify
from accel.passes.state.head import Head

BEGIN = """step(tokens: i64[B,T], positions: i64[B,T]):
  embed: f32[11,8]
  other: f32[3,8]
  norm: f32[8]
  %0: f32[B,T,8] = embedding(embed, tokens)
  %1: f32[B,T,8] = exp(%0)
  %2: f32[B,T,8] = mul.Tensor(%1, norm)
  %3: f32[B,T,11] = linear(%2, embed)
"""
ENDS = {
    "the stream": ("%4: f32[B,T,19] = cat([%3, %1], -1)", 8),
    "another product": (
        "%4: f32[B,T,3] = linear(%2, other)",
        "%5: f32[B,T,14] = cat([%3, %4], -1)",
        8,
    ),
    "what no token goes into by itself": (
        "%4: f32[B,T,8] = cumsum(%1, 1)",
        "%5: f32[B,T,19] = cat([%3, %4], -1)",
        19,
    ),
}


@pytest.mark.parametrize("beside", ENDS)
def test_rows_are_taken_before_the_output_head(beside):
    *lines, width = ENDS[beside]
    last = lines[-1].partition(":")[0]
    text = BEGIN + "".join(f"  {line}\n" for line in lines) + f"  return logits={last}\n"
    given = parse(text)
    generator = torch.Generator().manual_seed(0)
    for name in given.params:
        given.params[name] = torch.randn(given.params.blank(name).shape, generator=generator)
    tokens = torch.randint(11, (2, 5), generator=generator)
    inputs = {"tokens": tokens, "positions": torch.arange(5).repeat(2, 1)}
    whole = given.run("step", inputs)["logits"]
    Head().run(given)
    verify(given, "head")
    (taken,) = given.nodes(torch.ops.accel.take_rows.default)
    assert taken.args[0].meta["val"].shape[-1] == width
    rows = torch.tensor([[4, 0], [2, 2]])
    found = given.run("step", {**inputs, "rows": rows})["logits"]
    torch.testing.assert_close(found, whole[torch.arange(2)[:, None], rows])
