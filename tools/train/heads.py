"""Train drafting heads beside a frozen transformers model: EAGLE-3 (arXiv:2503.01840), and Medusa's (arXiv:2401.10774).

    python tools/train/heads.py MODEL.gguf PROMPTS.jsonl OUT_DIR --text IDS.npy --minutes 5 --device cuda

PROMPTS.jsonl has a chat message a line, as a JSON string; the model answers them itself, half greedily and half at a
temperature of 0.8, and the heads learn from those answers and from rows of IDS.npy (token ids [N]). Features are
computed in each step, so nothing is stored. OUT_DIR gets `eagle3/` in the layout of SafeAILab (config.json,
model.safetensors in float16, ids of the draft's own vocabulary as `d2t` and `t2d`), `medusa/` (residual blocks before
the model's own output projection), and `heads.json` with seconds, losses and how many guesses stand on answers that
were held out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

GUESSES = 5  # tokens that both kinds of head guess
DECAY = 0.8  # weight of a guess's loss, by its depth
IGNORED = -1
SAVED_EVERY = 30.0  # seconds


def rotary(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate x [B,H,T,D] by positions [T], in halves as Llama does."""
    half = x.shape[-1] // 2
    turns = positions[:, None] * theta ** -(torch.arange(half, device=x.device) / half)
    cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Eagle3(nn.Module):
    """One layer over three streams of the model; its rows are the slots of the features."""

    def __init__(self, config: Any, draft_ids: Tensor):
        super().__init__()
        h, d = config.hidden_size, config.hidden_size // config.num_attention_heads
        self.heads, self.groups, self.size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            d,
        )
        self.theta = float(
            getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
        )
        norm = lambda: nn.RMSNorm(h, eps=config.rms_norm_eps)  # noqa: E731
        linear = lambda i, o: nn.Linear(i, o, bias=False)  # noqa: E731
        self.fc = linear(3 * h, h)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            norm(),
            norm(),
            norm(),
        )
        self.q_proj, self.o_proj = linear(2 * h, self.heads * d), linear(self.heads * d, h)
        self.k_proj, self.v_proj = linear(2 * h, self.groups * d), linear(2 * h, self.groups * d)
        inner = config.intermediate_size
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(h, inner),
            linear(h, inner),
            linear(inner, h),
        )
        self.norm, self.lm_head = norm(), linear(h, len(draft_ids))
        self.register_buffer("draft_ids", draft_ids)

    def guesses(self, streams: Tensor, embeds: Tensor) -> Iterator[Tensor]:
        """Logits [B,T,Vd] of each guess in turn. streams [B,T,3H] at slots t, embeds [B,T,H] of tokens t+1.

        At depth j the row of slot s stands behind true features up to s - j and j guesses of its own.
        """
        b, t, _ = embeds.shape
        slots = torch.arange(t, device=embeds.device)
        feature = self.fc(streams)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for depth in range(GUESSES):
            x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(feature)), -1)
            split = lambda y, n: y.view(b, t, n, self.size).transpose(1, 2)  # noqa: E731
            q = rotary(split(self.q_proj(x), self.heads), slots, self.theta)
            repeat = self.heads // self.groups
            keys.append(
                rotary(split(self.k_proj(x), self.groups), slots, self.theta).repeat_interleave(
                    repeat, 1
                )
            )
            values.append(split(self.v_proj(x), self.groups).repeat_interleave(repeat, 1))
            true = (q @ keys[0].transpose(-1, -2)) * self.size**-0.5
            true = true.masked_fill(slots[None] > slots[:, None] - depth, float("-inf"))
            shifted = lambda y, by: F.pad(y, (0, 0, by, 0))[:, :, :t]  # noqa: E731
            own = [
                (q * shifted(keys[i], depth - i)).sum(-1, True) * self.size**-0.5
                for i in range(1, depth + 1)
            ]
            weight = torch.cat((true, *own), -1).softmax(-1, dtype=torch.float32).to(q.dtype)
            mixed = weight[..., :t] @ values[0]
            for i in range(1, depth + 1):
                mixed = mixed + weight[..., t + i - 1, None] * shifted(values[i], depth - i)
            y = feature + self.o_proj(mixed.transpose(1, 2).flatten(2))
            z = self.post_attention_layernorm(y)
            y = y + self.down_proj(F.silu(self.gate_proj(z)) * self.up_proj(z))
            yield self.lm_head(self.norm(y))
            feature = F.pad(y, (0, 0, 1, 0))[:, :t]  # what slot s - 1 gave is the feature of slot s

    def tensors(self, vocabulary: int) -> dict[str, Tensor]:
        """In the published layout."""
        found = {}
        for name, value in self.state_dict().items():
            part = name.split(".")[0]
            inner = {
                "q": "self_attn.",
                "k": "self_attn.",
                "v": "self_attn.",
                "o": "self_attn.",
            }.get(part[0], "")
            if part.endswith("_proj"):
                name = f"midlayer.{inner or 'mlp.'}{name}"
            elif part.endswith(("_norm", "layernorm")):
                name = f"midlayer.{name}"
            if part != "draft_ids":
                found[name] = value.half().cpu().contiguous()
        ids = self.draft_ids.cpu()
        taken = torch.zeros(vocabulary, dtype=torch.bool)
        taken[ids] = True
        return {**found, "d2t": ids - torch.arange(len(ids)), "t2d": taken}


