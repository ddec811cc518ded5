"""save_pretrained: a checkpoint that other readers load exactly, written whole or not at all."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import torchq.checkpoint.writer
from torchq import QuantArgs, QuantConfig, QuantLinear, Scheme, load_pretrained, quantize_, save_pretrained
from torchq.checkpoint.safetensors_io import DTYPES, ShardWriter, read_header
from torchq.checkpoint.writer import parse_size
from torchq.testing import tiny_llama

IDS = torch.arange(3, 15)[None]
FP8_WEIGHT_ONLY = Scheme(QuantArgs(8, "float", strategy="channel"), name="FP8_WEIGHT_ONLY")
INT8_STATIC = Scheme(QuantArgs(8, strategy="channel"), QuantArgs(8, strategy="tensor", symmetric=False))
SCHEMES: dict[str, dict[str, Any]] = {
    "W4A16-g32": {"scheme": "W4A16", "group_size": 32},
    "W4A16-g64": {"scheme": "W4A16", "group_size": 64},
    "W4A16-channel": {"scheme": "W4A16", "group_size": -1},
    "W4A16_ASYM-g32": {"scheme": "W4A16_ASYM", "group_size": 32},
    "W4A16_ASYM-channel": {"scheme": "W4A16_ASYM", "group_size": -1},
    "W8A16-g32": {"scheme": "W8A16", "group_size": 32},
    "W8A16-channel": {"scheme": "W8A16", "group_size": -1},
    "W2A16-g32": {"scheme": "W2A16", "group_size": 32},
    "W3A16-g32": {"scheme": "W3A16", "group_size": 32},
    "W5A16-g32": {"scheme": "W5A16", "group_size": 32},
    "W6A16-g32": {"scheme": "W6A16", "group_size": 32},
    "W7A16_ASYM-g32": {"scheme": "W7A16_ASYM", "group_size": 32},
    "W8A8": {"scheme": "W8A8"},
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "FP8_BLOCK": {"scheme": "FP8_BLOCK"},
    "FP8_WEIGHT_ONLY": {"scheme": FP8_WEIGHT_ONLY},
    "W4AFP8": {"scheme": "W4AFP8"},
    "FP8": {"scheme": "FP8"},
    "W8A8-static": {"scheme": INT8_STATIC},
    "mixed": {"scheme": "W4A16", "group_size": 32, "overrides": {"re:.*self_attn": "FP8_DYNAMIC"}},
}
CASES = [(name, torch.bfloat16) for name in SCHEMES] + [
    (name, dtype)
    for name in ("W4A16-g32", "W4A16_ASYM-g32", "W3A16-g32", "W8A8", "FP8_DYNAMIC", "mixed")
    for dtype in (torch.float16, torch.float32)
]


def model_for(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    sizes = wide if name in ("FP8_BLOCK", "W4AFP8") else {}
    model = tiny_llama(dtype=dtype, attention_bias=True, **sizes)
    config = QuantConfig(**SCHEMES[name])
    data = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(0))
    quantize_(model, config, calibration=data if config.resolve().needs_calibration else None)
    return model


def quantized(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.fixture(scope="module")
def model() -> Any:
    return model_for("mixed")


# ------------------------------------------------------------------------------------------------------ what is in the files


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_reader_sees_the_same_weights(
    name: str,
    dtype: torch.dtype,
    tmp_path: Path,
    read_tensors: Callable[[Path], dict[str, Tensor]],
    decompress: Callable[[Path], dict[str, Tensor]],
) -> None:
    model = model_for(name, dtype)
    save_pretrained(model, tmp_path / "out")
    state, stored = model.state_dict(), read_tensors(tmp_path / "out")
    assert state.keys() == stored.keys()
    for key, tensor in state.items():
        assert (stored[key].dtype, stored[key].shape) == (tensor.dtype, tensor.shape) and torch.equal(stored[key], tensor), key
    layers, theirs = quantized(model), decompress(tmp_path / "out")
    assert layers.keys() == theirs.keys()
    for key, layer in layers.items():
        assert theirs[key].dtype == dtype and torch.equal(theirs[key], layer.dequantize()), key
    loaded = load_pretrained(tmp_path / "out")
    assert all(torch.equal(quantized(loaded)[key].dequantize(), layer.dequantize()) for key, layer in layers.items())


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_transformers_loads_the_same_weights(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """transformers 5.24 loads asymmetric ones only with dequantize=True, and mixed ones only without."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    model = model_for(name, dtype)
    save_pretrained(model, tmp_path / "out")
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if "ASYM" in name else {}
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True, **options)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        theirs(IDS)  # decompresses
    for key, layer in quantized(model).items():
        assert torch.equal(theirs.get_submodule(key).weight, layer.dequantize()), key
        assert layer.bias is None or torch.equal(theirs.get_submodule(key).bias, layer.bias)


