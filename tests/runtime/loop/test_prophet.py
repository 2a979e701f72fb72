"""prophet: the ends of its thresholds."""

from ...diffusion_case import BLOCK, Case, decoded, eager, prompts, surest


def prophetic(early, middle, late):
    """Whether the lead of the best token over the next is large enough for the part that is done."""

    def ends(seen):
        done = (seen.slots[0] - seen.start + seen.step) / (seen.end - seen.start)
        return seen.lead.mean() >= (early if done < 0.33 else middle if done < 0.67 else late)

    return ends


CASES = [
    Case({"early": a, "middle": b, "late": c}, surest(1), prophetic(a, b, c))
    for a, b, c in ((1.0, 2.0, 3.0), (9.0, 3.5, 2.5))
]


def levels(value):
    return {"early": value, "middle": value, "late": value}


def test_ends_of_its_thresholds():
    _, compiled = eager(False)
    static = decoded(compiled, "dllm-lowconf", prompts(), block=BLOCK)
    assert decoded(compiled, "prophet", prompts(), block=BLOCK, **levels(1e30)) == static
    tokens, calls, _ = decoded(compiled, "prophet", prompts(), block=BLOCK, **levels(-1.0))
    assert calls == [1, 1]
    assert tokens == decoded(compiled, "dllm-lowconf", prompts(), block=21, steps=1)[0]
