"""Checkpoints as other tools quantise them, written from the formats' descriptions: weight [N,K] of a module ->
its tensors, and the float32 weight that they stand for.
"""

import json
from functools import partial

import torch
from safetensors.torch import load_file, save_file


def words(codes, bits):
    """Codes [R,n] -> int32 [R,W], one after another from the lowest bits on."""
    out = []
    for row in codes.tolist():
        number = sum(code << (bits * i) for i, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        out.append([number >> (32 * i) & 0xFFFFFFFF for i in range(count)])
    return signed(torch.tensor(out))


def loose(codes, bits):
    """Codes [R,n] -> int32 [R,W], as many whole ones as fit into each."""
    per = 32 // bits
    parts = [
        sum(code << (bits * i) for i, code in enumerate(row[at : at + per]))
        for row in codes.tolist()
        for at in range(0, len(row), per)
    ]
    return signed(torch.tensor(parts).view(len(codes), -1))


def signed(numbers):
    return torch.where(numbers >= 2**31, numbers - 2**32, numbers).to(torch.int32)


def drawn(weight, bits, group, symmetric):
    """Random codes [N,K], scales and zero points [N,G], like the weight in size."""
    rows, columns = weight.shape
    many = -(-columns // group)
    codes = torch.randint(0, 2**bits, (rows, columns))
    middle = torch.full((rows, many), 2 ** (bits - 1))
    zeros = middle if symmetric else torch.randint(1, 2**bits, (rows, many))
    scales = (0.5 + torch.rand(rows, many)) * weight.std() * 3.5 / 2**bits
    return codes, scales.half(), zeros


def spread(codes, scales, zeros, groups):
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def gptq(weight, bits=4, group=32, symmetric=False, order=False, less=1, g_idx=True):
    codes, scales, zeros = drawn(weight, bits, group, symmetric)
    groups = torch.arange(weight.shape[1]) // group
    if order:  # alike for all that read one input, as calibration makes it
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(3))]
    tensors = {
        "qweight": words(codes.t().t(), bits).t(),
        "qzeros": words((zeros.t() - less) % 2**bits, bits),
        "scales": scales.t(),
    }
    if g_idx:
        tensors["g_idx"] = groups.int()
    return tensors, spread(codes, scales, zeros, groups)