def test_config(model: Any, tmp_path: Path) -> None:
    before = model.config.to_dict()
    save_pretrained(model, tmp_path / "out")
    config = config_of(tmp_path / "out")
    settings = config["quantization_config"]
    assert settings["ignore"] == ["lm_head"]
    assert settings["format"] == "mixed-precision"
    assert [len(group["targets"]) for group in settings["config_groups"].values()] == [1, 6]
    assert all(group["targets"] == sorted(group["targets"]) for group in settings["config_groups"].values())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    assert model.config.to_dict() == before  # the model's own config is not touched
    pytest.importorskip("compressed_tensors.quantization").QuantizationConfig.model_validate(settings)


def test_the_config_describes_the_model_and_not_where_it_came_from(tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.architectures, model.config.dtype = ["LlamaForSequenceClassification"], "float16"
    model.to(torch.bfloat16)
    quantize_(model, "W8A8")
    save_pretrained(model, tmp_path / "out")
    assert config_of(tmp_path / "out")["architectures"] == ["LlamaForCausalLM"]
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"
    assert type(load_pretrained(tmp_path / "out")) is type(model)


def test_ignore_holds_exactly_the_linears_that_are_not_quantized(tmp_path: Path) -> None:
    model = tiny_llama()
    quantize_(model, QuantConfig("W8A8", ignore=["lm_head", "re:.*layers.1.mlp.(gate|up)"], overrides={"re:.*k_proj": None}))
    save_pretrained(model, tmp_path / "out")
    linears = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert set(config_of(tmp_path / "out")["quantization_config"]["ignore"]) == linears
    assert len(linears) == 5


def test_routers_and_fused_experts_are_ignored_under_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    """vLLM builds routers as Linear layers, and looks experts up one by one."""
    import re

    from transformers import MixtralConfig, MixtralForCausalLM

    settings = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                    vocab_size=128, num_local_experts=2)  # fmt: skip
    model = MixtralForCausalLM(MixtralConfig(**settings)).eval()
    model.save_pretrained(tmp_path / "original")
    with pytest.warns(UserWarning, match="stay in 16 bits"):
        quantize_(model, "W8A8")
    save_pretrained(model, tmp_path / "out")
    ignore = config_of(tmp_path / "out")["quantization_config"]["ignore"]
    assert "model.layers.1.block_sparse_moe.gate" in ignore and "lm_head" in ignore
    patterns = [re.compile(entry[3:]) for entry in ignore if entry.startswith("re:")]
    names = [name.removesuffix(".weight") for name in read_header(tmp_path / "original" / "model.safetensors")]
    experts = {name for name in names if ".experts." in name}
    assert len(experts) == 12
    assert {name for name in names if any(pattern.match(name) for pattern in patterns)} == experts


