"""Run as a script, without the interpreter: compiles every kernel for a GPU that need not be there (its
capability is the argument) at sizes that the host code gives it, and prints a line of JSON for each.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor
from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

TYPES = {
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
CAPABILITY = int(sys.argv[1])


def compile_instead(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Stands in for a launch."""
    options = {k: kwargs.pop(k) for k in ("num_warps", "num_stages") if k in kwargs}
    given = dict(zip(self.arg_names, args, strict=False)) | kwargs
    types: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    for i, param in enumerate(self.params):
        value = given[param.name]
        if param.is_constexpr or (isinstance(value, int) and value == 1):
            types[param.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, Tensor):
            types[param.name], hints[(i,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            types[param.name] = "i32"
            if value % 16 == 0:
                hints[(i,)] = [["tt.divisibility", 16]]
        else:
            types[param.name] = "fp32"
    source = ASTSource(self, types, constants, hints)
    made = compiled(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    text = made.asm["ptx"]
    line = {
        "kernel": self.__name__, "shared": made.metadata.shared, "products": text.count("mma"),
        "exact": text.count("div.rn.f32"),
    }  # fmt: skip
    print(json.dumps(line))


JITFunction.run = compile_instead

from accel.lowering.triton import lowered  # noqa: E402
from accel.lowering.triton.rules import accel_attention, accel_cache  # noqa: E402

lowered._load_rules()
accel_attention._precision = lambda device: "tf32x3"
accel_attention._processors = lambda device: 132


def attend(tokens: int, width: int, mask: str, **more: Any) -> None:
    q, k = torch.zeros(1, 8, tokens, width), more.get("codes", torch.zeros(1, 2, 1024, width))
    q_pos, k_pos = torch.arange(tokens)[None], torch.arange(1024)[None]
    lists = accel_attention.survey(q_pos, k_pos, mask, 128, 4, width)
    parts = [(k, k, k_pos, more.get("scales"), lists)]
    if paged := more.get("paged"):
        parts.insert(0, paged)
    options = [more.get(name) for name in ("sink", "tree", "first")]
    cap = more.get("cap", 0.0)
    accel_attention.attended(q, q_pos, parts, more.get("bias"), 0.1, cap, mask, 128, *options)


attend(1, 128, "causal")
attend(64, 64, "window")
codes, scale = torch.zeros(1, 2, 1024, 64, dtype=torch.int8), torch.zeros(1, 2, 1024)
tree, first = torch.ones(1, 5, 5, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
attend(
    5, 64, "chunk", codes=codes, scales=(scale, scale), cap=3.0, sink=torch.zeros(8), tree=tree,
    first=first, bias=torch.zeros(8, 100),
)  # fmt: skip
pool, pages = codes.view(64, 2, 16, 64), torch.zeros(1, 64, dtype=torch.int64)
positions, scales = torch.zeros(1, 2, 1024, dtype=torch.int64), (scale.view(64, 2, 16),) * 2
attend(1, 64, "causal", paged=(pool, pool, positions, scales, None, None, pages))
attend(2, 32, "full", bias=torch.zeros(8, 100, 100))
x, table = torch.zeros(1, 2, 3, 128), torch.zeros(8, 64)
turn = (torch.zeros(1, 3, dtype=torch.int64), table, table, False)
slots = torch.zeros(1, dtype=torch.int64)
accel_cache.turned(x, *turn[:3], True)
buffers = (torch.zeros(1, 2, 16, 128), torch.zeros(1, 2, 16, 128))
accel_cache.place_both(*buffers, x, x, slots, turn)
rounded = (torch.zeros(1, 2, 16, 128, dtype=torch.int8), torch.zeros(1, 2, 16))
accel_cache.place_rounded(*rounded, x, slots, turn)
sys.stdout.flush()
