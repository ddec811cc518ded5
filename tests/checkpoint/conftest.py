"""Checkpoints read with compressed-tensors itself, and the reference checkpoints that llm-compressor wrote."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of the reference checkpoints."""
    return Path(__file__).parents[1] / "golden" / "llmcompressor"


@pytest.fixture(scope="session")
def read_tensors() -> Callable[[Path], dict[str, Tensor]]:
    """Name -> tensor of all shards of a folder, read with safetensors."""

    def read(folder: Path) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        return tensors

    return read


@pytest.fixture(scope="session")
def decompress(read_tensors: Callable[[Path], dict[str, Tensor]]) -> Callable[[Path], dict[str, Tensor]]:
    """Module name -> weight that compressed-tensors makes of a checkpoint, by its own config and its own compressors."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")

    def run(folder: Path) -> dict[str, Tensor]:
        settings = json.loads((folder / "config.json").read_text())["quantization_config"]
        config = quantization.QuantizationConfig.model_validate(settings)
        modules: dict[str, dict[str, Tensor]] = {}
        for name, tensor in read_tensors(folder).items():
            module, _, kind = name.rpartition(".")
            if kind != "bias":
                modules.setdefault(module, {})[kind] = tensor
        weights = {}
        for name, tensors in modules.items():
            if "weight_scale" in tensors:
                scheme = scheme_of(config, name)
                assert scheme is not None, f"{name} is quantized, but config.json has no scheme for it"
                compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format or config.format)
                weights[name] = compressor.decompress(dict(tensors), scheme)["weight"]
        return weights

    return run


def scheme_of(config: Any, name: str) -> Any:
    """compressed-tensors' scheme of a Linear of this name."""
    from compressed_tensors.utils.match import is_match, match_targets

    linear = torch.nn.Linear(1, 1)
    if any(is_match(name, linear, pattern) for pattern in config.ignore or ()):
        return None
    schemes = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    found = match_targets(name, linear, list(schemes))
    return schemes[found[0]] if found else None
