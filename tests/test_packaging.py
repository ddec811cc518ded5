"""The folders, the wheel and the import: what architecture choices must not break."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("kernels", "integrations")


def run_python(code: str, cwd: Path, path: Path | None = None) -> str:
    """Run code in a fresh interpreter, as ``python -c`` in ``cwd`` does, and return what it printed."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def installed(distribution: str) -> bool:
    return any(d.metadata["Name"] == distribution for d in importlib.metadata.distributions())


def modules(folder: Path, prefix: str) -> set[str]:
    """The Python files under a folder, as a wheel names them."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return {f"{prefix}/{file}" for file in files if "__pycache__" not in file}


@pytest.mark.parametrize("name", LINKED)
def test_link_is_relative_and_folder_has_no_init(name):
    link = ROOT / "torchq" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert not list((ROOT / name).rglob("__init__.py"))


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a git checkout")
@pytest.mark.parametrize("name", LINKED)
def test_link_is_committed_as_a_link(name):
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "--stage", f"torchq/{name}"]
    staged = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert staged.startswith("120000 "), staged


@pytest.mark.skipif(not installed("torchq-llm"), reason="torchq is not installed, only on the path")
def test_import_kernels_elsewhere_does_not_find_ours(tmp_path):
    code = "import torchq, importlib.util; print(importlib.util.find_spec('kernels'))"
    assert str(ROOT) not in run_python(code, cwd=tmp_path)


def test_import_kernels_in_the_checkout_finds_the_installed_package(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '0.18.2'\n")
    assert run_python("import torchq, kernels; print(kernels.__file__)", ROOT, tmp_path).startswith(str(tmp_path))


def test_transformers_in_the_checkout_does_not_take_our_folder_for_the_kernels_package():
    code = "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    assert installed("kernels") or run_python(code, cwd=ROOT) == "False"


def test_import_torchq_is_light():
    code = (
        "import sys, torchq, torch\n"
        "heavy = ('transformers', 'accelerate', 'gguf', 'peft', 'torchq.kv_cache', 'torchq.kv_layer')\n"
        "print([m for m in heavy if m in sys.modules])\n"
        "print([m for m in sys.modules if m.startswith('torchq.integrations.')])\n"
        "print(torch.cuda.is_initialized())"
    )
    assert run_python(code, cwd=ROOT).split("\n") == ["[]", "[]", "False"]


def test_the_kv_cache_is_imported_when_it_is_used():
    code = (
        "import sys, torchq\n"
        "assert 'FP8KVCache' in torchq.__all__ and 'transformers' not in sys.modules\n"
        "from torchq import FP8KVCache\n"
        "from transformers import AttentionInterface\n"
        "print(FP8KVCache.__module__, 'torchq' in AttentionInterface().valid_keys())"
    )
    assert run_python(code, cwd=ROOT) == "torchq.kv_cache True"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """A wheel built from a copy of the sources, so that the checkout's stale build/ folder plays no part."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in ("torchq", *LINKED):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    name = run_python(code, cwd=source).split("\n")[-1]
    with zipfile.ZipFile(source / "dist" / name) as file:
        yield file


def test_wheel_holds_every_module_once(wheel):
    expected = modules(ROOT / "torchq", "torchq")  # a glob does not enter the links
    for name in LINKED:
        expected |= modules(ROOT / name, f"torchq/{name}")
    names = [name for name in wheel.namelist() if name.endswith(".py")]
    assert sorted(names) == sorted(expected)
    assert "torchq/py.typed" in wheel.namelist()


def test_wheel_metadata(wheel):
    texts = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "Name: torchq-llm\n" in texts["METADATA"]
    assert "License-Expression: Apache-2.0\n" in texts["METADATA"]
    assert "torchq = torchq.cli:main" in texts["entry_points.txt"]
    assert texts["top_level.txt"].split() == ["torchq"]
    assert "LICENSE" in texts