@pytest.mark.parametrize("existed", [False, True])
def test_everything_beside_the_weights(model: Any, tmp_path: Path, existed: bool) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}  # the second in a subfolder
    if existed:
        (tmp_path / "out").mkdir(mode=0o755)
    model.generation_config.max_new_tokens = 7
    save_pretrained(model, tmp_path / "out", tokenizer=tokenizer)
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "quant_report.json", "tokenizer.json"} <= files
    assert "model.safetensors.index.json" not in files
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    assert load_pretrained(tmp_path / "out").generation_config.max_new_tokens == 7
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


# ---------------------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("limit", [1, 20_000, "30KB", "50KiB"])
def test_shards(model: Any, tmp_path: Path, limit: int | str, read_tensors: Callable[[Path], dict[str, Tensor]]) -> None:
    save_pretrained(model, tmp_path / "one")
    save_pretrained(model, tmp_path / "many", max_shard_size=limit)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = sorted(file.name for file in (tmp_path / "many").glob("model-*.safetensors"))
    assert shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))] and len(shards) > 1
    whole, parts = read_tensors(tmp_path / "one"), read_tensors(tmp_path / "many")
    assert whole.keys() == parts.keys() == index["weight_map"].keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    shard_of: dict[str, str] = {}
    for shard in shards:
        header = read_header(tmp_path / "many" / shard)
        start = 8 + int.from_bytes((tmp_path / "many" / shard).read_bytes()[:8], "little")
        size = 0
        for name, entry in header.items():
            assert index["weight_map"][name] == shard
            assert shard_of.setdefault(name.rpartition(".")[0], shard) == shard  # a module's tensors are in one file
            assert (start + entry["data_offsets"][0]) % DTYPES[entry["dtype"]].itemsize == 0
            size += entry["data_offsets"][1] - entry["data_offsets"][0]
        assert size <= parse_size(limit) or len({name.rpartition(".")[0] for name in header}) == 1
        with safe_open(tmp_path / "many" / shard, "pt") as file:
            assert set(file.keys()) == header.keys() and file.metadata() == {"format": "pt"}
    loaded = load_pretrained(tmp_path / "many")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, load_pretrained(tmp_path / "one")(IDS).logits)


