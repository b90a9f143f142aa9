"""How ranks meet and agree on one configuration.

Ranks meet in the store behind their ProcessGroup, not in collectives: so a rank that does not come can be named, and
nothing needs a GPU. Every phase is the same: each rank puts down its answer and reads everyone's. An error is an
answer too, so all ranks raise the same report.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store

from thunderep.runtime.arena import Handle, Kind, Owner, Segment, attach

_SLICE_SECONDS = 1.0
_GAVE_UP: list[Any] = []
"""In the place of an answer."""


class Rendezvous:
    """One meeting of all ranks of a group.

    Args:
        group: The ranks that meet.
        timeout: Seconds that each phase may take.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        # Each rank counts its meetings where the group meets: the next group of this name begins anew, whoever its ranks are.
        store = _group_store(group)
        attempt = store.add(f"thunderep/attempts/{self.rank} of {self.num_ranks}", 1) - 1
        self.label = f"{group.group_name}.{attempt}"
        self._timeout = timeout
        self._store = PrefixStore(f"thunderep/{self.label}", store)
        self._phases: list[str] = []

    def exchange(self, phase: str, answer: Any) -> list[Any]:
        """Put down this rank's answer and return every rank's, in rank order.

        Args:
            phase: What the ranks are doing; part of the messages.
            answer: Anything that JSON holds.

        Raises:
            RuntimeError: Ranks did not arrive in time, or the store is gone.
        """
        keys = [f"{phase}/{rank}" for rank in range(self.num_ranks)]
        try:
            self._store.set(keys[self.rank], json.dumps([answer]))
            self._wait(phase, keys)
            found = [json.loads(self._store.get(key)) for key in keys]
            gone = [rank for rank, answers in enumerate(found) if answers == _GAVE_UP]
            if gone:
                raise _Late(f"rank {self.rank}: phase '{phase}': came too late, {_ranks(gone)} had given up waiting")
            answers = [answer for (answer,) in found]
        except _Late as late:
            self._store.set(keys[self.rank], json.dumps(_GAVE_UP))  # those who come now get nothing either
            raise RuntimeError(str(late)) from None
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.rank}: phase '{phase}': the store was lost: {error}") from error
        # Everyone has read the phase before this one, or they would not have come to this one.
        if self._phases:
            self._store.delete_key(f"{self._phases[-1]}/{self.rank}")
        self._phases.append(phase)
        return answers

    def _wait(self, phase: str, keys: Sequence[str]) -> None:
        deadline = time.monotonic() + self._timeout
        missing = list(range(self.num_ranks))
        while (left := deadline - time.monotonic()) > 0:
            began, part = time.monotonic(), min(_SLICE_SECONDS, left)
            try:
                self._store.wait([keys[rank] for rank in missing], timedelta(seconds=part))
                return
            except RuntimeError:  # stores do not agree on a type for "not yet"
                if time.monotonic() - began < part / 2:
                    raise
            missing = [rank for rank in missing if not self._store.check([keys[rank]])]
        if missing:
            raise _Late(
                f"rank {self.rank}: phase '{phase}': after {self._timeout:g} s"
                f" {_ranks(missing)} of {self.num_ranks} had not arrived"
            )


class _Late(RuntimeError):
    """Ranks did not arrive in time."""


class UnableError(RuntimeError):
    """Some rank cannot do its part. Every rank raises it, with the same report, and may do something else instead."""


def compare(answers: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> None:
    """Raise one report, the same on every rank, unless all answers are without an error and alike in `fields`.

    Args:
        answers: One a rank. "error", if there, is (exception name, text).
        fields: The keys that must agree.

    Raises:
        ValueError: Every rank found the same wrong argument.
        RuntimeError: Some rank could not, or ranks disagree; each rank's value is listed.
    """
    errors = [answer.get("error") for answer in answers]
    if any(errors):
        if all(error == errors[0] for error in errors) and errors[0] and errors[0][0] == "ValueError":
            raise ValueError(errors[0][1])
        raise RuntimeError(_could_not([error[1] if error else None for error in errors]))
    differences = [
        f"{field}: " + ", ".join(f"rank {rank} has {answer[field]!r}" for rank, answer in enumerate(answers))
        for field in fields
        if any(answer[field] != answers[0][field] for answer in answers)
    ]
    if differences:
        raise RuntimeError("ranks disagree on the Buffer's configuration; " + "; ".join(differences))


def require_able(errors: Sequence[str | None]) -> None:
    """Raise UnableError, the same on every rank, unless no rank has an error. `errors` has one a rank, None: it can."""
    if any(errors):
        raise UnableError(_could_not(errors))


def _could_not(errors: Sequence[str | None]) -> str:
    return "not every rank could make the Buffer: " + "; ".join(f"rank {r}: {error or 'ok'}" for r, error in enumerate(errors))


def share_segment(meeting: Rendezvous, nbytes: int) -> Segment:
    """Map one new shared segment on all ranks: without a name where all can open it, else by a name that is gone on return.

    Raises:
        UnableError: Some rank could do neither; each rank's answer is listed.
    """
    failures: list[str] = []
    kinds: tuple[Kind, ...] = ("memfd", "file")
    for kind in kinds:
        owner: Owner | None = None
        segment: Segment | None = None
        try:
            answer: dict[str, Any] = {}
            if meeting.rank == 0:
                try:
                    owner = Owner(nbytes, kind)
                    answer["handle"] = vars(owner.handle)
                except (OSError, RuntimeError) as error:
                    answer["error"] = str(error)
            created = meeting.exchange(f"{kind}: creating the shared segment", answer)[0]
            answer = {"error": created.get("error")}
            if owner is not None:
                segment = owner.segment
            elif not created.get("error"):
                try:
                    segment = attach(Handle(**created["handle"]))
                except (OSError, RuntimeError) as error:
                    answer["error"] = str(error)
            errors = [a["error"] for a in meeting.exchange(f"{kind}: attaching to the shared segment", answer)]
            if not any(errors) and segment is not None:
                attached, segment = segment, None
                return attached
            failures.append(f"{kind}: " + "; ".join(f"rank {rank}: {error or 'ok'}" for rank, error in enumerate(errors)))
        finally:
            if owner is not None:
                owner.release()
            if segment is not None:
                segment.close()
    raise UnableError("no shared segment could be made: " + " / ".join(failures))


def host_id() -> str:
    """The same for two processes exactly if they can see each other: one boot of one kernel, one process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return boot + namespace


def _group_store(group: dist.ProcessGroup) -> Store:
    """The store that the group's ranks share, under the group's own prefix."""
    if hasattr(group, "get_group_store"):  # newer torch
        return group.get_group_store()
    return _get_process_group_store(group)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
