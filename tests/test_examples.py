"""The examples run, with few steps."""

import subprocess
import sys
from pathlib import Path

import pytest

from torchq import load_pretrained
from torchq.integrations.peft_adapter import load_adapter

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.slow


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, cwd=EXAMPLES.parent)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_training_script_one_line() -> None:
    code = "import training_script_one_line as script; losses = script.main(steps=3, length=32, batch=2); assert losses[-1] < 10"
    printed = run("-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); {code}")
    assert "trainable params" in printed and printed.count("loss") == 3


def test_qlora_sft(tmp_path: Path) -> None:
    few = ("--steps", "2", "--batch", "2", "--characters", "120", "--calibrate", "16")
    printed = run(str(EXAMPLES / "qlora_sft.py"), "--output", str(tmp_path), *few)
    assert printed.count("evaluation loss:") == 2 and "vllm serve" in printed
    load_pretrained(tmp_path / "merged")
    model = load_adapter(load_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert len(model.targeted_module_names) == 210
