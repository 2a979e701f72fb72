"""`pyramidkv` against PyramidKVPress."""

from types import SimpleNamespace

import pytest

from accel.runtime.kv.budget.pyramidkv import PyramidKV

from ...kv_case import recipe
from ..presses import agree_whole, kvpress


def test_layers_get_what_pyramids_give():
    press = kvpress.PyramidKVPress()
    for length in (50, 300, 4096, 5000):
        for ratio in (0.1, 0.5, 0.8, 0.95):
            for beta, window, layers in ((20, 64, 32), (20, 8, 4), (2, 16, 3), (1, 4, 1)):
                press.beta, press.window_size, press.compression_ratio = beta, window, ratio
                mine = PyramidKV(compression_ratio=ratio, beta=float(beta), window=window)
                for i in range(layers):
                    module = SimpleNamespace(
                        config=SimpleNamespace(num_hidden_layers=layers), layer_idx=i
                    )
                    want = press.get_layer_budget(module, length)
                    assert mine.tokens(length, i, layers) == want, (length, ratio, beta, window, i)


@pytest.mark.long
def test_the_same_tokens_stay_in_every_layer(stateful):
    budget = {"use": "pyramidkv", "compression_ratio": 0.5, "beta": 5.0, "window": 4}
    press = kvpress.PyramidKVPress(0.5, window_size=4, kernel_size=3, beta=5)
    agree_whole(stateful, recipe("snapkv") | {"kv.budget": budget}, press)
