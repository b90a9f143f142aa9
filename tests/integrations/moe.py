"""One rank's side of tests of gathered dispatch and combine: what experts must be able to tell from what they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import thunderep
from tests.dist.dense import rank_sum
from tests.dist.exchange import group_of
from thunderep.integrations.gathered import Exchange
from thunderep.testing.inputs import random_rows, random_tokens, same_bits


@dataclass(frozen=True)
class Case:
    """A dispatch and a combine; rank r has `sizes[r]` tokens. Extra tensors are [T, S] or, where S is 0, [T]."""

    sizes: tuple[int, ...]
    num_experts: int = 7
    topk: int = 2
    hidden: int = 24
    dtype: torch.dtype = torch.bfloat16
    weights_dtype: torch.dtype = torch.float32
    extra: tuple[tuple[int, torch.dtype], ...] = ()
    drop: float = 0.0
    blocks: bool = True
    cut: int = 0
    """Columns that experts cut from their results."""
    transport: str = "shm"
    device: str = "cpu"
    seed: int = 0

    def of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """A rank's rows, weights, ids and extra tensors."""
        seed = self.seed * 10 + rank
        made = random_tokens(
            seed, self.sizes[rank], hidden=self.hidden, num_experts=self.num_experts, topk=self.topk, dtype=self.dtype,
            idx_dtype=torch.int32, drop=self.drop,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        extra = [random_rows((len(made.x), s) if s else (len(made.x),), t, generator) for s, t in self.extra]
        return made.x, made.topk_weights.to(self.weights_dtype), made.topk_idx, extra

    def gathered(self) -> tuple[torch.Tensor, ...]:
        """All ranks' rows, weights, ids and extra tensors, one rank's after another's."""
        everyone = [self.of(rank) for rank in range(len(self.sizes))]
        first = [torch.cat([own[i] for own in everyone]) for i in range(3)]  # type: ignore[misc]
        return *first, *(torch.cat([own[3][i] for own in everyone]) for i in range(len(self.extra)))

    def result_of(self, rank: int) -> torch.Tensor:
        """What a rank's experts make of each gathered row that chose one of them."""
        generator = torch.Generator().manual_seed(self.seed * 10 + rank + 5)
        return torch.randn(sum(self.sizes), self.hidden - self.cut, generator=generator).bfloat16()


def dispatch_problem(got: Sequence[torch.Tensor], case: Case, local: range) -> str | None:
    """What is wrong with what a rank whose experts are `local` got: rows, weights, ids, extra tensors; None if nothing is."""
    x, weights, ids, *extra = got
    want_x, want_weights, want_ids, *want_extra = case.gathered()
    here, want_here = ((t >= local.start) & (t < local.stop) for t in (ids, want_ids))
    if ids.dtype != want_ids.dtype or not torch.equal(here, want_here) or not torch.equal(ids[here], want_ids[here]):
        return "ids of this rank's experts differ"
    if bool((ids >= case.num_experts).any()) or (case.drop == 0 and bool((ids < 0).any())):
        return "ids that are no experts"
    if not same_bits(weights[here], want_weights[here]):
        return "weights differ"
    needed = here.any(dim=1)
    pairs = zip((x, *extra), (want_x, *want_extra), strict=True)
    return None if all(same_bits(a[needed], b[needed]) and len(a) == len(b) for a, b in pairs) else "rows differ"


def own_result(case: Case, rank: int, ids: torch.Tensor, local: range, unread: bool) -> torch.Tensor:
    """A rank's experts' results: zeros, or what must not be read, for rows that chose none of them."""
    here = ((ids >= local.start) & (ids < local.stop)).any(dim=1, keepdim=True)
    return torch.where(here, case.result_of(rank), float("nan") if unread else 0.0)


def combined(case: Case, rank: int, locals_: Sequence[range]) -> torch.Tensor:
    """What combine must give a rank."""
    ids = case.gathered()[2]
    results = [own_result(case, r, ids, local, unread=False) for r, local in enumerate(locals_)]
    return torch.split(rank_sum(results), list(case.sizes))[rank]


def warmed_up(most_tokens: int) -> list[bool]:
    """For several kinds of rows: whether ranks, warmed up, have exchanged the bytes and operations of 1, 4, 16, ... tokens."""
    same = []
    for dtype, extra in ((torch.bfloat16, ()), (torch.float8_e4m3fn, ((3, torch.float32),))):
        x, _, ids, extras = Case((1,) * 4, dtype=dtype, extra=extra).of(dist.get_rank())
        stats = []
        for warm in (True, False):
            with thunderep.Buffer(num_experts=7, hidden=24, topk=2, max_tokens=most_tokens, device="cpu") as buffer:
                exchange = Exchange(buffer, True)
                if warm:
                    exchange.warm_up(x, ids, most_tokens, extras)
                else:
                    for tokens in (4**i for i in range(most_tokens) if 4**i <= most_tokens):
                        rows, idx, *others = (t.expand(tokens, -1) for t in (x, ids, *extras))
                        g = exchange.dispatch(rows, idx.float(), idx, [tokens] * 4, others)
                        exchange.combine(g.x.to(torch.bfloat16), [tokens] * 4, g.routing)
                stats.append(buffer.stats()._replace(waited=None))
        same.append(stats[0] == stats[1])
    return same


def exchange(case: Case) -> str | None:
    """Dispatch and combine by `Exchange`, at once and begun before something else; None, or what was wrong."""
    group = group_of(len(case.sizes))
    if group is None:
        return None
    with thunderep.Buffer(
        group, num_experts=case.num_experts, hidden=case.hidden, topk=case.topk, max_tokens=max(1, *case.sizes),
        device=case.device, timeout=60, transport=case.transport,  # type: ignore[arg-type]
    ) as buffer:  # fmt: skip
        exchange = Exchange(buffer, case.blocks)
        x, weights, ids, extra = case.of(buffer.rank)
        x, weights, ids, *extra = (t.to(case.device) for t in (x, weights, ids, *extra))
        got: Any = [exchange.dispatch(x, weights, ids, case.sizes, extra) for _ in range(2)]
        locals_ = [thunderep.local_experts(case.num_experts, rank, buffer.num_ranks) for rank in range(buffer.num_ranks)]
        for i, g in enumerate(got):
            came = [t.cpu() for t in (g.x, g.topk_weights, g.topk_idx, *g.extra)]
            problem = dispatch_problem(came, case, buffer.local_experts)
            if problem:
                return problem
            y = own_result(case, buffer.rank, came[2], buffer.local_experts, unread=g.routing is not None).to(case.device)
            if i == 0:
                out = exchange.combine(y, case.sizes, g.routing)
            else:
                finish = exchange.start_combine(y, case.sizes, g.routing)
                y.fill_(0)
                out = finish()
            if not same_bits(out.cpu(), combined(case, buffer.rank, locals_)):
                return "combine differs"
    return None
