"""gpt-oss."""

from accel.runtime.serve.reply.family import Family, Header
from accel.runtime.serve.reply.forms.named_json import NamedJson

FAMILY = Family(
    signs=("<|start|>", "<|channel|>", "<|message|>"),
    form=NamedJson("<|message|>", note=(" ", "<|constrain|>", "json")),
    open="<|channel|>",
    begin="commentary to=functions.",
    header=Header(
        opens=("<|start|>", "<|channel|>"),
        close="<|message|>",
        ends=("<|end|>", "<|call|>", "<|return|>"),
        thinks="analysis",
        answers="final",
        calls="to=functions.",
        again="assistant",
    ),
)
