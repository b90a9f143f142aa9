"""The operators `torch.ops.thunderep.*`: importing this package registers them."""

from thunderep.ops import collectives, combine, dispatch, grouped_mm, library, permute, unpermute

__all__ = ["collectives", "combine", "dispatch", "grouped_mm", "library", "permute", "unpermute"]
