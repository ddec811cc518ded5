"""A quantize_ that fails, or is interrupted, gives the model back as it was, without having held it twice."""

import copy
import gc
import shutil
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchq.quantize
from torchq import QuantConfig, QuantLinear, quantize_
from torchq._undo import UndoLog
from torchq.algorithms.rtn import quantize_weight
from torchq.testing import tiny_llama

W4 = QuantConfig("W4A16", group_size=32)
W4_ALL = QuantConfig("W4A16", group_size=32, ignore=())
IDS = torch.arange(3, 15)[None]


def fail_at(monkeypatch: pytest.MonkeyPatch, k: int, error: BaseException, before: Callable[[], None] = lambda: None) -> None:
    """Let the k-th layer (from 1) fail while its weight is quantized."""
    calls = 0

    def quantize(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == k:
            before()
            raise error
        return quantize_weight(*args)

    monkeypatch.setattr(torchq.quantize, "quantize_weight", quantize)


def description(model: nn.Module) -> dict[str, Any]:
    """All there is to a model but the identity of its objects."""
    return {
        "modules": {name: type(module) for name, module in model.named_modules(remove_duplicate=False)},
        "flags": {name: (p.requires_grad, p.dtype, p.device) for name, p in model.named_parameters(remove_duplicate=False)},
        "shared": [sorted(names) for names in sharing(model).values()],
        "training": [module.training for module in model.modules()],
        "config": str(getattr(model, "config", None)),
        "tied": dict(getattr(model, "all_tied_weights_keys", {})),
    }


def sharing(model: nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def assert_as_before(model: nn.Module, expected: nn.Module) -> None:
    assert description(model) == description(expected)
    state, expected_state = model.state_dict(), expected.state_dict()
    assert state.keys() == expected_state.keys()
    assert all(torch.equal(state[name], expected_state[name]) for name in state)
    assert not hasattr(model, "quant_report")


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("k", [1, 2, 9, 15])
@pytest.mark.parametrize("tied", [False, True])
def test_a_failure_at_any_layer_is_rolled_back(monkeypatch: pytest.MonkeyPatch, k: int, error: BaseException, tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied, attention_bias=True, dtype=torch.bfloat16)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    expected, before = copy.deepcopy(model), model(IDS).logits
    fail_at(monkeypatch, k, error)
    with pytest.raises(type(error)):
        quantize_(model, W4_ALL)
    assert_as_before(model, expected)
    assert torch.equal(model(IDS).logits, before)
    monkeypatch.undo()
    report = quantize_(model, W4)  # and it still can be quantized
    assert len([layer for layer in report.layers if layer.status == "quantized"]) == 14


def test_modules_that_the_caller_holds_come_back_as_the_same_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    expected = copy.deepcopy(model)
    held = model.model.layers[0].self_attn.q_proj
    weight = held.weight
    fail_at(monkeypatch, 5, RuntimeError())
    with pytest.raises(RuntimeError):
        quantize_(model, W4)
    assert model.model.layers[0].self_attn.q_proj is held and held.weight is weight
    assert_as_before(model, expected)


def test_a_weight_that_the_caller_holds_comes_back_as_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer holds parameters, not modules."""
    model = tiny_llama(attention_bias=True)
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fail_at(monkeypatch, 9, RuntimeError())
    with pytest.raises(RuntimeError):
        quantize_(model, W4)
    assert_as_before(model, expected)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert all(id(parameter) in held for parameter in model.parameters())


def test_weights_are_let_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is reached, the 16-bit weights of those before it are gone."""
    model = tiny_llama()
    expected = copy.deepcopy(model)
    linears = [weakref.ref(module) for module in model.modules() if isinstance(module, nn.Linear)]
    alive: list[int] = []

    def count() -> None:
        gc.collect()
        alive.append(sum(reference() is not None for reference in linears))

    fail_at(monkeypatch, 11, RuntimeError(), before=count)
    with pytest.raises(RuntimeError):
        quantize_(model, W4)
    assert alive == [15 - 10]
    assert_as_before(model, expected)


@pytest.mark.parametrize("k", [2, 3])
def test_shared_modules_and_weights_are_shared_again(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Embedding(64, 64))
    model[1].weight = model[0].weight
    model[4].weight = model[2].weight
    model.add_module("again", model[0])
    expected = copy.deepcopy(model)
    fail_at(monkeypatch, k, RuntimeError())
    with pytest.raises(RuntimeError):
        quantize_(model, "W8A8")
    assert model.again is model[0] and model[1] is not model[0]
    assert_as_before(model, expected)


def test_hooks_and_conv1d_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(96, 64), nn.Linear(96, 64))
    expected, calls = copy.deepcopy(model), []
    handle = model[0].register_forward_hook(lambda *args: calls.append(1))
    fail_at(monkeypatch, 2, RuntimeError())
    with pytest.raises(RuntimeError):
        quantize_(model, "W8A8")
    assert_as_before(model, expected)
    model(torch.ones(1, 64))
    handle.remove()
    assert torch.equal(model(torch.ones(1, 64)), expected(torch.ones(1, 64)))
    assert calls == [1]


def test_tie_flags_come_back_when_the_last_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    expected = copy.deepcopy(model)

    def fail(self: UndoLog) -> None:
        assert model.config.tie_word_embeddings is False and model.all_tied_weights_keys == {}
        raise RuntimeError

    monkeypatch.setattr(UndoLog, "commit", fail)
    with pytest.raises(RuntimeError):
        quantize_(model, W4_ALL)
    assert_as_before(model, expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_warning_that_is_an_error_is_rolled_back() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    expected = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="untied"):
            quantize_(model, W4_ALL)
    assert_as_before(model, expected)


def test_without_undo_the_layers_done_so_far_stay_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    monkeypatch.setattr("torchq._undo.tempfile.TemporaryFile", lambda **kwargs: pytest.fail("wrote an undo log"))
    fail_at(monkeypatch, 5, RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        quantize_(model, W4, undo=False)
    assert sum(isinstance(module, QuantLinear) for module in model.modules()) == 4


def test_too_little_room_is_found_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    expected = copy.deepcopy(model)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("torchq._undo.shutil.disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"undo=True keeps 0\.0 GB of replaced weights in .*set TMPDIR.*or undo=False"):
        quantize_(model, W4)
    assert_as_before(model, expected)
    quantize_(model, W4, undo=False)


def test_a_full_disk_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    expected = copy.deepcopy(model)
    original = UndoLog.record
    calls = 0

    def record(self: UndoLog, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise OSError(28, "No space left on device")
        original(self, *args)

    monkeypatch.setattr(UndoLog, "record", record)
    with pytest.raises(OSError, match="No space left"):
        quantize_(model, W4)
    assert_as_before(model, expected)
