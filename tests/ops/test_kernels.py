"""The Triton kernels, in a process of their own: what they must do is in `kernel_cases`, `expert_cases`, `quantize_cases`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [Path(__file__).with_name(name) for name in ("kernel_cases.py", "expert_cases.py", "quantize_cases.py")]


def run_cases(**environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, CASES)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_in_the_interpreter():
    run_cases(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize(("program", "kernels"), [("compile_quantize.py", 12), ("compile_grouped_mm.py", 8)])
def test_kernels_compile_for_cards_with_and_without_8_bit_floats(program, kernels):
    program = Path(__file__).with_name(program)
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(program), "86", "89", "90", "120"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert done.stdout == f"{[kernels] * 4}\n"


@pytest.mark.gpu
def test_on_a_device():
    run_cases(TRITON_INTERPRET="0")