class Medusa(nn.Module):
    """Residual blocks on the last hidden state; head k guesses k + 1 tokens past the model's own next one."""

    def __init__(self, config: Any, output: Tensor):
        super().__init__()
        h = config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(h, h) for _ in range(GUESSES))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.output = output

    def guesses(self, hidden: Tensor) -> Iterator[Tensor]:
        """Logits [B,T,V] of each head in turn, of the last hidden states [B,T,H]."""
        for block in self.blocks:
            yield F.linear(hidden + F.silu(block(hidden)), self.output)


def answers(
    model: Any, tokenizer: Any, prompts: list[str], new: int, temperature: float, seed: int
) -> tuple[Tensor, Tensor]:
    """(tokens [N,P+new], how many of each are real from the left [N]) of the model's own answers; on its device."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True
        )
        for p in prompts
    ]
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(
        texts,
        return_tensors="pt",
        padding=True,
        truncation=True,
        max_length=256,
        add_special_tokens=False,
    ).to(model.device)
    torch.manual_seed(seed)
    sampled = (
        {"do_sample": True, "temperature": temperature, "top_k": 0}
        if temperature
        else {"do_sample": False}
    )
    out = model.generate(
        **batch, max_new_tokens=new, pad_token_id=tokenizer.pad_token_id, **sampled
    )
    starts = batch["attention_mask"].argmax(-1)
    end_ids = model.generation_config.eos_token_id
    ends = torch.as_tensor(end_ids if isinstance(end_ids, list) else [end_ids], device=out.device)
    prompt = batch["input_ids"].shape[1]
    over = torch.isin(out[:, prompt:], ends)
    length = torch.where(over.any(-1), over.int().argmax(-1) + 1, out.shape[1] - prompt) + prompt
    place = (torch.arange(out.shape[1], device=out.device)[None] + starts[:, None]) % out.shape[1]
    return out.gather(1, place), length - starts


@torch.no_grad()
def features(model: Any, tokens: Tensor, taps: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(streams [B,T,3H], last hidden states [B,T,H], logits [B,T,V])."""
    out = model.model(tokens, output_hidden_states=True, use_cache=False)
    last = out.last_hidden_state
    logits = model.lm_head(last)
    return torch.cat([out.hidden_states[k] for k in taps], -1), last, logits


