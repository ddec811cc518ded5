"""torchq: quantize Hugging Face models in place, run them packed, save checkpoints that vLLM loads as they are."""

from typing import TYPE_CHECKING, Any

from torchq._version import __version__
from torchq.algorithms.awq import AWQ
from torchq.algorithms.gptq import GPTQ
from torchq.algorithms.rtn import RTN
from torchq.algorithms.smoothquant import SmoothQuant
from torchq.checkpoint.reader import load_pretrained
from torchq.checkpoint.writer import save_pretrained
from torchq.config import QuantConfig
from torchq.dequantize import dequantize_
from torchq.linear import QuantLinear
from torchq.qat import convert_qat_
from torchq.quantize import quantize_
from torchq.report import QuantReport
from torchq.scheme import QuantArgs, Scheme
from torchq.siblings import fuse_siblings_
from torchq.training import prepare_for_training
from torchq.warmup import warmup

if TYPE_CHECKING:
    from torchq.kv_cache import FP8KVCache

__all__ = [
    "AWQ",
    "GPTQ",
    "RTN",
    "FP8KVCache",
    "QuantArgs",
    "QuantConfig",
    "QuantLinear",
    "QuantReport",
    "Scheme",
    "SmoothQuant",
    "__version__",
    "convert_qat_",
    "dequantize_",
    "fuse_siblings_",
    "load_pretrained",
    "prepare_for_training",
    "quantize_",
    "save_pretrained",
    "warmup",
]


def __getattr__(name: str) -> Any:
    """Import what needs transformers when it is used."""
    if name == "FP8KVCache":
        from torchq.kv_cache import FP8KVCache

        return FP8KVCache
    raise AttributeError(f"module 'torchq' has no attribute {name!r}")
