"""vLLM pins its own torch and transformers, so it lives in an interpreter of its own, which these tests start."""

import os
import subprocess
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def run_vllm() -> Callable[..., str]:
    """``run_vllm(code, *arguments, timeout=600)`` runs code where vLLM is installed and returns what it printed."""
    python = os.environ.get("TORCHQ_VLLM_PYTHON")
    if not python:
        pytest.fail("TORCHQ_VLLM_PYTHON must name a Python interpreter with vLLM installed; run `make test-vllm`")
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}

    def run(code: str, *arguments: str, timeout: float = 600) -> str:
        command = [python, "-c", code, *arguments]
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run
