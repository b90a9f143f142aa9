"""Schedules compiled for exploration: staging as cells, steps as actions, and each rank as an automaton.

`check` has the model and the argument for what may be merged or left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from thunderep.runtime.delivery import Contract, Operation, describe, describe_place
from thunderep.runtime.schedule import Copy, Flag, Lane, Memory, Place, Signal, Step, Wait


def steps_of(operation: Operation) -> Iterator[Step]:
    """All steps of all ranks."""
    return chain.from_iterable(lane.steps for schedule in operation.schedules for lane in schedule.lanes)


class Cells:
    """Staging, cut wherever any copy begins or ends and wherever the bytes that belong there change their source.

    So a copy always covers whole cells, and what a cell holds is one number: a tag, which stands for an operation and the place
    in an input that the cell's first byte was copied from. Tag 0: never written.
    """

    def __init__(self, operations: Sequence[Operation], contracts: Sequence[Contract]) -> None:
        self.contracts = contracts
        self.tags: dict[tuple[int, Place] | None, int] = {None: 0}
        cuts: dict[Memory, set[int]] = defaultdict(set)
        for operation, contract in zip(operations, contracts, strict=True):
            for step in steps_of(operation):
                if isinstance(step, Copy) and step.dst.memory.kind == "staging":
                    cuts[step.dst.memory] |= {step.dst.offset, step.dst.offset + step.nbytes}
                elif isinstance(step, Copy) and step.src.memory.kind == "staging":
                    pieces = contract.sources(step.dst, step.nbytes)
                    cuts[step.src.memory] |= {step.src.offset + at + n for at, n, _ in pieces} | {step.src.offset}
        self.edges = {memory: sorted(cuts[memory]) for memory in sorted(cuts)}
        self.places = [Place(memory, edge) for memory, edges in self.edges.items() for edge in edges]
        self.first = {place.memory: cell for cell, place in reversed(list(enumerate(self.places)))}

    def of(self, place: Place, nbytes: int) -> range:
        """The cells of a range of staging."""
        edges, first = self.edges[place.memory], self.first[place.memory]
        return range(first + bisect_left(edges, place.offset), first + bisect_left(edges, place.offset + nbytes))

    def effects(self, op: int, copy: Copy) -> Iterator[tuple[int, int, bool]]:
        """What a copy does to each cell that it touches: (cell, the tag that it writes or has to find, whether it writes)."""
        if copy.dst.memory.kind == "staging":
            for cell in self.of(copy.dst, copy.nbytes):
                source = Place(copy.src.memory, copy.src.offset + self.places[cell].offset - copy.dst.offset)
                yield cell, self._tag(op, source), True
        elif copy.src.memory.kind == "staging":
            for at, nbytes, wanted in self.contracts[op].sources(copy.dst, copy.nbytes):
                for cell in self.of(Place(copy.src.memory, copy.src.offset + at), nbytes):
                    ahead = self.places[cell].offset - copy.src.offset - at
                    # Where nothing belongs at the destination, `delivery` has said so; what lands there does not matter.
                    yield cell, self._tag(op, Place(wanted.memory, wanted.offset + ahead)) if wanted else -1, False

    def _tag(self, op: int, source: Place) -> int:
        return self.tags.setdefault((op, source), len(self.tags))

    def describe(self, tag: int) -> str:
        """What a cell with this tag holds."""
        found = next(key for key, value in self.tags.items() if value == tag)
        return f"operation {found[0]}'s bytes at {describe_place(found[1])}" if found else "nothing yet"


@dataclass(frozen=True, slots=True, eq=False)
class Action:
    """What a lane does at once: pass a wait, or copy and then signal (either may be missing).

    Attributes:
        op: Its operation.
        rank: Its rank.
        lane: Its lane's number in the rank's schedule.
        name: Its lane's name.
        steps: What it consists of; every signal and wait of one flag.
        effects: What its copies do: (cell, tag, whether it is written), in order.
        reads: The cells that it reads, as bits.
        writes: The cells that it writes, as bits.
        flag: The flag that it waits for or sets, as a bit; 0 where there is none.
        value: The same bit for 1, 0 for 0.
        waits: Whether it is a wait.
        at_once: Whether it is a wait that nothing can undo once it is over.
    """

    op: int
    rank: int
    lane: int
    name: str
    steps: tuple[Step, ...]
    effects: tuple[tuple[int, int, bool], ...]
    reads: int
    writes: int
    flag: int
    value: int
    waits: bool
    at_once: bool

    def __str__(self) -> str:
        return f"operation {self.op}, rank {self.rank}, {self.name}: " + ", then ".join(map(_describe_step, self.steps))


def _describe_step(step: Step) -> str:
    if isinstance(step, Copy):
        return describe(step)
    return f"{'signal' if isinstance(step, Signal) else 'wait for'} {step.value} in {', '.join(map(describe_flag, step.flags))}"


def describe_flag(flag: Flag) -> str:
    """A flag in words."""
    return f"(slot {flag.slot} of rank {flag.owner}, reader {flag.reader})"


class Compiler:
    """Turns the operations of each rank into actions.

    Args:
        operations: What all ranks run.
        cells: Their staging.
        reduce: Merge and leave out what `check` says may be.
    """

    def __init__(self, operations: Sequence[Operation], cells: Cells, reduce: bool) -> None:
        self.operations, self.cells, self.reduce = operations, cells, reduce
        self.flags: dict[Flag, int] = {}
        self.setters: dict[tuple[Flag, int], set[tuple[int, int, int]]] = defaultdict(set)
        for op, rank, lane, step in self._places():
            for flag in () if isinstance(step, Copy) else step.flags:
                self.flags.setdefault(flag, 1 << len(self.flags))
                if isinstance(step, Signal):
                    self.setters[flag, step.value].add((op, rank, lane))

    def _places(self) -> Iterator[tuple[int, int, int, Step]]:
        for op, operation in enumerate(self.operations):
            for schedule in operation.schedules:
                for lane, steps in enumerate(schedule.lanes):
                    yield from ((op, schedule.rank, lane, step) for step in steps.steps)

    def rank(self, rank: int) -> Walk:
        """The automaton of one rank."""
        return Walk(
            [
                [list(self._actions(op, rank, i, lane)) for i, lane in enumerate(operation.schedules[rank].lanes)]
                for op, operation in enumerate(self.operations)
            ]
        )

    def _actions(self, op: int, rank: int, lane: int, steps: Lane) -> Iterator[Action]:
        for group in self._groups(steps):
            effects = tuple(effect for step in group if isinstance(step, Copy) for effect in self.cells.effects(op, step))
            last = group[-1]
            flag = None if isinstance(last, Copy) else last.flags[0]
            bit = self.flags[flag] if flag else 0
            waits = isinstance(last, Wait)
            undone_by = self.setters[flag, 1 - last.value] if flag and isinstance(last, Wait) else set()
            yield Action(
                op,
                rank,
                lane,
                steps.name,
                tuple(group),
                effects,
                reads=sum({1 << cell for cell, _, written in effects if not written}),
                writes=sum({1 << cell for cell, _, written in effects if written}),
                flag=bit,
                value=0 if isinstance(last, Copy) else bit * last.value,
                waits=waits,
                # Beside a lane run the other lanes of its operation, and whatever another rank is at.
                at_once=self.reduce and waits and all(r == rank and (o != op or i == lane) for o, r, i in undone_by),
            )

    def _groups(self, lane: Lane) -> Iterator[list[Step]]:
        """The lane's steps, in groups that are one action each."""
        copies: list[Step] = []
        for step in lane.steps:
            if isinstance(step, Copy):
                direct = "staging" not in (step.src.memory.kind, step.dst.memory.kind)
                if not self.reduce:
                    yield [step]
                elif not direct:
                    copies.append(step)
                continue
            for flag in step.flags:
                one = type(step)((flag,), step.value)
                if copies and isinstance(step, Wait):
                    yield copies
                    copies = []
                yield [*copies, one]
                copies = []
        if copies:
            yield copies


