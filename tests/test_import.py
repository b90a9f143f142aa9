"""Importing the package asks for nothing: no CUDA, no Triton, no thread, no descriptor."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "cuda", "typer", "rich", "matplotlib", "numpy"):
            raise ModuleNotFoundError(f"{name} is absent here", name=name)

sys.meta_path.insert(0, Block())
"""


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_and_use_with_triton_and_cuda_absent() -> None:
    code = """
import torch, torch.distributed as dist
import thunderep
from thunderep.nn import ExpertParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with thunderep.Buffer(num_experts=4, hidden=8, topk=2, max_tokens=4, device="cpu") as buffer:
    layer = ExpertParallel(buffer, 16)
    x, idx, weights = torch.randn(3, 8).bfloat16(), torch.randint(0, 4, (3, 2)), torch.rand(3, 2)
    print(layer(x, idx, weights).shape)
"""
    assert run(BLOCKED + code) == "torch.Size([3, 8])"


def test_import_starts_nothing() -> None:
    code = """
import os, sys, threading
import torch
def state():
    heavy = {name for name in sys.modules if name.split(".")[0] in ("triton", "cuda", "typer", "rich", "matplotlib")}
    return len(os.listdir("/proc/self/fd")), threading.active_count(), heavy, torch.cuda.is_initialized()
before = state()
import thunderep
print(before == state())
"""
    assert run(code) == "True"


def test_every_public_name_is_documented() -> None:
    code = """
import inspect, thunderep
from thunderep import nn
names = [(n, getattr(thunderep, n)) for n in thunderep.__all__] + [("ExpertParallel", nn.ExpertParallel)]
for name, thing in names:
    assert inspect.getdoc(thing), name
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if not member.startswith("_") and callable(value):
                assert inspect.getdoc(value), (name, member)
print("all")
"""
    assert run(code) == "all"
