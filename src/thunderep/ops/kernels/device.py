"""Launches where the tensors are: Triton launches on the current device, PyTorch's operators work on any."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def on_its_device(
    function: Callable[Concatenate[torch.Tensor, _P], _Result],
) -> Callable[Concatenate[torch.Tensor, _P], _Result]:
    """Have `function`, which launches kernels, run with the device of its first tensor as the current one."""

    @functools.wraps(function)
    def run(tensor: torch.Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
            with torch.cuda.device(tensor.device):
                return function(tensor, *args, **kwargs)
        return function(tensor, *args, **kwargs)

    return run
