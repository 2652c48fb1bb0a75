"""Batches for jobs: ``Loader`` over what can be indexed by sample; ``npy``, ``safetensors`` and ``tokens`` are files that can."""

from .files import npy, safetensors, tokens
from .loader import Loader, SampleError

__all__ = ["Loader", "SampleError", "npy", "safetensors", "tokens"]
