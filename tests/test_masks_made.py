"""Every mask that transformers' mask utilities can make: named, or kept as a table, or seen to look ahead."""

from importlib import import_module
from importlib.util import find_spec
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    or_masks,
    packed_sequence_mask_function,
    padding_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from accel import AccelError, optimize
from accel.ir.capture.capture import capture
from accel.ir.ops.attention import Mask, attention
from accel.passes import run
from accel.passes.clean.clean import Clean
from accel.passes.clean.fold import Fold
from accel.passes.recognise.attention import Attention
from accel.passes.recognise.mask import HIDDEN
from accel.passes.recognise.positions import Positions

WIDTH, VOCAB, CONTEXT = 4, 11, 512
TABLE, AHEAD = "table", "ahead"


def config(window=None, chunk=None, form="sdpa"):
    made = LlamaConfig(attn_implementation=form)
    made.sliding_window, made.attention_chunk_size = window, chunk
    return made


def created(name, form="sdpa", given=True, window=None, chunk=None, **more):
    """masking_utils.create_<name>_mask, as models call it; `given`: with position ids."""
    create = getattr(masking_utils, f"create_{name}_mask")
    context = config(window, chunk, form)

    def make(x, index, positions):
        if "bidirectional" in name:
            return create(context, x, None, **more)
        told = {"cache_position": index, "cache": None, "past_key_values": None}
        told = {n: v for n, v in told.items() if n in signature(create).parameters}
        ids = positions if given else None
        return create(context, x, attention_mask=None, position_ids=ids, **told, **more)

    return make


def by(function, maker=sdpa_mask, **more):
    """A mask function of transformers through one of its interfaces."""

    def make(x, index, positions):
        rule = function(x, positions) if function.__code__.co_argcount == 2 else function
        t = x.shape[1]
        queries = t if "q_length" in signature(maker).parameters else index
        return maker(1, queries, t, mask_function=rule, allow_is_causal_skip=False, **more)

    return make


def utils():
    return import_module("transformers.modeling_attn_mask_utils")


def older(name, **more):
    """A function of modeling_attn_mask_utils for sequences without padding."""

    def mask(x, index, positions):
        make = getattr(utils(), name)
        return make(None, (x.shape[0], x.shape[1]), x, 0, **more)

    return mask


def unpadded(causal, window=None):
    """The older converter, given that nothing is padding."""

    def mask(x, index, positions):
        made = utils().AttentionMaskConverter(causal, window)
        b, t = x.shape[:2]
        return made.to_4d(torch.ones(b, t), t, x.dtype, key_value_length=t)

    return mask


def nothing_padded(x, positions):
    ones = torch.ones(x.shape[:2], dtype=torch.bool)
    return and_masks(causal_mask_function, padding_mask_function(ones))


def packed_by_sixes(x, positions):
    """Sequences of six tokens in one row."""
    return and_masks(causal_mask_function, packed_sequence_mask_function(positions // 6))


def chunks_of(size):
    return lambda x, positions: chunked_causal_mask_function(size, x.new_zeros(x.shape[0]).long())


def near_or_third(b, h, q, k):
    return ((q - k) < 4) | (k % 3 == 0)


def early(b, h, q, k):
    return k < 5


def causal_and(*rules):
    return and_masks(causal_mask_function, *rules)


windows = sliding_window_causal_mask_function
MADE = {
    "causal": (created("causal"), Mask("causal")),
    "causal, no positions": (created("causal", given=False), Mask("causal")),
    "causal, eager": (created("causal", "eager"), Mask("causal")),
    "sliding 1": (created("sliding_window_causal", window=1), Mask("window", 1)),
    "sliding 9, eager": (created("sliding_window_causal", "eager", window=9), Mask("window", 9)),
    "sliding 300": (created("sliding_window_causal", window=300), Mask("window", 300)),
    "sliding 511": (created("sliding_window_causal", window=511), Mask("window", 511)),
    "sliding 600": (created("sliding_window_causal", window=600), Mask("causal")),
    "chunked 7": (created("chunked_causal", chunk=7), Mask("chunk", 7)),
    "chunked 200, eager": (created("chunked_causal", "eager", chunk=200), Mask("chunk", 200)),
    "chunked 512": (created("chunked_causal", chunk=512), Mask("causal")),
    "vmap, and": (created("causal", and_mask_function=near_or_third), TABLE),
    "vmap, or": (created("causal", or_mask_function=early), AHEAD),
    "bidirectional": (created("bidirectional"), AHEAD),
    "bidirectional window": (created("bidirectional_sliding_window", window=5), AHEAD),
    "vmap, window": (by(windows(8), use_vmap=True), Mask("window", 8)),
    "window, eager": (by(windows(8), eager_mask), Mask("window", 8)),
    "chunk": (by(chunks_of(6)), Mask("chunk", 6)),
    "padding": (by(nothing_padded), Mask("causal")),
    "packed": (by(packed_by_sixes), Mask("chunk", 6)),
    "window or chunk": (by(or_masks(windows(3), causal_and(near_or_third))), TABLE),
    "window and": (by(and_masks(windows(9), windows(5))), Mask("window", 5)),
    "two windows": (by(or_masks(windows(9), windows(5))), Mask("window", 9)),
    "prefix": (by(or_masks(causal_mask_function, early)), AHEAD),
    "both ways": (by(bidirectional_mask_function), AHEAD),
    "both ways, window": (by(sliding_window_bidirectional_mask_function(4)), AHEAD),
    "older": (older("_prepare_4d_causal_attention_mask_for_sdpa"), Mask("causal")),
    # these hide what lies more than n tokens back: a window of n + 1
    "older, window": (older("_prepare_4d_causal_attention_mask", sliding_window=5), Mask("window", 6)),
    "older, padding": (unpadded(True, 12), Mask("window", 13)),
    "older, both ways": (unpadded(False), AHEAD),
}  # fmt: skip
if find_spec("transformers.modeling_attn_mask_utils") is None:  # later versions have none
    MADE = {name: made for name, made in MADE.items() if not name.startswith("older")}


CAUSAL = [name for name, (_, want) in MADE.items() if want != AHEAD]


class Made(nn.Module):
    """One attention per mask, so that one capture shows them all."""

    def __init__(self, *names):
        super().__init__()
        self.names = names
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in names)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.requires_grad_(False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens)
        index = torch.arange(tokens.shape[1])
        for name, qkv in zip(self.names, self.qkv, strict=True):
            q, k, v = (y[:, None] for y in qkv(x).chunk(3, -1))
            mask = MADE[name][0](x, index, positions)
            # without a mask a model says whether its attention is causal
            causal = mask is None and "directional" not in name
            x = x + F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)[:, 0]
        logits: Tensor = self.head(x)
        return logits


