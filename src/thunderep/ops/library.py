"""The one Library: every schema, and what compilers are told about order.

Importing this module defines the operators; `thunderep.ops` adds what they do. Ranks must issue the operations of one
Buffer in one order, also under a compiler, which keeps only the order that data carries. Two registrations see to it:

* operators that communicate count as having side effects, so none is removed because its result is unused;
* while a graph is traced (forward and backward), each of them gets the result of the one before it on the same Buffer as
  `after`, unless the caller passed one.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.node import has_side_effect

library = torch.library.Library("thunderep", "DEF")

library.define(
    "dispatch(Tensor x, Tensor topk_idx, Tensor topk_weights, int num_experts, str buffer, SymInt max_tokens=-1,"
    " Tensor? x_scales=None, Tensor? after=None)"
    " -> (Tensor recv_x, Tensor recv_topk_idx, Tensor recv_topk_weights, Tensor recv_x_scales, Tensor is_token_in_rank)"
)
library.define(
    "dispatch_backward(Tensor grad_recv_x, Tensor grad_recv_topk_weights, Tensor recv_topk_idx, Tensor is_token_in_rank,"
    " str buffer, Tensor? after=None) -> (Tensor grad_x, Tensor grad_topk_weights)"
)
library.define("combine(Tensor y, Tensor recv_topk_idx, Tensor is_token_in_rank, str buffer, Tensor? after=None) -> Tensor")
library.define(
    "combine_backward(Tensor grad, Tensor recv_topk_idx, Tensor is_token_in_rank, str buffer, Tensor? after=None) -> Tensor"
)
library.define(
    "permute(Tensor x, Tensor topk_idx, int num_local_experts, SymInt capacity=-1, int alignment=1)"
    " -> (Tensor expert_x, Tensor offsets, Tensor row_id_map)"
)
library.define("unpermute(Tensor expert_y, Tensor row_id_map, Tensor topk_weights) -> Tensor")
library.define(
    "unpermute_backward(Tensor grad, Tensor expert_y, Tensor row_id_map, Tensor topk_weights)"
    " -> (Tensor grad_expert_y, Tensor grad_topk_weights)"
)
library.define("all_gather(Tensor x, str buffer, SymInt[]? sizes=None, Tensor? after=None) -> Tensor")
library.define("reduce_scatter(Tensor y, str buffer, SymInt[]? sizes=None, Tensor? after=None) -> Tensor")
library.define("all_reduce(Tensor x, str buffer, Tensor? after=None) -> Tensor")
library.define("grouped_mm(Tensor a, Tensor b, Tensor offsets) -> Tensor")

COMMUNICATION = (
    "dispatch", "dispatch_backward", "combine", "combine_backward", "all_gather", "reduce_scatter", "all_reduce",
)  # fmt: skip

_last: weakref.WeakKeyDictionary[Any, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()
"""For each trace in progress, the newest result of each Buffer."""


def _chain(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Record `func` in the graph being traced, with the result of the Buffer's previous operation as its `after`."""
    names = [argument.name for argument in func._schema.arguments]
    call = dict(zip(names, args, strict=False)) | dict(kwargs or {})
    chain = _last.setdefault(mode.tracer, {})
    if call.get("after") is None and call["buffer"] in chain:
        call["after"] = chain[call["buffer"]]
    result = mode.__torch_dispatch__(func, types, (), call)
    # The last result is the smallest, and a compiled forward may have to keep it for the backward.
    chain[call["buffer"]] = result[-1] if isinstance(result, tuple | list) else result
    return result


for _name in COMMUNICATION:
    torch.library.register_torch_dispatch(f"thunderep::{_name}", ProxyTorchDispatchMode, _chain, lib=library)
    has_side_effect(getattr(torch.ops.thunderep, _name).default)
