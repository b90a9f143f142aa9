"""The operators `torch.ops.thunderep.*`: importing this package registers them."""

from thunderep.ops import combine, dispatch, grouped_mm, library, permute, permute_fp8, quantize, unpermute

__all__ = ["combine", "dispatch", "grouped_mm", "library", "permute", "permute_fp8", "quantize", "unpermute"]
