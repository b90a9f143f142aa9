"""Explores the interleavings of all ranks' schedules, several operations in a row, and reports what goes wrong in any of them.

The model: each rank runs its operations one after another, and the lanes of an operation side by side; nothing else orders
anything. A `Signal` or `Wait` of several flags counts as one step a flag, since no executor handles them at one instant. Inputs
and outputs are fresh in every operation; staging and flags stay. A captured graph that is replayed is its operations, repeated.

What is reported:

* race: two lanes are both at a copy, the copies overlap in staging, and one of them writes. Steps are atomic here, and yet this
  finds every race: a copy never blocks, so two that nothing orders can be brought side by side, and every state is visited.
* wrong bytes: a copy out of staging finds other bytes than those that belong at its destination (see `delivery`), or none.
* lost signal: a flag is set to the value that it has, so a binary semaphore forgets one of two signals.
* deadlock: lanes are left, and none can move.
* flag left set: all operations are over, and a flag is not 0.
* lost, doubled and misplaced bytes, and copies that reach what they must not: see `delivery`.

What lies beyond a mistake is not explored: it follows from the mistake.

**Reduction.** Interleavings that can show nothing new are left out:

1. Copies from a rank's input to its own output run unseen: no other step touches those bytes.
2. Copies run in one go with the signal that follows them in their lane. A copy enables nothing, so every run stays possible if
   its copies are delayed to there, and until then the lane stands at the copy, where races are looked for. Where two copies
   that conflict are ordered, it is by what follows the earlier one in its lane (a signal, or the end); so that order stays, and
   with it what is read.
3. A wait that is over passes at once if no step that may run beside it can undo it, that is, if no lane beside its own sets the
   flag to the other value: it commutes with every such step, and a lane that has yet to pass it touches nothing.

To join an operation's lanes and start the next one's is no step at all. Runs have no cycles, so nothing is put off for ever.
`reduce=False` explores every single step instead; the tests hold the two against each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from thunderep.runtime.automaton import Action, Cells, Compiler, Node, Walk, describe_flag, steps_of
from thunderep.runtime.delivery import Contract, Kind, Operation, Problem, delivery_problems, describe_place
from thunderep.runtime.schedule import Copy, Flag


@dataclass(frozen=True, slots=True)
class Report:
    """What was explored and found.

    Attributes:
        states: Different states that were visited.
        complete: Whether these are all; otherwise `max_states` was too few, and no problem found means nothing.
        problems: Each mistake once, with a shortest run that leads there.
    """

    states: int
    complete: bool
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether everything was explored and nothing is wrong."""
        return self.complete and not self.problems

    def __str__(self) -> str:
        extent = "all" if self.complete else "not all"
        return "\n".join((f"{self.states} states ({extent}), problems: {len(self.problems)}", *map(str, self.problems)))


def check(operations: Sequence[Operation], *, max_states: int = 1_000_000, reduce: bool = True) -> Report:
    """Explore all interleavings of `operations`.

    Args:
        operations: What every rank runs, in this order.
        max_states: Where to give up.
        reduce: Leave out interleavings that can show nothing new.

    Raises:
        ValueError: There are no operations, or not all are for ranks 0 to N - 1, or a flag is compared with or set to something
            other than 0 or 1, or an operation is to deliver two things to one byte.
    """
    _validate(operations)
    contracts = [Contract(operation.delivers) for operation in operations]
    problems = [
        problem
        for i, (operation, contract) in enumerate(zip(operations, contracts, strict=True))
        for problem in delivery_problems(f"operation {i}", operation, contract)
    ]
    if any(problem.kind == "bad copy" for problem in problems):
        return Report(0, False, tuple(problems))
    cells = Cells(operations, contracts)
    compiler = Compiler(operations, cells, reduce)
    search = _Search([compiler.rank(rank) for rank in range(len(operations[0].schedules))], list(compiler.flags), cells)
    complete = search.run(max_states)
    return Report(len(search.came), complete, (*problems, *search.problems.values()))


def _validate(operations: Sequence[Operation]) -> None:
    if not operations:
        raise ValueError("operations: got none, expected at least one")
    for i, operation in enumerate(operations):
        ranks = [schedule.rank for schedule in operation.schedules]
        if ranks != list(range(len(operations[0].schedules))):
            raise ValueError(
                f"operations: operation {i} has schedules of ranks {ranks}, expected 0 to N - 1, the same N in all"
            )
        for step in steps_of(operation):
            if not isinstance(step, Copy) and step.value not in (0, 1):
                raise ValueError(f"operations: operation {i} has {step}, expected value 0 or 1")


_State = tuple[tuple[Node, ...], int, tuple[int, ...]]
"""Where each rank is, the flags as bits, and the tag of each cell."""


