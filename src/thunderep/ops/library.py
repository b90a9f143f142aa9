"""The one Library: every schema, and what compilers are told about order.

Importing this module defines the operators; `thunderep.ops` adds what they do. Ranks must issue the operations of one
Buffer in one order, also under a compiler, which keeps only the order that data carries. Two registrations see to it:

* operators that communicate, or wait for one that does, count as having side effects, so none is removed when unused;
* while a graph is traced (forward and backward), each of them gets the result of the one before it on the same Buffer as
  `after`, unless the caller passed one. What a checkpoint would compute again would come after the same result as before, and
  so in no order with the backward; under a compiler checkpoints therefore keep what these operators return.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.node import Node, has_side_effect
from torch.utils.checkpoint import CheckpointPolicy

from thunderep.runtime.transport import COLLECTIVES

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
    "dispatch_start(Tensor x, Tensor topk_idx, Tensor topk_weights, int num_experts, str buffer, SymInt max_tokens=-1,"
    " Tensor? x_scales=None, Tensor? after=None) -> Tensor handle"
)
library.define(
    "dispatch_wait(Tensor handle, str buffer, SymInt received, SymInt tokens, ScalarType dtype, ScalarType idx_dtype,"
    " SymInt scales, Tensor? after=None)"
    " -> (Tensor recv_x, Tensor recv_topk_idx, Tensor recv_topk_weights, Tensor recv_x_scales, Tensor is_token_in_rank)"
)
library.define(
    "combine_start(Tensor y, Tensor recv_topk_idx, Tensor is_token_in_rank, str buffer, Tensor? after=None) -> Tensor handle"
)
library.define(
    "combine_wait(Tensor handle, str buffer, Tensor recv_topk_idx, Tensor is_token_in_rank, ScalarType dtype,"
    " Tensor? after=None) -> Tensor"
)
library.define(
    "dispatch_backward_start(Tensor grad_recv_x, Tensor grad_recv_topk_weights, Tensor recv_topk_idx, Tensor is_token_in_rank,"
    " str buffer, Tensor? after=None) -> Tensor handle"
)
library.define(
    "dispatch_backward_wait(Tensor handle, str buffer, SymInt tokens, ScalarType dtype, Tensor? after=None)"
    " -> (Tensor grad_x, Tensor grad_topk_weights)"
)
library.define(
    "combine_backward_start(Tensor grad, Tensor recv_topk_idx, Tensor is_token_in_rank, str buffer, Tensor? after=None)"
    " -> Tensor handle"
)
library.define(
    "combine_backward_wait(Tensor handle, str buffer, SymInt received, ScalarType dtype, Tensor? after=None) -> Tensor grad_y"
)
library.define(
    "permute(Tensor x, Tensor topk_idx, int num_local_experts, SymInt capacity=-1, int alignment=1)"
    " -> (Tensor expert_x, Tensor offsets, Tensor row_id_map)"
)
library.define("quantize_fp8(Tensor x) -> (Tensor x_fp8, Tensor x_scales)")
# 15 is bfloat16: not every version of PyTorch reads its name here.
library.define(
    "permute_fp8(Tensor x, Tensor x_scales, Tensor topk_idx, int num_local_experts, SymInt capacity=-1, int alignment=1,"
    " ScalarType dtype=15) -> (Tensor expert_x, Tensor offsets, Tensor row_id_map)"
)
library.define("unpermute(Tensor expert_y, Tensor row_id_map, Tensor topk_weights) -> Tensor")
library.define(
    "unpermute_backward(Tensor grad, Tensor expert_y, Tensor row_id_map, Tensor topk_weights)"
    " -> (Tensor grad_expert_y, Tensor grad_topk_weights)"
)
library.define("all_gather(Tensor x, str buffer, SymInt[]? sizes=None, Tensor? after=None) -> Tensor")
library.define("reduce_scatter(Tensor y, str buffer, SymInt[]? sizes=None, Tensor? after=None) -> Tensor")
library.define("all_reduce(Tensor x, str buffer, Tensor? after=None) -> Tensor")
library.define("swiglu(Tensor gate_up, Tensor offsets) -> Tensor")
library.define("swiglu_backward(Tensor grad, Tensor gate_up, Tensor offsets) -> Tensor grad_gate_up")
library.define("grouped_mm(Tensor a, Tensor b, Tensor offsets) -> Tensor")

HALVED = ("dispatch", "dispatch_backward", "combine", "combine_backward")
"""What may be started and waited for."""

COMMUNICATION = (*(f"{name}{half}" for name in HALVED for half in ("", "_start", "_wait")), *COLLECTIVES)


@dataclass
class _Trace:
    """Of a trace in progress: the newest result of each Buffer, and the nodes of the newest operation of all."""

    last: dict[str, torch.Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)


_traces: weakref.WeakKeyDictionary[Any, _Trace] = weakref.WeakKeyDictionary()


def _chain(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Record `func` in the graph being traced, with the result of the Buffer's previous operation as its `after`."""
    names = [argument.name for argument in func._schema.arguments]
    call = dict(zip(names, args, strict=False)) | dict(kwargs or {})
    trace = _traces.setdefault(mode.tracer, _Trace())
    for node in trace.nodes:  # a checkpoint tags nodes once they are there, so the previous operation's have their tags by now
        if "recompute" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    if call.get("after") is None and call["buffer"] in trace.last:
        call["after"] = trace.last[call["buffer"]]
    nodes = mode.tracer.graph.nodes
    before = len(nodes)
    result = mode.__torch_dispatch__(func, types, (), call)
    trace.nodes = list(islice(reversed(nodes), len(nodes) - before))
    # The last result is the smallest, and a compiled forward may have to keep it for the backward.
    trace.last[call["buffer"]] = result[-1] if isinstance(result, tuple | list) else result
    return result


for _name in COMMUNICATION:
    torch.library.register_torch_dispatch(f"thunderep::{_name}", ProxyTorchDispatchMode, _chain, lib=library)
    has_side_effect(getattr(torch.ops.thunderep, _name).default)
