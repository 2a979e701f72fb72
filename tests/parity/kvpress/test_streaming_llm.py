"""`streaming-llm` against StreamingLLMPress."""

from accel.passes.kv.score.streaming_llm import StreamingLlm

from ...kv_case import recipe
from ..presses import agree, agree_whole, kvpress


def test_the_same_tokens_stay():
    agree(StreamingLlm(sinks=3), lambda ratio: kvpress.StreamingLLMPress(ratio, n_sink=3))


def test_the_same_tokens_stay_in_every_layer(stateful):
    tables = recipe("streaming-llm") | {"kv.budget": {"use": "uniform", "compression_ratio": 0.5}}
    agree_whole(stateful, tables, kvpress.StreamingLLMPress(0.5, n_sink=2))
