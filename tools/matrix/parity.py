"""Greedy tokens and logits of compiled models against PyTorch's own: `python tools/matrix/parity.py`.

Prints a Markdown table; leaves with 1 where a token differs without excuse or logits are further
apart than 1e-3. A first difference is excused, and counted, where the reference's two best logits
lie closer than 1e-4: there rounding decides.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
import torch
from models import ARCHITECTURES
from torch import Tensor, nn

import accel

TIE = 1e-4
LOGITS = 1e-3
SIZES = ((1, 1), (2, 5), (3, 17), (1, 33))


@dataclass
class Row:
    """What one architecture reached."""

    name: str
    prompts: int = 0
    tokens: int = 0
    equal: int = 0
    excused: int = 0
    different: int = 0
    error: float = 0.0

    def markdown(self) -> str:
        """One line of the table."""
        cells = (
            self.name,
            self.prompts,
            self.tokens,
            self.equal,
            self.excused,
            self.different,
            f"{self.error:.1e}",
        )
        return f"| {' | '.join(map(str, cells))} |"


HEADER = (
    "| architecture | prompts | tokens | equal | excused | different | max logit error |\n"
    "|---|---|---|---|---|---|---|"
)


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """[B,T,V] of a module, Hugging Face or not."""
    with torch.no_grad():
        if is_hugging_face(model):
            out: Tensor = model(input_ids=tokens, use_cache=False).logits
        else:
            out = model(tokens)
    return out.float()


def is_hugging_face(model: nn.Module) -> bool:
    """Whether transformers' own `generate` is the reference."""
    return hasattr(model, "generation_config")


def greedy(model: nn.Module, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """The reference's next tokens, and how far its best logit lies above the second at each."""
    ids = torch.tensor([prompt])
    if is_hugging_face(model):
        model.generation_config.eos_token_id = None  # type: ignore[union-attr]
        out: Any = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
            min_new_tokens=count, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens, steps = out.sequences[0, len(prompt) :].tolist(), [s[0] for s in out.logits]
    else:
        tokens, steps = [], []
        for _ in range(count):
            steps.append(logits(model, torch.tensor([[*prompt, *tokens]]))[0, -1])
            tokens.append(int(steps[-1].argmax()))
    best = [s.float().topk(2).values for s in steps]
    return tokens, [float(b[0] - b[1]) for b in best]


def prompts(vocab: int, count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to 31 tokens; the longer ones pass every window of the small models."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1 + (i * 7) % 31 for i in range(count)]
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def logit_error(row: Row, model: nn.Module, compiled: accel.CompiledModel) -> None:
    """The largest difference of any logit, over odd sizes, T = 1 included."""
    vocab = compiled.facts.vocab_size
    for seed, (batch, length) in enumerate(SIZES):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, vocab, (batch, length), generator=generator)
        got = torch.from_numpy(compiled.logits(tokens.numpy()))
        row.error = max(row.error, float((got - logits(model, tokens)).abs().max()))


def compare(row: Row, reference: tuple[list[int], list[float]], tokens: list[int]) -> None:
    """Count the tokens up to the first difference; what follows one cannot be compared."""
    row.prompts += 1
    if len(tokens) != len(reference[0]):
        row.different += 1
        return
    for want, gap, got in zip(*reference, tokens, strict=True):
        row.tokens += 1
        if got == want:
            row.equal += 1
        else:
            row.excused += gap < TIE
            row.different += gap >= TIE
            return


def measure(
    name: str, model: nn.Module, compiled: accel.CompiledModel, count: int, length: int
) -> Row:
    """One row of the table."""
    row = Row(name)
    logit_error(row, model, compiled)
    asked = prompts(compiled.facts.vocab_size, count)
    out = compiled.generate(asked, max_new_tokens=length, eos=[])
    for prompt, tokens in zip(asked, out.tokens, strict=True):
        compare(row, greedy(model, prompt, length), tokens)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ARCHITECTURES)}; all by default")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--target", default="onnx", choices=("onnx", "eager"))
    args = parser.parse_args()
    if unknown := [n for n in args.names if n not in ARCHITECTURES]:
        parser.error(f"no architecture {', '.join(unknown)}; there are {', '.join(ARCHITECTURES)}")
    torch.set_num_threads(1)
    print(HEADER)
    failed = False
    for name in args.names or ARCHITECTURES:
        model = ARCHITECTURES[name]()
        with accel.optimize(model, target=args.target, max_context=256, max_batch=4) as compiled:
            row = measure(name, model, compiled, args.prompts, args.tokens)
        print(row.markdown(), flush=True)
        failed |= bool(row.different) or not row.error <= LOGITS
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