class Node:
    """How far one rank is. There is one object for each position of a rank, so a state compares and hashes by identity."""

    __slots__ = ("at", "following", "op", "pending", "raced", "reads", "writes")

    def __init__(self, op: int, at: tuple[int, ...], pending: list[Action]) -> None:
        self.op, self.at, self.pending = op, at, pending
        self.following: dict[Action, Node] = {}
        self.reads = self.writes = 0
        self.raced = False
        for action in pending:
            self.raced |= bool(action.writes & (self.reads | self.writes) or action.reads & self.writes)
            self.reads |= action.reads
            self.writes |= action.writes


class Walk:
    """One rank's way through all its operations."""

    def __init__(self, operations: list[list[list[Action]]]) -> None:
        self.operations = operations
        self.nodes: dict[tuple[int, tuple[int, ...]], Node] = {}
        self.start = self._node(0, (0,) * len(operations[0]))

    def _node(self, op: int, at: tuple[int, ...]) -> Node:
        pending: list[Action] = []
        while op < len(self.operations):
            pending = [actions[i] for actions, i in zip(self.operations[op], at, strict=True) if i < len(actions)]
            if pending:
                break
            op += 1
            at = (0,) * len(self.operations[op]) if op < len(self.operations) else ()
        return self.nodes.setdefault((op, at), Node(op, at, pending))

    def after(self, node: Node, action: Action) -> Node:
        """Where the rank is once `action`, which is pending at `node`, is done."""
        if action not in node.following:
            at = tuple(i + (lane == action.lane) for lane, i in enumerate(node.at))
            node.following[action] = self._node(node.op, at)
        return node.following[action]