def test_transformers_loads_shards(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = model_for("W4A16-g32")
    save_pretrained(model, tmp_path / "out", max_shard_size="20KB")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    with torch.no_grad():
        theirs(IDS)
    assert all(torch.equal(theirs.get_submodule(key).weight, layer.dequantize()) for key, layer in quantized(model).items())


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (5, 5),
        ("5GB", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("1.5 kb", 1500),
        ("512MiB", 512 * 2**20),
        ("7B", 7),
        (" 2TB ", 2 * 10**12),
    ],
)
def test_sizes(size: int | str, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", [0, -1, True, "5", "GB", "5 apples", "0GB", "-1GB", "1e9B", 1.5, None, "5iB"])
def test_what_is_no_size(size: Any, model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_shard_size must be a number of bytes or a string such as '5GB', got"):
        save_pretrained(model, tmp_path / "out", max_shard_size=size)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------- where it goes


def test_a_folder_that_is_not_empty_is_left_alone(model: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="out exists and is not empty; choose another folder or remove it first"):
        save_pretrained(model, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["notes.txt"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="file is a file; choose another folder"):
        save_pretrained(model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


def test_an_empty_folder_a_link_to_one_and_the_working_folder(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept, as they may be a mount point; parents are made."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    numbers = {name: (tmp_path / name).stat().st_ino for name in ("empty", "real", "here")}
    for folder in (tmp_path / "empty", str(tmp_path / "link"), ".", tmp_path / "a" / "b" / "c"):
        save_pretrained(model, folder)
        load_pretrained(folder)
    assert numbers == {name: (tmp_path / name).stat().st_ino for name in numbers}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "empty", "here", "link", "real"]
    assert not [file for file in tmp_path.rglob(".*")]


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"nothing in the model is quantized; call quantize_ first, or use model\.save_pretrained"
    ):
        save_pretrained(tiny_llama(), tmp_path / "out")
    plain = nn.Sequential(nn.Linear(64, 64))
    quantize_(plain, "W8A8")
    with pytest.raises(TypeError, match=r"model must be a transformers model, got Sequential; save its state_dict\(\) yourself"):
        save_pretrained(plain, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------- whole or not at all


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupt"])
@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("k", [1, 20, 40])
def test_a_failed_write_leaves_nothing(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, existed: bool, k: int
) -> None:
    if existed:
        (tmp_path / "out").mkdir()
    calls, original = 0, ShardWriter.write

    def write(self: ShardWriter, name: str, tensor: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == k:
            raise error
        original(self, name, tensor)

    monkeypatch.setattr(ShardWriter, "write", write)
    with pytest.raises(type(error), match="" if isinstance(error, KeyboardInterrupt) else "No space left"):
        save_pretrained(model, tmp_path / "out", max_shard_size="30KB")
    assert calls == k
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")] == (["out"] if existed else [])
    monkeypatch.undo()
    save_pretrained(model, tmp_path / "out")
    load_pretrained(tmp_path / "out")


@pytest.mark.parametrize("existed", [False, True])
def test_a_failure_at_the_very_end_leaves_nothing(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    if existed:
        (tmp_path / "out").mkdir()
    original = Path.rename

    def rename(self: Path, target: Any) -> Path:
        if not existed or self.name == "config.json":
            assert not (tmp_path / "out" / "config.json").exists()
            raise OSError("interrupted")
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="interrupted"):
        save_pretrained(model, tmp_path / "out")
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")] == (["out"] if existed else [])


def save_and_be_killed(model: Any, folder: Path) -> None:
    original, calls = ShardWriter.write, 0

    def write(self: ShardWriter, name: str, tensor: Tensor) -> None:
        nonlocal calls
        calls += 1
        original(self, name, tensor)
        if calls == 30:
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    ShardWriter.write = write  # type: ignore[method-assign]
    save_pretrained(model, folder, max_shard_size="30KB")


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.parametrize("existed", [False, True])
def test_a_killed_process_leaves_no_folder_that_loads(model: Any, tmp_path: Path, existed: bool) -> None:
    if existed:
        (tmp_path / "out").mkdir()
    process = multiprocessing.get_context("fork").Process(target=save_and_be_killed, args=(model, tmp_path / "out"))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "out").exists() is existed
    if existed:
        with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
            load_pretrained(tmp_path / "out")
    assert not list(tmp_path.rglob("config.json"))
    assert len(list(tmp_path.rglob("*.safetensors"))) > 1  # it was killed between shards
    assert [file.name.split("-")[0] for file in tmp_path.rglob(".*")] == [".out"]


def test_the_model_still_works_after_saving(tmp_path: Path) -> None:
    model = model_for("W4A16-g32")
    with torch.no_grad():
        before = model(IDS).logits
        save_pretrained(model, tmp_path / "out")
        assert torch.equal(model(IDS).logits, before)
    fresh = quantized(model_for("W4A16-g32"))
    assert all(layer.is_native == fresh[name].is_native for name, layer in quantized(model).items())


def test_one_layer_at_a_time_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's canonical tensors are made when they are written, and let go before the next ones are made."""
    import weakref

    model = model_for("W4A16-g32")
    alive: list[weakref.ref[Tensor]] = []
    original = ShardWriter.write

    def write(self: ShardWriter, name: str, tensor: Tensor) -> None:
        if name.endswith("weight_packed"):
            alive.append(weakref.ref(tensor))
        original(self, name, tensor)
        assert sum(reference() is not None for reference in alive) <= 2

    monkeypatch.setattr(torchq.checkpoint.writer.ShardWriter, "write", write)
    save_pretrained(model, tmp_path / "out")
    assert len(alive) == 14
