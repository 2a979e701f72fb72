"""First come, first served: what schedules of one queue have in common."""

from __future__ import annotations

from collections.abc import Sequence

from accel.runtime.schedule import Limits, Plan, State, Task

WATERMARK = 100  # one of so many blocks stays free when a request is admitted beside others


def served(state: State, limits: Limits, budget: int | None) -> Plan:
    """The requests that decode, then prompts that were begun, then those that wait, each in their order, at most
    `budget` tokens in all (None: any number, and no prompt is split).
    """
    running = sorted(state.running, key=lambda task: task.id)
    decodes, preempted, blocks, free = decoding(running, state.free, limits)
    used = limits.step * len(decodes)
    chunks = list[tuple[int, int]]()

    def share(left: int) -> int:
        return left if budget is None else max(0, min(left, budget - used))

    for task in running:
        if not task.decodes and task.id not in preempted:
            if size := share(task.length - task.computed):
                chunks.append((task.id, size))
                used += size
    refused = [task.id for task in state.waiting if not limits.fits(task)]
    count = len(running) - len(preempted)
    for task in () if preempted else state.waiting:
        if task.id in refused:
            continue
        wanted, size = limits.admitted(task), share(task.length)
        spare = limits.blocks // WATERMARK if count else 0
        if count >= limits.rows or free - wanted < spare or not size:
            break
        chunks.append((task.id, size))
        blocks[task.id] = wanted
        free, used, count = free - wanted, used + size, count + 1
    return Plan([task.id for task in decodes], chunks, preempted, refused, blocks)


def decoding(
    running: Sequence[Task], free: int, limits: Limits
) -> tuple[list[Task], list[int], dict[int, int], int]:
    """Of requests in the order of arrival: those that decode, those that are preempted for them, the blocks that each
    gets, and those left.
    """
    decodes, blocks = list[Task](), dict[int, int]()
    left = list(running)
    preempted = list[int]()
    while left:
        task = left.pop(0)
        if not task.decodes:
            continue
        more = limits.needs(min(task.computed + limits.step, task.most)) - task.blocks
        while more > free and left:
            free += _gone(left.pop(), preempted)
        if more > free:
            free += _gone(task, preempted)
            continue
        decodes.append(task)
        if more > 0:
            blocks[task.id], free = more, free - more
    return decodes, preempted, blocks, free


def _gone(task: Task, preempted: list[int]) -> int:
    """Preempt a request: the blocks that it gives back."""
    preempted.append(task.id)
    return task.blocks