def awq(weight, group=32):
    codes, scales, zeros = drawn(weight, 4, group, False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the row that each place of a word holds

    def packed(rows):  # [.., N]
        return words(rows.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4)

    tensors = {"qweight": packed(codes.t()), "qzeros": packed(zeros.t()), "scales": scales.t()}
    return tensors, spread(codes, scales, zeros, torch.arange(weight.shape[1]) // group)


def packed(weight, bits=4, group=32, symmetric=True, pack=words):
    """compressed-tensors' pack-quantized."""
    group = group or weight.shape[1]
    codes, scales, zeros = drawn(weight, bits, group, symmetric)
    tensors = {
        "weight_packed": pack(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(zeros.t(), bits).t()
    return tensors, spread(codes, scales, zeros, torch.arange(weight.shape[1]) // group)


def int8(weight, symmetric=True):
    """compressed-tensors' int-quantized, a scale per row."""
    codes, scales, zeros = drawn(weight, 8, weight.shape[1], symmetric)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
    return tensors, spread(codes, scales, zeros, torch.zeros(weight.shape[1], dtype=torch.int64))


def float8(weight, block=None, scale_name="weight_scale"):
    """One scale per row, or per block of rows and columns, or (`()`) for all."""
    rows, columns = weight.shape
    shape = (
        (rows, 1)
        if block is None
        else [-(-n // b) for n, b in zip(weight.shape, block, strict=True)]
        if block
        else ()
    )
    scale = (0.5 + torch.rand(shape)) * weight.abs().max() / 448
    if block:
        wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        wide = wide[:rows, :columns]
    else:
        wide = scale
    held = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": held, scale_name: scale}, held.float() * wide


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def float4(weight, whole):
    """compressed-tensors' nvfp4 (`whole`: a scale of all, groups of 16) and mxfp4 (powers of two, groups of 32)."""
    group = 16 if whole else 32
    codes = torch.randint(0, 16, weight.shape)
    values = torch.tensor([*E2M1, *(-v for v in E2M1)])[codes]
    tensors = {"weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    shape = (len(weight), weight.shape[1] // group)
    if whole:
        scale = (100 + 200 * torch.rand(shape)).to(torch.float8_e4m3fn)
        tensors |= {
            "weight_scale": scale,
            "weight_global_scale": torch.tensor([2000 / weight.std()]),
        }
        scales = scale.float() / tensors["weight_global_scale"]
    else:
        exponent = torch.randint(122, 125, shape)
        tensors["weight_scale"] = exponent.to(torch.uint8)
        scales = 2.0 ** (exponent - 127)
    return tensors, values * scales.repeat_interleave(group, 1)


NF4 = torch.linspace(-1, 1, 16) ** 3  # a file brings its own table


def nf4(weight, block=64, nested=False):
    """bitsandbytes in 4 bits."""
    codes = torch.randint(0, 16, (weight.numel(),))
    count = -(-len(codes) // block)
    scales = (1 + torch.rand(count)) * weight.std() * 2
    told = {
        "quant_type": "nf4",
        "blocksize": block,
        "dtype": "float16",
        "shape": list(weight.shape),
    }
    tensors = {
        "weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1),
        "weight.quant_map": NF4,
        "weight.absmax": scales,
    }
    if nested:
        index, table = torch.randint(0, 256, (count,)), torch.linspace(-1, 1, 256)
        outer = torch.rand(-(-count // 4)) * float(weight.std())
        offset = 3 * float(weight.std())
        scales = table[index] * outer.repeat_interleave(4)[:count] + offset
        tensors |= {
            "weight.absmax": index.to(torch.uint8),
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": table,
        }
        told |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": offset}
    text = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = text
    value = NF4[codes] * scales.repeat_interleave(block)[: len(codes)]
    return tensors, value.view(weight.shape)


def llm_int8(weight):
    """bitsandbytes in 8 bits."""
    codes, largest = torch.randint(-127, 128, weight.shape).to(torch.int8), weight.abs().amax(1)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * (largest / 127).unsqueeze(1)


def scheme(form, bits=4, group=None, more=None, **weights):
    """compressed-tensors' `quantization_config`."""
    told = {"num_bits": bits, "group_size": group, "block_structure": None, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": told, **(more or {})}}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": groups,
    }


def told(method, **more):
    return {"quant_method": method, **more}


PACK = "pack-quantized"
# name -> (quantization_config, writer, whether it stays in codes)
FORMATS = {
    "gptq": (told("gptq", bits=4, group_size=32, sym=False), gptq, True),
    "gptq-order": (told("gptq", bits=4, group_size=32), partial(gptq, order=True), True),
    "gptq-2": (told("gptq", bits=2, group_size=16), partial(gptq, bits=2, group=16), True),
    "gptq-3": (told("gptq", bits=3, group_size=-1), partial(gptq, bits=3, group=10**6, g_idx=False), True),
    "gptq-8": (told("gptq", bits=8, group_size=64), partial(gptq, bits=8, group=64), True),
    "gptq-v2": (
        told("gptq", bits=4, group_size=32, checkpoint_format="gptq_v2"),
        partial(gptq, less=0),
        True,
    ),
    "gptq-symmetric": (
        told("gptq", bits=4, group_size=32, sym=True),
        partial(gptq, symmetric=True),
        True,
    ),
    "gptq-called-v1": (  # zero points as they are, under the name of the format that lessens them
        told("gptq", bits=4, group_size=32, sym=True),
        partial(gptq, symmetric=True, less=0),
        True,
    ),
    "awq": (told("awq", bits=4, group_size=32, version="gemm"), awq, True),
    "packed-4": (scheme(PACK, group=32), packed, True),
    "packed-zeros": (scheme(PACK, group=32), partial(packed, symmetric=False), True),
    "packed-row": (scheme(PACK, 4), partial(packed, group=None), True),
    "packed-3": (scheme(PACK, 3, 32), partial(packed, bits=3, symmetric=False), True),
    "packed-3-loose": (scheme(PACK, 3, 32), partial(packed, bits=3, symmetric=False, pack=loose), True),
    "packed-8": (scheme(PACK, 8, 48), partial(packed, bits=8, group=48), True),
    "packed-24": (scheme(PACK, 4, 24), partial(packed, group=24), False),  # no multiple of 16
    "int8": (scheme("int-quantized", 8, more={"input_activations": {"num_bits": 8}}), int8, True),
    "int8-zeros": (scheme("naive-quantized", 8), partial(int8, symmetric=False), True),
    "float8": (scheme("float-quantized", 8), float8, False),
    "float8-all": (scheme("float-quantized", 8), partial(float8, block=()), False),
    "float8-block": (
        scheme("float-quantized", 8, block_structure=[32, 48]),
        partial(float8, block=(32, 48)),
        False,
    ),
    "nvfp4": (scheme("nvfp4-pack-quantized", 4, 16), partial(float4, whole=True), True),
    "mxfp4": (scheme("mxfp4-pack-quantized", 4, 32), partial(float4, whole=False), True),
    "fp8": (
        told("fp8", weight_block_size=[32, 32]),
        partial(float8, block=(32, 32), scale_name="weight_scale_inv"),
        False,
    ),
    "nf4": (told("bitsandbytes", load_in_4bit=True), nf4, False),
    "nf4-nested": (told("bitsandbytes", load_in_4bit=True), partial(nf4, nested=True), False),
    "int8-bitsandbytes": (told("bitsandbytes", load_in_8bit=True), llm_int8, True),
}  # fmt: skip


def quantise(model, folder, config, writer, left=("lm_head",)):
    """Write a model's checkpoint with all its linear weights (but `left`) in a format; its floats as the format
    has them.
    """
    torch.manual_seed(7)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    linears = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    found, floats = {}, {}
    for name, value in load_file(file).items():
        module = name.removesuffix(".weight")
        taken = module in linears or ".experts." in name
        if not taken or module in left or value.dim() != 2:
            found[name] = value.half()
            floats[name] = value.half().float()
            continue
        tensors, floats[name] = writer(value)
        found |= {f"{module}.{part}": t.clone().contiguous() for part, t in tensors.items()}
    save_file(found, file, metadata={"format": "pt"})
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "quantization_config": config}))
    return floats
