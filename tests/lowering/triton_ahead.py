"""Run as a script, without the interpreter: compiles what kernels' files say in VARIANTS for a GPU that need not be
there, and prints a line of JSON for each. Arguments: the GPU's capability, and files' names, each with the numbers of
variants behind a colon, or without one for all.
"""

import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITY = int(sys.argv[1])
DUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def source(variant: Any) -> ASTSource:
    """Pointers are aligned, as PyTorch's are; no number is known to be a multiple of 16."""
    by_name = {name: t for t, names in variant.types.items() for name in names.split()}
    params = variant.kernel.params
    missing = {p.name for p in params} ^ (by_name.keys() | variant.constants.keys())
    assert not missing, (
        f"{variant.kernel.__name__}: operands that one of the two does not know: {missing}"
    )
    types = {p.name: by_name.get(p.name, "constexpr") for p in params}
    constants = {
        (i,): variant.constants[p.name] for i, p in enumerate(params) if p.name not in by_name
    }
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, p in enumerate(params)
        if types[p.name].startswith("*")
    }
    return ASTSource(variant.kernel, types, constants, hints)


def resources(binary: bytes) -> dict[str, int]:
    """Registers, bytes of stack and of local memory (what was spilled) of a program's thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run(
            [str(DUMP), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    words = (w.split(":") for w in said.replace("\n", " ").split() if w.count(":") == 1)
    return {k.lower(): int(v) for k, v in words if k in ("REG", "STACK", "LOCAL") and v.isdigit()}


for asked in sys.argv[2:]:
    name, _, numbers = asked.partition(":")
    variants = importlib.import_module(f"accel.lowering.triton.kernels.{name}").VARIANTS
    for i in map(int, numbers.split(",")) if numbers else range(len(variants)):
        variant = variants[i]
        if variant.since > CAPABILITY:
            continue
        options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
        made = triton.compile(source(variant), GPUTarget("cuda", CAPABILITY, 32), options)
        text = made.asm["ptx"]
        line = {
            "file": name, "variant": i, "kernel": variant.kernel.__name__, "shared": made.metadata.shared,
            "products": text.count("mma"), "exact": text.count("div.rn.f32"),
            **resources(made.asm["cubin"]),
        }  # fmt: skip
        print(json.dumps(line), flush=True)
