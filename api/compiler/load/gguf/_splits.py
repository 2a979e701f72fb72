"""How byte-level BPE splits text before it merges, by the names that llama.cpp's files have for it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_ENDINGS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_LOWER, _UPPER = r"((?=[\p{L}])([^A-Z]))", r"((?=[\p{L}])([^a-z]))"
_LAST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(ending: str, digits: str) -> str:
    """Words by upper and lower case."""
    head = r"[^\r\n\p{L}\p{N}]?"
    words = f"{head}{_UPPER}*{_LOWER}+{ending}|{head}{_UPPER}+{_LOWER}*{ending}"
    return f"{words}|{digits}|{_LAST}"


_ASCII = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CASED = (  # letters of two cases, as DeepSeek's tokenizer lists them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-"
    "\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e"
    "\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-"
    "\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_LLAMA = ["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"]
_GLM = ["glm4", "glm5"]

# patterns, one after the other -> the names that tokenizer.ggml.pre has for them
_SPLITS: list[tuple[Sequence[str], Sequence[str]]] = [
    ([_GPT2], ["gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "trillion", "exaone4"]),
    ([_GPT2], ["granite-docling", "roberta-bpe"]),
    ([r"\p{N}", _GPT2], ["starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"]),
    ([_LLAMA3], [*_LLAMA, *_GLM, "dbrx", "smaug-bpe", "chatglm-bpe"]),
    ([_QWEN2], ["qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "kormo", "solar-open", "grok-2"]),
    ([_QWEN35], ["qwen35"]),
    ([_SEED], ["seed-coder"]),
    ([_LING], ["bailingmoe", "bailingmoe2", "llada-moe"]),
    ([_cased("", r"\p{N}")], ["tekken"]),
    ([_cased(f"{_ENDINGS}?", r"\p{N}{1,3}")], ["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"]),
    ([r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"], ["deepseek-coder"]),
    ([r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_SIGNS}]+", r"\s+$", _HAN, r"\p{N}+"], ["deepseek-llm"]),
    ([r"\p{N}{1,3}", _KANA, f"{_ASCII}|{_MARKED}"], ["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"]),
    ([r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"], ["falcon"]),
    ([r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"], ["default"]),
]  # fmt: skip
WHOLE = (*_LLAMA, *_GLM, "tekken")  # of which words that are tokens are not merged
BEGUN = (*_LLAMA, "tekken")  # of which a text begins with bos, where the file does not say


def patterns(name: object) -> Sequence[str]:
    """The patterns of a name. Raises ValueError with the near one."""
    found = next((patterns for patterns, names in _SPLITS if name in names), None)
    if found is None:
        near = difflib.get_close_matches(str(name), [n for _, names in _SPLITS for n in names], n=1)
        hint = f" (near: {near[0]})" if near else ""
        raise ValueError(f"accel does not know how its tokenizer, {name!r}, splits text{hint}")
    return found
