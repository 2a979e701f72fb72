"""DeepSeek-R1, Qwen3, and many after them."""

from accel.runtime.serve.reply.family import Thinking

FAMILY = Thinking(signs=("</think>",), open="<think>", close="</think>")
