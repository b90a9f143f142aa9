"""Names for the phases of an operation in traces: torch.profiler's, and NVTX under `torch.autograd.profiler.emit_nvtx()`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def phase(name: str) -> Callable[[Callable[_P, _Result]], Callable[_P, _Result]]:
    """Show the calls of a function as "thunderep:`name`".

    While nobody profiles that costs a quarter of a microsecond a call; `record_function` alone would cost many.
    """

    def decorate(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
            if not _enabled():
                return function(*args, **kwargs)
            with torch.profiler.record_function(f"thunderep:{name}"):
                return function(*args, **kwargs)

        return run

    return decorate