class _Search:
    """A breadth-first search of all states, so that the first run that leads to a mistake is a shortest one.

    Args:
        walks: The automaton of each rank.
        flags: Bit i is flag i.
        cells: What the tags mean.
    """

    def __init__(self, walks: Sequence[Walk], flags: Sequence[Flag], cells: Cells) -> None:
        self.walks, self.flags, self.cells = walks, flags, cells
        self.problems: dict[object, Problem] = {}
        start = (self._settled([walk.start for walk in walks], 0), 0, (0,) * len(cells.places))
        self.came: dict[_State, tuple[_State, Action] | None] = {start: None}

    def run(self, max_states: int) -> bool:
        """Explore; whether everything was explored."""
        queue = deque(self.came)
        while queue and len(self.came) <= max_states:
            state = queue.popleft()
            if self._raced(state):
                continue
            actions = list(self._enabled(state))
            if not actions:
                self._over(state)
            for action in actions:
                successor = self._after(state, action)
                if successor and successor not in self.came:
                    self.came[successor] = state, action
                    queue.append(successor)
        return not queue

    def _enabled(self, state: _State) -> Iterator[Action]:
        nodes, flags, _ = state
        for node in nodes:
            for action in node.pending:
                if not action.waits or flags & action.flag == action.value:
                    yield action

    def _after(self, state: _State, action: Action) -> _State | None:
        """The state after an action, or None if it was a mistake."""
        nodes, flags, contents = state
        if action.effects:
            cells = list(contents)
            for cell, tag, written in action.effects:
                if written:
                    cells[cell] = tag
                elif tag >= 0 and cells[cell] != tag:
                    self._report_bytes(state, action, cell, cells[cell], tag)
                    return None
            contents = tuple(cells) if action.writes else contents
        if action.flag and not action.waits:
            if flags & action.flag == action.value:
                self._report("lost signal", f"{action}, where it is {int(action.value > 0)} already", action, (state, action))
                return None
            flags ^= action.flag
        moved = list(nodes)
        moved[action.rank] = self.walks[action.rank].after(moved[action.rank], action)
        return self._settled(moved, flags), flags, contents

    def _settled(self, nodes: list[Node], flags: int) -> tuple[Node, ...]:
        """Let the waits pass that pass at once."""
        for rank, node in enumerate(nodes):
            while over := next((a for a in node.pending if a.at_once and flags & a.flag == a.value), None):
                node = self.walks[rank].after(node, over)
            nodes[rank] = node
        return tuple(nodes)

    def _raced(self, state: _State) -> bool:
        reads = writes = 0
        for node in state[0]:
            if node.raced or node.writes & (reads | writes) or node.reads & writes:
                break
            reads |= node.reads
            writes |= node.writes
        else:
            return False
        for a, b in combinations([action for node in state[0] for action in node.pending], 2):
            if both := a.writes & (b.reads | b.writes) | a.reads & b.writes:
                place = self.cells.places[(both & -both).bit_length() - 1]
                self._report("race", f"at {describe_place(place)}, between\n    {a}\n    {b}\n  after", (a, b), (state, None))
        return True

    def _over(self, state: _State) -> None:
        """Nothing can move: all is done, or this is a deadlock."""
        nodes, flags, _ = state
        stuck = [action for node in nodes for action in node.pending]
        values = ", ".join(f"{describe_flag(flag)} {flags >> i & 1}" for i, flag in enumerate(self.flags))
        if stuck:
            lanes = "".join(f"\n    {action}" for action in stuck)
            self._report(
                "deadlock", f"lanes left: {len(stuck)}, with flags {values}, at{lanes}\n  after", (*stuck,), (state, None)
            )
            return
        for i, flag in enumerate(self.flags):
            if flags >> i & 1:
                self._report("flag left set", f"flag {describe_flag(flag)} is 1 when all is over, after", flag, (state, None))

    def _report_bytes(self, state: _State, action: Action, cell: int, found: int, wanted: int) -> None:
        where = describe_place(self.cells.places[cell])
        what = f"at {where}, where {action} needs {self.cells.describe(wanted)} and finds {self.cells.describe(found)}, after"
        self._report("wrong bytes", what, (action, cell), (state, action))

    def _report(self, kind: Kind, what: str, key: object, last: tuple[_State, Action | None]) -> None:
        """Keep a problem if it is new, with the actions that lead to its state and the one that shows it."""
        if (kind, key) in self.problems:
            return
        trace: list[str] = []
        came: tuple[_State, Action | None] | None = last
        while came:
            state, action = came
            if action:
                trace.append(str(action))
            came = self.came[state]
        self.problems[kind, key] = Problem(kind, what, tuple(reversed(trace)))