def losses(
    eagle: Eagle3,
    medusa: Medusa,
    model: Any,
    tokens: Tensor,
    length: Tensor,
    taps: list[int],
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Both losses, and of each depth which guesses are the model's greedy tokens: [B,T] booleans, and which count."""
    streams, hidden, logits = features(model, tokens, taps)
    b, t = tokens.shape
    greedy = logits.argmax(-1)
    known = torch.arange(t, device=tokens.device)[None] < length[:, None]
    if start is not None:
        known &= torch.arange(t, device=tokens.device)[None] >= start[:, None]
    to_draft = torch.full((logits.shape[-1],), IGNORED, device=tokens.device)
    to_draft[eagle.draft_ids] = torch.arange(len(eagle.draft_ids), device=tokens.device)
    embeds = F.pad(model.model.embed_tokens(tokens)[:, 1:], (0, 0, 0, 1))
    lost_eagle: Any = 0.0
    stands, counts = [], []
    # the guess of slot s, depth j, is of token s + 2: what the model gives at row s + 1
    wanted = logits[:, 1:, :][..., eagle.draft_ids].float()
    want = greedy[:, 1:]
    inside = to_draft[want] != IGNORED
    for depth, guess in enumerate(eagle.guesses(streams, embeds)):
        guess = guess[:, :-1]
        count = known[:, 1:].clone()
        count[:, :depth] = False
        mask = count & inside
        loss = -(wanted.softmax(-1) * guess.float().log_softmax(-1)).sum(-1)
        lost_eagle = lost_eagle + DECAY**depth * (loss * mask).sum() / mask.sum().clamp(min=1)
        stands.append(eagle.draft_ids[guess.argmax(-1)] == want)
        counts.append(count)
    lost_medusa: Any = 0.0
    medusa_stands = []
    few = (
        len(tokens) if start is not None else -(-len(tokens) // 8)
    )  # its logits are of the whole vocabulary
    for k, guess in enumerate(medusa.guesses(hidden[:few])):
        ahead = k + 1  # row r guesses what the model gives at row r + ahead
        guess, target = guess[:, :-ahead], greedy[:few, ahead:]
        count = known[:few, ahead:] & known[:few, :-ahead]
        loss = F.cross_entropy(
            guess.flatten(0, 1).float(), target.flatten(), reduction="none"
        ).view_as(target)
        lost_medusa = lost_medusa + DECAY**k * (loss * count).sum() / count.sum().clamp(min=1)
        medusa_stands.append((guess.argmax(-1) == target, count))
    return lost_eagle, lost_medusa, {"eagle": stands, "count": counts, "medusa": medusa_stands}  # type: ignore[dict-item]


@torch.no_grad()
def measured(
    eagle: Eagle3,
    medusa: Medusa,
    model: Any,
    rows: Tensor,
    length: Tensor,
    start: Tensor,
    taps: list[int],
) -> dict[str, Any]:
    """On greedy answers, whose tokens are the model's own: shares of guesses that stand by depth where those before
    stand, and the mean number of leading guesses that do."""
    alone = {"eagle3": torch.zeros(GUESSES, 2), "medusa": torch.zeros(GUESSES, 2)}
    for i in range(0, len(rows), 32):
        tokens, n, at = rows[i : i + 32], length[i : i + 32], start[i : i + 32]
        found = losses(eagle, medusa, model, tokens, n, taps, at)[2]
        t = tokens.shape[1]
        # a round begins at slot s (depth 0): depth j of that round is the row of slot s + j
        ok = torch.ones_like(found["eagle"][0])
        live = found["count"][0].clone()
        for depth in range(GUESSES):
            row, count = found["eagle"][depth], found["count"][0]
            row, count = F.pad(row[:, depth:], (0, depth)), F.pad(count[:, depth:], (0, depth))
            live &= count
            alone["eagle3"][depth] += torch.stack(
                ((ok & row & live).sum(), (ok & live).sum())
            ).cpu()
            ok &= row
        ok = torch.ones(tokens.shape, dtype=torch.bool, device=tokens.device)
        for k, (row, count) in enumerate(found["medusa"]):
            row, count = F.pad(row, (0, t - row.shape[1])), F.pad(count, (0, t - count.shape[1]))
            count = count & (torch.arange(t, device=tokens.device)[None] >= at[:, None])
            alone["medusa"][k] += torch.stack(((ok & row & count).sum(), (ok & count).sum())).cpu()
            ok &= row
    told = {}
    for name, table in alone.items():
        shares = (table[:, 0] / table[:, 1].clamp(min=1)).tolist()
        told[name] = {
            "stands after those before": [round(s, 4) for s in shares],
            "mean leading": round(float(np.cumprod(shares).sum()), 4),
            "rows": int(table[0, 1]),
        }
    return told


def main(
    model: Path,
    prompts: Path,
    out: Path,
    text: Annotated[Path | None, typer.Option()] = None,
    minutes: float = 5.0,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    vocabulary: int = 8192,
    batch: int = 2048,
    rounds: int = 4,
    new: int = 320,
    rows: int = 64,
    length: int = 512,
    rate: float = 1e-3,
    held: int = 128,
    seed: int = 0,
) -> None:
    """Train both kinds of head."""
    began = time.perf_counter()
    tell = lambda *said: print(f"[{time.perf_counter() - began:6.1f} s]", *said, flush=True)  # noqa: E731
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    folder, extra = (
        (model.parent, {"gguf_file": model.name}) if model.suffix == ".gguf" else (model, {})
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
    target = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **extra)
        .to(device)
        .eval()
        .requires_grad_(False)
    )
    if tokenizer.chat_template and "<|im_end|>" in tokenizer.chat_template:
        target.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    layers = target.config.num_hidden_layers
    taps = [2, layers // 2, layers - 3]  # before these layers
    asked = [json.loads(line) for line in prompts.read_text().splitlines()]
    tell(f"{layers} layers, {len(asked)} prompts")
    held_rows, held_length = answers(target, tokenizer, asked[:held], new, 0.0, seed)
    starts = [
        len(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p}],
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
            )
        )
        for p in asked[:held]
    ]
    held_start = torch.tensor(starts, device=device).clamp(max=256) - 1
    pools: list[tuple[Tensor, Tensor]] = []
    asked = asked[held:]
    for i in range(rounds):
        some = [asked[(i * batch + j) % len(asked)] for j in range(batch)]
        given, real = answers(target, tokenizer, some, new, 0.8 if i % 2 else 0.0, seed + 1 + i)
        pad = max(0, length - given.shape[1])
        pools.append((F.pad(given, (0, pad))[:, :length].cpu(), real.clamp(max=length).cpu()))
        tell(f"round {i + 1} of {rounds}: {int(real.sum())} tokens")
    tokens, real = (torch.cat(parts) for parts in zip(*pools, strict=True))
    if text is not None:
        ids = torch.from_numpy(np.load(text).astype(np.int64))
        ids = ids[: len(ids) // length * length].view(-1, length)
        tokens, real = torch.cat((tokens, ids)), torch.cat((real, torch.full((len(ids),), length)))
    known = torch.arange(length)[None] < real[:, None]
    counts = torch.bincount(tokens[known], minlength=target.config.vocab_size)
    draft_ids = counts.topk(min(vocabulary, target.config.vocab_size)).indices.sort().values
    covered = float(counts[draft_ids].sum() / counts.sum())
    tell(
        f"{int(known.sum())} tokens in {len(tokens)} rows; {len(draft_ids)} ids cover {covered:.4f}"
    )
    torch.manual_seed(seed)
    output = target.lm_head.weight.detach()
    eagle, medusa = (
        Eagle3(target.config, draft_ids).to(device),
        Medusa(target.config, output).to(device),
    )
    with torch.no_grad():
        eagle.lm_head.weight.copy_(output[draft_ids.to(device)].float())
    optimiser = torch.optim.AdamW(
        [*eagle.parameters(), *medusa.parameters()], lr=rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    curve: list[dict[str, float]] = []
    order = torch.Generator().manual_seed(seed)
    step, start, saved = 0, time.perf_counter(), 0.0

    def save(stands: dict[str, Any]) -> None:
        """Write both heads as they are."""
        written(out, eagle, medusa, target.config, taps)
        told = {
            "model": model.name, "device": torch.cuda.get_device_name() if device == "cuda" else device,
            "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "rows": len(tokens),
            "tokens": int(known.sum()), "covered": covered, "steps": step, "tokens seen": step * rows * length,
            "seconds": round(time.perf_counter() - began, 1), "held": stands, "curve": curve,
        }  # fmt: skip
        (out / "heads.json").write_text(json.dumps(told, indent=1) + "\n")

    while (share := (time.perf_counter() - start) / 60 / minutes) < 1:
        at = torch.randint(len(tokens), (rows,), generator=order)
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50, max(0.02, (1 - share) / 0.6))
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            one, other, _ = losses(
                eagle, medusa, target, tokens[at].to(device), real[at].to(device), taps
            )
        optimiser.zero_grad(set_to_none=True)
        (one + other).backward()
        nn.utils.clip_grad_norm_(eagle.parameters(), 1.0)
        nn.utils.clip_grad_norm_(medusa.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 50 == 1:
            seconds = round(time.perf_counter() - start, 1)
            curve.append({
                "step": step, "seconds": seconds, "eagle3": round(one.item(), 4), "medusa": round(other.item(), 4),
            })  # fmt: skip
            tell(curve[-1])
            if seconds - saved > SAVED_EVERY:
                save({})
                saved = seconds
    save({})  # before what is measured: a machine that is lent may go at any time
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        stands = measured(eagle, medusa, target, held_rows, held_length, held_start, taps)
    tell(stands)
    save(stands)


def written(out: Path, eagle: Eagle3, medusa: Medusa, config: Any, taps: list[int]) -> None:
    """Write both heads in their published layouts."""
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": len(eagle.draft_ids), "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_attention_heads": eagle.heads, "num_key_value_heads": eagle.groups, "head_dim": eagle.size,
        "rms_norm_eps": config.rms_norm_eps, "rope_theta": eagle.theta, "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings, "torch_dtype": "float16",
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": taps},
    }  # fmt: skip
    blocks = {
        f"{k}.0.linear.{part}": getattr(block, part).detach().half().cpu().contiguous()
        for k, block in enumerate(medusa.blocks)
        for part in ("weight", "bias")
    }
    sizes = {
        "medusa_num_heads": GUESSES, "medusa_num_layers": 1,
        "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
    }  # fmt: skip
    for name, tensors, said in (
        ("eagle3", eagle.tensors(config.vocab_size), settings),
        ("medusa", blocks, sizes),
    ):
        (out / name).mkdir(parents=True, exist_ok=True)
        save_file(tensors, out / name / "model.safetensors")
        (out / name / "config.json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
