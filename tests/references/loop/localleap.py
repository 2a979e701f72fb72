"""CASES: (options, which of a block's slots a step fills, when the rest of the block is filled at once)."""


def leaping(threshold, relaxed, window):
    """Slots above the threshold, less sure ones near such a slot, and the surest, slot by slot."""

    def stays(sure, step, masks):
        found = [int(sure.argmax())]
        for i, one in enumerate(sure.tolist()):
            near = sure[max(0, i - window) : i + window + 1].max() >= threshold
            if one >= threshold or (near and one >= relaxed):
                found.append(i)
        return sorted(set(found))

    return stays


CASES = [
    ({"threshold": 0.6, "relaxed": 0.3, "window": 2}, leaping(0.6, 0.3, 2), None),
    ({"threshold": 0.4, "relaxed": 0.1, "window": 1}, leaping(0.4, 0.1, 1), None),
]
