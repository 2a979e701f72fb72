"""CASES: (options, which of a block's slots a step fills, when the rest of the block is filled at once)."""

from ...diffusion_case import entropies, whole


def coherent(warm, expand, adaptive):
    """One token a step, and with it those that were next to be filled a step before and whose token is the same."""

    @whole
    def stays(sure, step, masks, memory, logits):
        h = entropies(logits, sure)
        token = logits.argmax(-1)
        order = [i for i in h.sort(stable=True).indices.tolist() if sure[i] > -1]
        if step == 0:
            memory.clear()
            memory.update(size=1, buffer=[], before=None)
        if len(order) <= 0.1 * masks:
            memory["size"] = 1
        if step >= warm - 1:
            memory["size"] = min(memory["size"] + 1, 1 + int(expand))
        chosen = order[:1]
        if step >= warm and order[0] in memory["buffer"]:
            same = [
                i for i in order[: memory["size"]]
                if i in memory["buffer"] and token[i] == memory["before"][i]
            ]  # fmt: skip
            if same:
                chosen = same if adaptive else same[:1]
        memory["buffer"] = [i for i in order if i not in chosen][: memory["size"]]
        memory["before"] = token
        return chosen

    return stays


CASES = [
    ({"warm": 2, "expand": 4.0}, coherent(2, 4, True), None),
    ({"warm": 3, "expand": 2.0, "adaptive": False}, coherent(3, 2, False), None),
]
