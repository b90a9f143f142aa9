"""Real text that every machine has: the source of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings"}
"""Folders of other packages, of test data and of tables."""

_HELD_OUT = 16
"""One part in so many, the last, is not trained on."""


def load_corpus(max_bytes: int, min_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The library's *.py files one after another, in the order of their paths.

    Args:
        max_bytes: Where to stop.
        min_bytes: What either part must have.

    Returns:
        Two uint8 tensors of together at most `max_bytes` bytes: text to train on, and text held out.

    Raises:
        RuntimeError: This Python came without (enough of) its source.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    del text[max_bytes:]
    if len(text) < min_bytes * _HELD_OUT:
        raise RuntimeError(
            f"the demo trains on Python's own source: found {len(text)} bytes under {root}, need {min_bytes * _HELD_OUT}"
        )
    corpus = torch.frombuffer(text, dtype=torch.uint8)
    held_out = len(corpus) // _HELD_OUT
    return corpus[:-held_out], corpus[-held_out:]


def global_batch(corpus: torch.Tensor, step: int, sequences: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a training step: the same on every rank and in every run, whoever trains on which part.

    Args:
        corpus: uint8 [bytes].
        step: Which batch.
        sequences: How many sequences, drawn at random offsets.
        length: Bytes in a sequence.
        seed: Of the offsets, with `step`.

    Returns:
        Inputs and targets (the next byte), int64 [sequences, length].
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(corpus) - length, (sequences, 1), generator=generator)
    text = corpus[starts + torch.arange(length + 1)].long()
    return text[:, :-1], text[:, 1:]
