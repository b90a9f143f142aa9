"""Writing text with the trained model: all ranks together, each its own sample."""

from __future__ import annotations

import torch

from thunderep.demo.config import DemoConfig
from thunderep.demo.model import KeyValues, Model

PROMPTS = ("def ", "class ", "import ", "    for ", "    if ", '    """', "    return ", "    with ")


@torch.inference_mode()
def generate(model: Model, config: DemoConfig, rank: int) -> str:
    """Continue this rank's prompt, with a cache of keys and values.

    Every byte takes one pass of all ranks through the experts: ranks whose sample has ended take part with no tokens, as the
    ranks of a serving engine do.

    Returns:
        The prompt and what follows it.
    """
    prompts = [PROMPTS[r % len(PROMPTS)].encode() for r in range(config.ranks)]
    generator = torch.Generator().manual_seed(config.seed + rank)
    past = [KeyValues(config.model.window) for _ in range(config.model.layers)]
    text = bytearray(prompts[rank])
    tokens = torch.tensor([list(text)], device=config.device)
    max_tokens, position = max(map(len, prompts)), 0
    for _ in range(config.sample_bytes[1]):
        logits = model.next_bytes(tokens, position, max_tokens, past)
        max_tokens, position = 1, position + tokens.shape[1]
        tokens = _sample(logits, config.temperature, generator)
        text += bytes(tokens.flatten().tolist())
        if text.endswith(b"\n\n") and len(text) >= config.sample_bytes[0]:
            tokens = tokens[:0]
            for layer in past:
                layer.clear()
    return text.decode(errors="replace")


def _sample(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """One byte for each row: [B, V] to int64 [B, 1]. Drawn on the CPU, so that a device gives the same text."""
    probabilities = (logits.float().cpu() / temperature).softmax(dim=-1)
    if not len(probabilities):
        return torch.empty(0, 1, dtype=torch.int64, device=logits.device)
    return torch.multinomial(probabilities, 1, generator=generator).to(logits.device)
