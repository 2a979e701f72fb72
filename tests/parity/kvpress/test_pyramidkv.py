"""`pyramidkv` against PyramidKVPress."""

from types import SimpleNamespace

from accel.runtime.kv.budget.pyramidkv import PyramidKV

from ..presses import kvpress


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
