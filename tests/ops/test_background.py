"""dispatch and combine in two halves, start and wait, as operators. One process; tests/dist has several in flight."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import thunderep
from thunderep.testing.inputs import random_tokens

E, K, H, T = 6, 3, 20, 9
start, wait = torch.ops.thunderep.dispatch_start, torch.ops.thunderep.dispatch_wait
CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


@pytest.fixture(scope="module", params=["shm", "collective"])
def buffer(request: pytest.FixtureRequest) -> Iterator[thunderep.Buffer]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with thunderep.Buffer(
        num_experts=E, hidden=H, topk=K, max_tokens=32, dtype=torch.float32, transport=request.param
    ) as buffer:
        yield buffer
    dist.destroy_process_group()


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = random_tokens(3, T, hidden=H, num_experts=E, topk=K, dtype=torch.float32, drop=0.2)
    return made.x, made.topk_idx, made.topk_weights


def test_opcheck_starts(buffer: thunderep.Buffer) -> None:
    """Waits cannot be checked so: each takes a handle that is good once."""
    x, idx, weights = inputs()
    torch.library.opcheck(start.default, (x.requires_grad_(), idx, weights, E, buffer.name), test_utils=CHECKS)
    d = thunderep.dispatch(*inputs(), E, buffer)
    y = (torch.randn(T, H, requires_grad=True), d.recv_topk_idx, d.is_token_in_rank, buffer.name)
    torch.library.opcheck(torch.ops.thunderep.combine_start.default, y, test_utils=CHECKS)


def test_fakes_are_exact(buffer: thunderep.Buffer) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, idx, weights = inputs()
    rest = (buffer.name, 15, T, x.dtype, idx.dtype, 2)
    got = wait(start(x, idx, weights, E, buffer.name, 15, torch.rand(T, 2)), *rest)
    combined = torch.ops.thunderep.combine_wait, (buffer.name, got[1], got[4], torch.float32)
    out = combined[0](torch.ops.thunderep.combine_start(got[0], got[1], got[4], buffer.name), *combined[1])
    back = torch.ops.thunderep.dispatch_backward_wait
    grads = [got[0], got[0].new_empty(15, 0, dtype=torch.float8_e5m2)]
    handles = [torch.ops.thunderep.dispatch_backward_start(g, got[2], got[1], got[4], buffer.name) for g in grads]
    backs = [t for g, handle in zip(grads, handles, strict=True) for t in back(handle, buffer.name, T, g.dtype)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        handle = mode.from_tensor(torch.zeros(1))
        fakes = [*wait(handle, *rest), combined[0](handle, *combined[1])]
        fakes += [t for g in grads for t in back(handle, buffer.name, T, g.dtype)]
    for real, fake in zip((*got, out, *backs), fakes, strict=True):
        assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_a_handle_is_good_once(buffer: thunderep.Buffer) -> None:
    handle = start(*inputs(), E, buffer.name)
    arguments = (handle, buffer.name, T, T, torch.float32, torch.int64, 0)
    wait(*arguments)
    with pytest.raises(RuntimeError, match=r"handle: no operation .* is under way with it"):
        wait(*arguments)


def test_what_metadata_alone_tells_is_said_at_the_start(buffer: thunderep.Buffer) -> None:
    x, idx, weights = inputs()
    with pytest.raises(ValueError, match="x: got shape"):
        thunderep.dispatch(x[:, 1:], idx, weights, E, buffer, async_op=True)
    d = thunderep.dispatch(x, idx, weights, E, buffer)
    with pytest.raises(ValueError, match="y: got"):
        thunderep.combine(d.recv_x.double(), d, buffer, async_op=True)


def test_halves_have_the_gradients_of_the_whole(buffer: thunderep.Buffer) -> None:
    """The gradient of a wait starts what the gradient of its start waits for."""
    results = []
    for async_op in (False, True):
        x, idx, weights = (t.requires_grad_(t.is_floating_point()) for t in inputs())
        d = thunderep.dispatch(x, idx, weights, E, buffer, async_op=async_op)
        d = d.wait() if isinstance(d, thunderep.Work) else d
        keep = (d.recv_topk_idx >= 0).any(1, keepdim=True)
        y = thunderep.combine(
            torch.where(keep, d.recv_x * d.recv_topk_weights.sum(1, keepdim=True), 0), d, buffer, async_op=async_op
        )
        out = y.wait() if isinstance(y, thunderep.Work) else y
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, weights))))
    for whole, halves in zip(*results, strict=True):
        assert torch.equal(whole, halves)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_weights_beside_rows_of_8_bits_have_their_gradient(
    buffer: thunderep.Buffer, dtype: torch.dtype, async_op: bool
) -> None:
    x, idx, weights = inputs()
    factor = torch.randn(T, K)
    grads: list[torch.Tensor] = []
    for rows in (x.bfloat16(), x.to(dtype).requires_grad_(dtype.is_floating_point)):
        leaf = weights.clone().requires_grad_()
        arguments = rows, idx, leaf, E, buffer
        d = thunderep.dispatch(*arguments, async_op=True).wait() if async_op else thunderep.dispatch(*arguments)
        grads += torch.autograd.grad((d.recv_topk_weights * factor).sum(), leaf)
    assert not d.recv_x.requires_grad
    assert torch.equal(*grads)


def test_async_work(buffer: thunderep.Buffer) -> None:
    """Work gives the result as often as it is asked, and carries gradients."""
    x, idx, weights = inputs()
    x.requires_grad_()
    work = thunderep.dispatch(x, idx, weights, E, buffer, async_op=True)
    d = work.wait()
    assert work.wait() is d
    assert work.is_completed()
    out = thunderep.combine(d.recv_x, d, buffer, async_op=True).wait()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, d.is_token_in_rank.float().expand(T, H))
    with pytest.raises(ValueError, match="topk_idx"):  # at once: who went on would be an operation ahead of the peers
        thunderep.dispatch(x, torch.full((T, K), E), weights, E, buffer, async_op=True)
    with torch.no_grad():
        assert not thunderep.dispatch(x, idx, weights, E, buffer, async_op=True).wait().recv_x.requires_grad


def test_work_that_failed_fails_as_often_as_it_is_asked(buffer: thunderep.Buffer) -> None:
    def fail(handle: torch.Tensor) -> None:
        asked.append(handle)
        raise ValueError("once")

    asked: list[torch.Tensor] = []
    work = thunderep.Work(buffer, torch.zeros(1), fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="once"):
            work.wait()
    assert len(asked) == 1
    assert work.is_completed()


def test_one_work_may_be_waited_for_by_many_threads(buffer: thunderep.Buffer) -> None:
    work = thunderep.dispatch(*inputs(), E, buffer, async_op=True)
    with ThreadPoolExecutor(4) as pool:
        received = list(pool.map(lambda _: work.wait(), range(8)))
    assert all(d is received[0] for d in received)


def test_work_that_nobody_waits_for_keeps_no_result(buffer: thunderep.Buffer) -> None:
    shape: dict[str, Any] = {"num_experts": E, "hidden": H, "topk": K, "max_tokens": 32, "dtype": torch.float32}
    with thunderep.Buffer(**shape | {"transport": buffer.transport}, name="waited for by nobody") as own:
        for _ in range(3):
            thunderep.dispatch(*inputs(), E, own, async_op=True)
        gc.collect()
        assert not own.pending._started