def effort(name: str) -> str:
    """Masks that write in place or go through vmap are captured in a second trace: apart from the others."""
    return name.split(",")[0] if name.startswith(("older", "vmap")) else "plain"


@pytest.fixture(scope="module")
def recognised():
    """recognised(name) -> its attention node, and the program."""
    found = {}
    for group in {effort(name) for name in CAUSAL}:
        names = [n for n in CAUSAL if effort(n) == group]
        program = capture(Made(*names), max_context=CONTEXT)
        run(program, [Clean(), Fold(), Positions(), Attention()])
        nodes = program.nodes(attention.default)
        found |= {n: (node, program) for n, node in zip(names, nodes, strict=True)}
    return found.__getitem__


def dense(name: str, length: int) -> Tensor:
    """What transformers' own mask shows at this length, bool [T,T]."""
    index = torch.arange(length)
    mask = MADE[name][0](torch.zeros(1, length, WIDTH), index, index[None])
    if mask is None:
        seen = torch.ones(length, length, dtype=torch.bool)
        return seen if "directional" in name else seen.tril()
    seen = mask if mask.dtype == torch.bool else mask > HIDDEN
    return seen.expand(1, 1, length, length)[0, 0]


def shown(node, program, length: int) -> Tensor:
    """What the recognised attention shows, bool [T,T]."""
    index = torch.arange(length)
    seen = Mask(*node.args[8:10]).visible(index[:, None], index[None])
    if node.args[5] is not None:
        table = program.params[node.args[5].target]
        assert table.shape[1:] == (CONTEXT, CONTEXT)
        seen = seen & (table[0, :length, :length] > HIDDEN)
    return seen


@pytest.mark.few(8)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_mask_is_what_transformers_makes(name, recognised):
    (node, program), want = recognised(name), MADE[name][1]
    if isinstance(want, Mask):
        assert (Mask(*node.args[8:10]), node.args[5]) == (want, None)
    if want == TABLE:
        assert node.args[5] is not None
    for length in (1, 5, 23, 300, CONTEXT):
        assert torch.equal(shown(node, program, length), dense(name, length)), length


@pytest.mark.parametrize("name", [n for n in CAUSAL if MADE[n][1] != TABLE])
def test_a_size_off_by_one_is_told_apart(name):
    """What the test above compares does differ where the size is another one."""
    kind, size = MADE[name][1].kind, MADE[name][1].size
    index = torch.arange(CONTEXT)
    for other in (size - 1, size + 1) if size else ():
        if other > 0:
            wrong = Mask(kind, other).visible(index[:, None], index[None])
            assert not torch.equal(wrong, dense(name, CONTEXT))


@pytest.mark.parametrize("name", [n for n, (_, want) in MADE.items() if want == AHEAD])
def test_a_mask_that_looks_ahead_is_refused(name):
    with pytest.raises(AccelError, match="lets a token attend to later tokens"):
        optimize(Made(name), target="eager", max_context=48)
