"""vLLM pins its own torch and transformers, so it lives in an interpreter of its own, which these tests start."""

import json
import os
import select
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Reduce what vLLM does on a CPU to loading a checkpoint and running its kernels.
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process itself, so that one process serves many checkpoints
    "VLLM_CPU_INT4_W4A8": "0",  # or W4A16 is computed with int8 activations where the processor has AMX or zentorch is installed
    "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler takes longer than all the tokens of these tests
    "OMP_NUM_THREADS": "1",  # its spinning, pinned threads take minutes instead of seconds beside any other load
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("TORCHQ_VLLM_PYTHON")
    if not python:
        pytest.skip("TORCHQ_VLLM_PYTHON must name a Python interpreter with vLLM installed; run `make test-vllm`")
    return python


@pytest.fixture(scope="session")
def vllm_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")} | _SETTINGS


@pytest.fixture(scope="session")
def run_vllm(vllm_python: str, vllm_environment: dict[str, str]) -> Callable[..., str]:
    """``run_vllm(code, *arguments, timeout=600)`` runs code where vLLM is installed and returns what it printed."""

    def run(code: str, *arguments: str, timeout: float = 600) -> str:
        command = [vllm_python, "-c", code, *arguments]
        result = subprocess.run(command, env=vllm_environment, capture_output=True, text=True, timeout=timeout, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


class VllmProcess:
    """One process for all checkpoints: importing vLLM takes longer than loading a small model."""

    def __init__(self, python: str, env: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [python, str(Path(__file__).with_name("vllm_worker.py"))],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.has_int4_kernel: bool = self._answer(timeout=300)["has_int4_kernel"]

    def generate(
        self, folder: Path, prompts: list[str], *, max_tokens: int, num_logprobs: int, adapter: Path | None = None
    ) -> list[dict[str, Any]]:
        """Continue prompts; with an adapter, once without it and once with it."""
        request = {"folder": str(folder), "prompts": prompts, "max_tokens": max_tokens, "num_logprobs": num_logprobs}
        request["adapter"] = None if adapter is None else str(adapter)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self._answer(timeout=300)
        assert "error" not in answer, f"vLLM failed on {folder.name}:\n{answer['error']}"
        return answer["completions"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.process.kill()
            state = "ended" if ready else f"gave no answer in {timeout:g} s"
            pytest.fail(f"vLLM's process {state}; the end of its log:\n{self.log.read_text()[-5000:]}")
        return json.loads(line)


@pytest.fixture(scope="session")
def vllm_process(
    vllm_python: str, vllm_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmProcess]:
    process = VllmProcess(vllm_python, vllm_environment, tmp_path_factory.mktemp("vllm") / "log.txt")
    yield process
    process.close()
