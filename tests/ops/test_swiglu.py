"""thunderep::swiglu on the CPU: against PyTorch's own functions, and under a compiler."""

import pytest
import torch

import thunderep  # noqa: F401  registers the operators
from thunderep.nn import swiglu as plain

swiglu = torch.ops.thunderep.swiglu
OFFSETS = torch.tensor([2, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_is_the_float32_result_rounded_once(dtype):
    x = (torch.randn(5, 12, generator=torch.Generator().manual_seed(0)) * 4).to(dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    out, expected = swiglu(x, OFFSETS), plain(wide)
    torch.testing.assert_close(out, expected.to(dtype), rtol=0, atol=0)
    grad = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    (got,), (wanted,) = torch.autograd.grad(out, x, grad), torch.autograd.grad(expected, wide, grad.float())
    torch.testing.assert_close(got, wanted.to(dtype))


def test_opcheck():
    for rows in (0, 5):
        torch.library.opcheck(swiglu, (torch.randn(rows, 6, requires_grad=True), OFFSETS.clamp(max=rows)))


def test_compiles():
    torch._dynamo.reset()
    x = torch.randn(5, 6)
    assert torch.equal(torch.compile(lambda x: swiglu(x, OFFSETS) + 1, fullgraph=True)(x), swiglu(x, OFFSETS) + 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2), OFFSETS), r"gate_up: got shape \[2\], expected \[C, 2 I\]"),
        ((torch.ones(2, 3), OFFSETS), r"gate_up: got shape \[2, 3\], expected an even number of columns"),
        ((torch.ones(2, 4, dtype=torch.int32), OFFSETS), "gate_up: got torch.int32, expected one of"),
        ((torch.ones(2, 4), OFFSETS.long()), "offsets: got torch.int64, expected torch.int32"),
        ((torch.ones(2, 4), OFFSETS[None]), r"offsets: got shape \[1, 3\], expected \[L\]"),
        ((torch.ones(2, 4, device="meta"), OFFSETS), "offsets: got a tensor on cpu, expected one on meta"),
    ],
)
def test_errors_name_argument_value_and_expectation(arguments, message):
    with pytest.raises(ValueError, match=message):
        swiglu(*arguments)
