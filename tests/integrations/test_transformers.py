"""Real model classes of transformers, small and random, over ThunderEP: the same logits and gradients as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.integrations import programs
from thunderep.testing.processes import Ranks

transformers = pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("accelerate")

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("Qwen3MoeConfig", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16}),
    "GLM-4 MoE": (
        "Glm4MoeConfig",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
}
PARALLEL = {"one batch on all ranks": {"tp_size": 2, "ep_size": 2}, "a batch a rank": {"fsdp_size": 2, "ep_size": 2}}

if Version(transformers.__version__) < Version("5.20"):  # which refuse it themselves
    del PARALLEL["a batch a rank"]
DIVIDES_TWICE = "ep_implementation" not in programs.fields()
"""transformers before 5.23, by itself too: the gradients of experts of which FSDP has one copy."""


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random model."""
    name, options = MODELS[request.param]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SMALL | options))
    for parameter in model.parameters():  # all of it random, so that nothing is right by being 0
        torch.nn.init.normal_(parameter, std=0.1)
    path: Path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return str(path)


def in_one_process(path: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def two_ranks() -> Any:
    with Ranks(2) as ranks:
        yield lambda: ranks


@pytest.mark.parametrize("kind", PARALLEL)
def test_logits_and_gradients_equal_one_process(kind: str, saved: str, two_ranks: Callable[[], Ranks]) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(1, 64, (2, length), generator=generator) for length in (9, 5)]
    if kind == "one batch on all ranks":
        batches = [torch.randint(1, 64, (3, 7), generator=generator)]
    found = two_ranks().run(programs.run, saved, PARALLEL[kind], batches, timeout=200)
    expected = [programs.forward_and_backward(in_one_process(saved), batch) for batch in batches]
    for rank, (logits, grads) in enumerate(found):
        torch.testing.assert_close(logits, expected[min(rank, len(batches) - 1)][0], rtol=1e-4, atol=1e-5)
        assert grads.keys() == expected[0][1].keys()
        for name, grad in grads.items():  # of the mean loss
            wanted = sum(e[1][name] for e in expected) / len(expected)
            if DIVIDES_TWICE and kind == "a batch a rank" and ".experts." in name:
                wanted = wanted / len(expected)
            assert torch.allclose(grad, wanted, rtol=1e-3, atol=1e-6), name


def test_generates_what_one_process_generates(saved: str, two_ranks: Callable[[], Ranks]) -> None:
    prompt = torch.randint(1, 64, (1, 5), generator=torch.Generator().manual_seed(1))
    expected = in_one_process(saved).generate(prompt, max_new_tokens=8, do_sample=False)
    for tokens in two_ranks().run(programs.generate, saved, PARALLEL["one batch on all ranks"], prompt, timeout=200):
        assert torch.equal(tokens, expected)


def test_a_larger_batch_before_the_backward_pass(saved: str, two_ranks: Callable[[], Ranks]) -> None:
    batches = [torch.randint(1, 64, (rows, 40), generator=torch.Generator().manual_seed(rows)) for rows in (1, 8)]
    model = in_one_process(saved)
    sum(model(input_ids=batch, labels=batch).loss for batch in batches).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for grads in two_ranks().run(programs.accumulate, saved, PARALLEL["one batch on all ranks"], batches, timeout=200):
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert torch.allclose(grad, expected[name], rtol=1e-3, atol=1e-6), name
