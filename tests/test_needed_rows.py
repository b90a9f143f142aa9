"""The share of rows that a rank needs: what a transport that moves only those rows has to move."""

from __future__ import annotations

from math import comb

import pytest
import torch

from thunderep import reference
from thunderep.testing.inputs import random_tokens

EXPERTS, TOKENS = 128, 1000


@pytest.mark.parametrize(("num_ranks", "topk"), [(4, 4), (4, 8), (8, 4), (8, 8)])
def test_share_is_the_hypergeometric_one(num_ranks: int, topk: int) -> None:
    """Of E distinct experts a token misses a rank's E / N with C(E - E/N, K) / C(E, K), a little less than (1 - 1/N)^K."""
    ranks = [
        random_tokens(rank, TOKENS * (rank == 0), hidden=1, num_experts=EXPERTS, topk=topk, dtype=torch.float32)
        for rank in range(num_ranks)
    ]
    xs, ids, weights = ([getattr(t, name) for t in ranks] for name in ("x", "topk_idx", "topk_weights"))
    is_token_in_rank = reference.dispatch(xs, ids, weights, EXPERTS, TOKENS)[0][4]
    expected = 1 - comb(EXPERTS - EXPERTS // num_ranks, topk) / comb(EXPERTS, topk)
    assert is_token_in_rank.double().mean().item() == pytest.approx(expected, rel=0.01)
    assert expected == pytest.approx(1 - (1 - 1 / num_ranks) ** topk, rel=0.02)
