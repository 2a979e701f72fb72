"""Nexus (arXiv:2507.06608): prompts run while others decode, each phase on a part of the cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accel.ir.axis import option
from accel.runtime.schedule import Base, Limits, Plan, State, Task
from accel.runtime.schedule._queue import WATERMARK, decoding


@dataclass(frozen=True)
class Nexus(Base):
    """`tokens`: of a prompt, at most, in one call. The shortest rest of a prompt runs first; each second that one has
    waited counts as `aging` tokens less, so that none starves.

    A phase on a part r of the cores takes max(compute / u(r), bytes / b(r)): cores compute in proportion, u(r) = r, and
    the part `bandwidth` of them draws all that the memory gives, b(r) = min(1, r / bandwidth). A call computes as long
    as it reads the weights at `balance` tokens.

    As long as less than the part `usage` of the blocks is owned, prompts get the most cores with which a round takes no
    more than 1 + `round_slack` times its best. Beyond it those that decode do, since they give blocks back: the most
    with which a prompt takes no more than 1 + `prompt_slack` times its best. A share is changed where it moves by more
    than `hysteresis`.
    """

    tokens: int = option(256, least=1, most=1 << 20)
    aging: float = option(64.0, above=0)
    balance: float = option(8.0, above=0)
    bandwidth: float = option(0.5, above=0)
    usage: float = option(0.7, least=0)
    round_slack: float = option(0.5, least=0)
    prompt_slack: float = option(1.0, least=0)
    hysteresis: float = option(0.1, least=0)

    lacks = "measured curves of its cost model"
    chunks = overtakes = splits_cores = True

    def plan(self, state: State, limits: Limits) -> Plan:
        """One prompt at a time, beside those that decode."""
        running = sorted(state.running, key=lambda task: task.id)
        free_to_go = [task for task in running if task.id != state.busy]
        decodes, preempted, blocks, free = decoding(free_to_go, state.free, limits)
        refused = [task.id for task in state.waiting if not limits.fits(task)]
        chunks = list[tuple[int, int]]()
        if state.busy is None:
            begun = [t for t in running if not t.decodes and t.id not in preempted]
            waits = [] if preempted else [t for t in state.waiting if t.id not in refused]
            count = len(running) - len(preempted)
            room = count < limits.rows
            for task in sorted([*begun, *waits], key=lambda task: self.score(task, state.now)):
                if task in waits:
                    wanted = limits.admitted(task)
                    spare = limits.blocks // WATERMARK if count else 0
                    if not room or free - wanted < spare:
                        room = False  # none that waits passes it over
                        continue
                    blocks[task.id] = wanted
                chunks = [(task.id, min(self.tokens, task.length - task.computed))]
                break
        return Plan([task.id for task in decodes], chunks, preempted, refused, blocks)

    def score(self, task: Task, now: float) -> float:
        """The prompt with the lowest runs next: tokens that are left of it, less what it has waited for."""
        return task.length - task.computed - self.aging * (now - task.arrived)

    def share(self, state: State, limits: Limits, shares: Sequence[float], now: float) -> float:
        tokens = sum(t.length - t.computed for t in (*state.running, *state.waiting))
        rows = sum(task.decodes for task in state.running)
        usage = 1 - state.free / limits.blocks
        if usage < self.usage:
            rounds = {r: self.seconds(rows * limits.step, 1 - r) for r in shares}
            wanted = max(_bounded(rounds, self.round_slack))
        else:
            prompts = {r: self.seconds(min(tokens, self.tokens), r) for r in shares}
            wanted = min(_bounded(prompts, self.prompt_slack))
        return wanted if now not in shares or abs(wanted - now) > self.hysteresis else now

    def seconds(self, tokens: int, part: float) -> float:
        """A call of so many tokens on a part of the cores, in units of reading the weights with all of them."""
        return max(tokens / self.balance / part, 1 / min(1.0, part / self.bandwidth))


def _bounded(seconds: Mapping[float, float], slack: float) -> list[float]:
    """The shares with which a phase takes no more than 1 + `slack` times its best."""
    most = (1 + slack) * min(seconds.values())
    return [share for share, one in seconds.items() if one <= most]
