"""Quantization-aware training: the gradients are LSQ's, and what is packed is what was trained, bit for bit."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq import QuantArgs, QuantConfig, QuantLinear, QuantReport, Scheme, convert_qat_, numerics, quantize_
from torchq.evaluation.divergence import english_text, measure_divergence, token_windows
from torchq.fake_quant import FakeQuantLinear
from torchq.testing import sqnr_db, tiny_llama

CHANNEL, TOKEN = QuantArgs(8, "float", strategy="channel"), QuantArgs(8, "float", strategy="token", dynamic=True)
SCHEMES: dict[str, QuantConfig] = {
    "W2A16-g32": QuantConfig("W2A16", group_size=32),
    "W3A16-g64": QuantConfig("W3A16", group_size=64),
    "W4A16-channel": QuantConfig("W4A16", group_size=-1),
    "W4A16_ASYM-g32": QuantConfig("W4A16_ASYM", group_size=32),
    "W2A16_ASYM-g64": QuantConfig("W2A16_ASYM", group_size=64),
    "W8A16-g32": QuantConfig("W8A16", group_size=32),
    "W8A8": QuantConfig("W8A8"),
    "W8A8-tensor": QuantConfig(Scheme(QuantArgs(8, strategy="tensor"), QuantArgs(8, strategy="token", dynamic=True))),
    "W4AFP8": QuantConfig("W4AFP8"),
    "FP8_DYNAMIC": QuantConfig("FP8_DYNAMIC"),
    "FP8_BLOCK": QuantConfig("FP8_BLOCK"),
    "FP8-tensor": QuantConfig(Scheme(QuantArgs(8, "float", strategy="tensor"), TOKEN)),
    "FP8-weight-only": QuantConfig(Scheme(CHANNEL)),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
W3 = QuantConfig("W3A16", group_size=32)
IDS = torch.arange(3, 35).reshape(2, 16)


def mlp(n: int = 144, k: int = 256, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """One Linear in a box, with outliers that scales clip."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(k, n))
    with torch.no_grad():
        model[0].weight.view(-1)[::97] *= 4
    return model.to(dtype)


def fake(name: str, dtype: torch.dtype = torch.float32) -> FakeQuantLinear:
    model = mlp(dtype=dtype)
    quantize_(model, SCHEMES[name], qat=True)
    assert isinstance(model[0], FakeQuantLinear)
    return model[0]


def disturb(model: nn.Module, seed: int = 1) -> None:
    """As training does: change weights and scales at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in fake_layers(model).values():
            noise = torch.randn(layer.weight.shape, generator=generator) * layer.weight.float().std()
            layer.weight.add_((noise / 4).to(layer.weight.dtype))
            layer.weight_scale_log2.copy_(torch.randn(layer.weight_scale_log2.shape, generator=generator) / 4)


def fake_layers(model: nn.Module) -> dict[str, FakeQuantLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, FakeQuantLinear)}


def packed_layers(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(ids).logits.float()


# ------------------------------------------------------------------------------------------------------- what is multiplied


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_packed_weights_are_the_trained_ones_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    quantize_(model, SCHEMES[name], qat=True)
    disturb(model)
    layer = model[0]
    weight, scale = layer.fake_quantized_weight(), layer.weight_scale
    assert weight.dtype == scale.dtype == dtype and not torch.equal(scale, layer.weight_scale_start)
    convert_qat_(model)
    assert isinstance(model[0], QuantLinear) and model[0].scheme is layer.scheme
    assert torch.equal(model[0].dequantize(), weight)
    assert torch.equal(model[0].quantized_tensors()[1], scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_it_starts_from_nearest_rounding(name: str, dtype: torch.dtype) -> None:
    model, other = mlp(dtype=dtype), mlp(dtype=dtype)
    quantize_(model, SCHEMES[name], qat=True)
    quantize_(other, QuantConfig(SCHEMES[name].scheme, group_size=SCHEMES[name].group_size))
    start, nearest = model[0].fake_quantized_weight(), other[0].dequantize()
    assert torch.equal(model[0].weight_scale, other[0].quantized_tensors()[1])
    assert torch.equal(start, nearest)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_forward_pass_is_a_linear_with_that_weight(name: str) -> None:
    layer, x = fake(name), torch.randn(2, 3, 256)
    if layer.scheme.input_activations is None:
        assert torch.equal(layer(x), F.linear(x, layer.fake_quantized_weight(), layer.bias))
        return
    codes, scale = numerics.quantize_dynamic(x, layer.scheme.input_activations)
    rounded = (codes.float().unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)
    assert not torch.equal(rounded, x)
    assert torch.equal(layer(x), F.linear(rounded, layer.fake_quantized_weight(), layer.bias))


@pytest.mark.parametrize("name", SCHEMES)
def test_the_packed_layer_computes_the_same(name: str) -> None:
    """Up to the order of its sums."""
    model, x = mlp(), torch.randn(5, 256)
    quantize_(model, SCHEMES[name], qat=True)
    disturb(model)
    with torch.no_grad():
        before = model(x)
        convert_qat_(model)
        assert sqnr_db(before, model(x)) > 100


# ----------------------------------------------------------------------------------------------------------------- gradients


def straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    return value + (rounded - value).detach()


def lsq(layer: FakeQuantLinear, x: Tensor, weight: Tensor, change: Tensor, bias: Tensor) -> Tensor:
    """The paper's Algorithms 1 and 2 (arXiv 1902.08153, appendix A), for autograd, in float64."""
    args = layer.scheme.weights
    scale = layer.weight_scale_start.double() * 2**change
    per_scale = numerics.to_groups(weight, args).shape[-1]
    q_max = 448 if args.type == "float" else args.quant_max
    q_min = -448 if args.type == "float" else args.quant_min
    factor = 1 / (per_scale * q_max) ** 0.5
    scale = straight_through(scale * factor, scale)  # gradscale
    groups = numerics.to_groups(weight, args)
    scale = scale.reshape(*groups.shape[:2], 1)
    zero = 0 if layer.weight_zero_point is None else layer.weight_zero_point.reshape(scale.shape).double()
    value = (groups / scale + zero).clamp(q_min, q_max)
    rounded = value.float().to(torch.float8_e4m3fn).double() if args.type == "float" else value.round()
    restored = numerics.from_groups((straight_through(value, rounded) - zero) * scale, args, tuple(weight.shape))  # roundpass
    if layer.scheme.input_activations is not None:
        codes, x_scale = numerics.quantize_dynamic(x.detach().float(), layer.scheme.input_activations)
        x = straight_through(x, (codes.double().unflatten(-1, (x_scale.shape[-1], -1)) * x_scale.unsqueeze(-1)).flatten(-2))
    return F.linear(x, restored, bias)


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_are_those_of_the_paper(name: str) -> None:
    layer = fake(name)
    disturb(nn.Sequential(layer))
    x = torch.randn(2, 3, 256, requires_grad=True)
    wanted = torch.randn(2, 3, 144)
    inputs = (x, layer.weight, layer.weight_scale_log2, layer.bias)
    assert layer.bias is not None
    (layer(x) * wanted).sum().backward()
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs if tensor is not None]
    y = lsq(layer, *doubles)
    assert sqnr_db(y.detach(), layer(x).detach()) > 100
    (y * wanted).sum().backward()
    for tensor, double in zip(inputs, doubles, strict=True):
        assert tensor is not None and tensor.grad is not None and double.grad is not None
        assert tensor.grad.shape == tensor.shape and tensor.grad.dtype == tensor.dtype
        assert sqnr_db(double.grad, tensor.grad) > 60
    if "g64" in name or "tensor" in name:
        clipped = layer.weight.grad == 0
        assert clipped.any() and not clipped.all()


def test_nothing_of_the_weights_size_is_kept_for_the_backward_pass() -> None:
    layer, x = fake("W3A16-g64"), torch.randn(4, 256)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x).sum()
    large = [tensor for tensor in kept if tensor.numel() >= layer.weight.numel()]
    assert len(large) == 1 and large[0].data_ptr() == layer.weight.data_ptr()


def test_only_what_asks_for_a_gradient_gets_one() -> None:
    layer, x = fake("W3A16-g64"), torch.randn(4, 256)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None and layer.weight_scale_log2.grad is not None
    layer.requires_grad_(False)
    assert not layer(x).requires_grad
    assert layer(x.requires_grad_()).requires_grad


@pytest.mark.parametrize("name", ["W3A16-g64", "W4A16_ASYM-g32", "FP8_DYNAMIC"])
@pytest.mark.parametrize("change", [-1000.0, 1000.0])
def test_no_step_makes_a_scale_zero_or_changes_its_sign(name: str, change: float) -> None:
    layer = fake(name, torch.bfloat16)
    assert (layer.weight_scale_start < 0).any() == (name == "W3A16-g64")
    with torch.no_grad():
        layer.weight_scale_log2.fill_(change)
    scale = layer.weight_scale
    assert scale.isfinite().all() and torch.equal(scale.sign(), layer.weight_scale_start.sign()) and (scale != 0).all()
    assert layer.fake_quantized_weight().isfinite().all()


# ------------------------------------------------------------------------------------------------------------------ training


def losses(
    model: Any, steps: int = 3, forward: Callable[..., Any] | None = None, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        loss = (model if forward is None else forward)(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def trainable(config: QuantConfig = W3, **settings: Any) -> Any:
    model = tiny_llama(**settings)
    quantize_(model, config, qat=True)
    return model.train()


def test_an_optimizer_made_before_trains_the_same_weights() -> None:
    model = tiny_llama().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = dict(model.named_parameters())
    quantize_(model, W3, qat=True)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert len(after) == len(parameters) + 14
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    found = losses(model, 5, optimizer=optimizer)
    assert found[-1] < found[0] and not torch.equal(weight, before)


def test_gradient_checkpointing_compiling_and_copies_train_alike() -> None:
    model = trainable()
    checkpointed, compiled, copied = (copy.deepcopy(model) for _ in range(3))
    expected = losses(model)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert losses(checkpointed) == pytest.approx(expected, rel=1e-6)
    step = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    assert losses(compiled, forward=step) == pytest.approx(expected, rel=1e-5)
    assert losses(copied.eval()) == pytest.approx(expected, rel=1e-6)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("name", ["W4A16_ASYM-g32", "W8A8", "FP8_DYNAMIC"])
def test_compiled_layers_of_other_schemes(name: str) -> None:
    layer, x = fake(name), torch.randn(4, 256)
    layer(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
    layer.zero_grad()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient)


def test_autocast() -> None:
    model = trainable()
    with torch.autocast("cpu", torch.bfloat16):
        output = model.model.layers[0].mlp.up_proj(torch.randn(4, 64))
        assert output.dtype == torch.bfloat16
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        before = model(IDS).logits
        convert_qat_(model)
        assert sqnr_db(before.float(), model(IDS).logits.float()) > 30


def test_a_run_resumes_from_its_state() -> None:
    model = trainable(QuantConfig("W3A16_ASYM", group_size=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses(model, 2, optimizer=optimizer)
    state, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = losses(model, 2, optimizer=optimizer)
    resumed = trainable(QuantConfig("W3A16_ASYM", group_size=32), seed=5)  # other weights, scales and zero points
    again = torch.optim.AdamW(resumed.parameters(), lr=1e-3)
    resumed.load_state_dict(state)
    again.load_state_dict(moments)
    assert losses(resumed, 2, optimizer=again) == expected


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
def test_casts_keep_what_is_learned_of_scales_in_float32(cast: torch.dtype) -> None:
    layer = fake("W3A16-g64")
    parameter = layer.weight_scale_log2
    with torch.no_grad():
        parameter.fill_(1.2345678e-4)
    layer(torch.randn(4, 256)).sum().backward()
    layer.to(cast)
    assert layer.weight_scale_log2 is parameter and parameter.dtype == torch.float32
    assert parameter.grad is not None and parameter.grad.dtype == torch.float32
    assert torch.equal(parameter, torch.full_like(parameter, 1.2345678e-4))
    assert layer.weight.dtype == layer.weight_scale.dtype == layer(torch.ones(1, 256, dtype=cast)).dtype == cast
    assert layer.to("meta").weight_scale_log2.is_meta


def test_shared_weights_share_their_scales() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
            self.b.weight, self.c = self.a.weight, self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)))

    model, x = Shared(), torch.randn(4, 64)
    report = quantize_(model, W3, qat=True)
    assert model.a is model.c and model.a.weight is model.b.weight and model.a.bias is not model.b.bias
    assert model.a.weight_scale_log2 is model.b.weight_scale_log2
    assert (report.layers[0].name, report.layers[0].reason) == ("a", "also used as b, c")
    disturb(model)
    before = model(x).detach()
    report = convert_qat_(model)
    assert model.a is model.c and torch.equal(model.a.weight_packed, model.b.weight_packed)
    assert report.layers[0].reason == "also used as b, c" and report.num_parameters == 64 * 64 + 2 * 64
    assert sqnr_db(before, model(x).detach()) > 100


def test_a_head_that_is_tied_to_the_embedding() -> None:
    """It trains with it; packing unties them, and the embedding keeps what was trained."""
    config = QuantConfig("W4A16", group_size=32, ignore=["re:.*mlp"])
    model = trainable(config, tie_word_embeddings=True)
    total = sum(parameter.numel() for parameter in tiny_llama(tie_word_embeddings=True).parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight and isinstance(model.lm_head, FakeQuantLinear)
    assert model.quant_report.num_parameters == total and model.config.tie_word_embeddings
    found = losses(model)
    assert found[-1] < found[0]
    before, embedding = logits(model), model.model.embed_tokens.weight
    with pytest.warns(UserWarning, match=r"untied lm_head\.weight from model\.embed_tokens\.weight"):
        report = convert_qat_(model)
    assert model.model.embed_tokens.weight is embedding and not model.config.tie_word_embeddings
    assert report.warnings and "untied" in report.warnings[0]
    assert sqnr_db(before, logits(model)) > 80


def test_conv1d() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(96, 64))
    weight, x = model[0].weight, torch.randn(5, 64)
    quantize_(model, W3, qat=True)
    layer = model[0]
    assert layer.weight is weight and weight.shape == (64, 96) and (layer.in_features, layer.out_features) == (64, 96)
    disturb(model)
    y = model(x)
    torch.testing.assert_close(y, F.linear(x, layer.fake_quantized_weight(), layer.bias))
    y.sum().backward()
    assert weight.grad is not None and weight.grad.shape == (64, 96)
    other = nn.Sequential(nn.Linear(64, 96))
    with torch.no_grad():
        other[0].weight.copy_(layer.matrix)
    quantize_(other, W3, qat=True)
    other[0].load_state_dict({**layer.state_dict(), "weight": layer.matrix})
    other(x).sum().backward()
    assert torch.equal(other[0].weight.grad, weight.grad.t())
    wanted = layer.fake_quantized_weight()
    convert_qat_(model)
    assert model[0].transposed and torch.equal(model[0].dequantize(), wanted)


def test_hooks_and_modes_stay() -> None:
    model = mlp()
    calls: list[str] = []
    handle = model[0].register_forward_hook(lambda module, args, output: calls.append(type(module).__name__))
    quantize_(model.eval(), W3, qat=True)
    assert not model[0].training
    model(torch.ones(1, 256))
    convert_qat_(model.train())
    assert model[0].training
    model(torch.ones(1, 256))
    assert calls == ["FakeQuantLinear", "QuantLinear"]
    handle.remove()
    model(torch.ones(1, 256))
    assert len(calls) == 2


def test_transformers_trainer(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = trainable()
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-3, report_to=[], use_cpu=True,
        save_strategy="steps", save_steps=2, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    start = model.model.layers[0].mlp.up_proj.weight_scale.clone()
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    expected, trained = logits(model), model.model.layers[0].mlp.up_proj.weight_scale
    assert not torch.equal(trained, start)
    resumed = trainable(seed=5)
    Trainer(model=resumed, args=arguments, train_dataset=rows).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.allclose(logits(resumed), expected, atol=1e-5)


def test_distributed_data_parallel(tmp_path: Path) -> None:
    expected = losses(trainable())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert losses(nn.parallel.DistributedDataParallel(trainable())) == pytest.approx(expected, rel=1e-6)
    finally:
        torch.distributed.destroy_process_group()


def distill(base: Any, model: Any, batches: list[Tensor], rate: float, scale_rate: float) -> None:
    """Train on the base's logits."""
    scales = [parameter for name, parameter in model.named_parameters() if name.endswith("weight_scale_log2")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("weight_scale_log2")]
    groups = [{"params": others, "lr": rate}, {"params": scales, "lr": scale_rate}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    for index, ids in enumerate(batches):
        for group, first in zip(optimizer.param_groups, (rate, scale_rate), strict=True):
            group["lr"] = first * (1 - index / len(batches))
        with torch.no_grad():
            wanted = base(ids).logits.log_softmax(-1)
        loss = F.kl_div(model(ids).logits.log_softmax(-1), wanted, log_target=True, reduction="sum") / ids.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# -------------------------------------------------------------------------------------------------------- from calibration

TOKENS = [torch.randint(0, 128, (32,), generator=torch.Generator().manual_seed(index)) for index in range(24)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "config",
    [
        QuantConfig("W3A16", group_size=32),
        QuantConfig("W8A16_ASYM", group_size=32),
        QuantConfig("W4A16", group_size=32, propagate="float"),
        QuantConfig("W4A16", group_size=32, algorithm=["awq", "gptq"]),
        QuantConfig("W8A8"),
        QuantConfig("FP8_DYNAMIC"),
    ],
    ids=lambda config: f"{config.scheme}-{config.algorithm}",
)
def test_it_starts_from_what_calibration_chose(config: QuantConfig, dtype: torch.dtype) -> None:
    """Codes that are not the nearest ones included."""
    model, other = tiny_llama(dtype=dtype), tiny_llama(dtype=dtype)
    report = quantize_(model, config, calibration=TOKENS, qat=True)
    plain = quantize_(other, config, calibration=TOKENS)
    assert report.algorithm == f"QAT from {plain.algorithm}" and report.folds == plain.folds
    assert getattr(model.config, "quantization_config", None) is None
    for name, layer in packed_layers(other).items():
        start = model.get_submodule(name)
        assert torch.equal(start.fake_quantized_weight(), layer.dequantize()), name
        assert start.weight.requires_grad and start.weight.dtype == dtype
    for one, two in zip(report.layers, plain.layers, strict=True):
        assert (one.name, one.output_error, one.relative_error) == (two.name, two.output_error, two.relative_error)
    after = convert_qat_(model)
    assert after.folds == plain.folds and sqnr_db(logits(other), logits(model)) > (100 if dtype == torch.float32 else 20)


def test_training_goes_on_from_calibration() -> None:
    model = tiny_llama()
    quantize_(model, W3, calibration=TOKENS, qat=True)
    found = losses(model.train(), 5)
    assert found[-1] < found[0]


def test_a_tied_head_has_a_weight_of_its_own_after_calibration() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight.detach().clone()
    with pytest.warns(UserWarning, match=r"untied lm_head\.weight"):
        report = quantize_(model, QuantConfig("W4A16", group_size=32, ignore=[]), calibration=TOKENS, qat=True)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert torch.equal(model.model.embed_tokens.weight, embedding) and not model.config.tie_word_embeddings
    assert report.num_parameters == sum(p.numel() for name, p in model.named_parameters() if "scale_log2" not in name)


@pytest.mark.parametrize("propagate", ["true_sequential", "float"])
def test_a_failed_calibration_leaves_the_model_as_it_was(propagate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    modules, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    monkeypatch.setattr("torchq.quantize._left_out_warnings", lambda report: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quantize_(model, QuantConfig("W3A16", group_size=32, propagate=propagate), calibration=TOKENS, qat=True)
    assert dict(model.named_modules()).keys() == modules.keys() and not fake_layers(model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


# ------------------------------------------------------------------------------------------------------ what training is worth


@pytest.mark.parametrize(("rate", "scale_rate", "most"), [(3e-3, 1e-3, 0.65), (0.0, 3e-2, 0.9)])
def test_training_lowers_the_divergence_of_the_packed_model(rate: float, scale_rate: float, most: float) -> None:
    """Of other tokens; of weights and scales, and of scales alone."""
    base, model, rounded = tiny_llama(), trainable(QuantConfig("W2A16", group_size=32)), tiny_llama()
    quantize_(rounded, QuantConfig("W2A16", group_size=32))
    generator = torch.Generator().manual_seed(0)
    batches = list(torch.randint(0, 128, (40, 8, 32), generator=generator))
    distill(base, model, batches, rate, scale_rate)
    convert_qat_(model)
    windows = list(torch.randint(0, 128, (8, 64), generator=generator))
    before, after = (measure_divergence(base, other, windows).mean_kl for other in (rounded, model))
    assert after < most * before, (after, before)


@pytest.mark.slow
def test_a_short_training_of_smollm2() -> None:
    """20 steps of 2 x 128 tokens, 3 bits; evaluated on the other half of the text."""
    from torchq.sources import demo_model_path, load_source

    base, tokenizer = load_source(demo_model_path(), dtype=torch.float32)
    text = english_text()
    windows = token_windows(tokenizer, text[len(text) // 2 :], num_windows=4, length=128)
    config = QuantConfig("W3A16", group_size=64)
    model = copy.deepcopy(base)
    quantize_(model, config, progress=False)
    before = measure_divergence(base, model, windows).mean_kl
    model = copy.deepcopy(base)
    quantize_(model, config, qat=True, progress=False)
    rows = token_windows(tokenizer, text[: len(text) // 2], num_windows=40, length=128)
    distill(base, model, list(torch.stack(rows).split(2)), 1e-4, 1e-3)
    convert_qat_(model, progress=False)
    after = measure_divergence(base, model, windows).mean_kl
    assert after < 0.8 * before, (after, before)


# ------------------------------------------------------------------------------------------------- reports, saving, refusals


def test_the_report_is_truthful_before_and_after(tmp_path: Path) -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    total = sum(parameter.numel() for parameter in model.parameters())
    report = quantize_(model, W3, qat=True)
    assert model.quant_report is report and report.num_parameters == total and report.algorithm.startswith("QAT from RTN")
    trained = [layer for layer in report.layers if layer.status == "fake-quantized"]
    assert len(trained) == 14 and {layer.bits_per_weight for layer in trained} == {16} and report.quantized_fraction == 0
    assert all(layer.relative_error and layer.format is None and layer.num_bits == 3 for layer in trained)
    lines = report.summary().splitlines()
    assert "0 layers quantized, 0.0%" in lines[0] and lines[1].startswith("  14 fake-quantized for training (81.5%")
    report.to_json(tmp_path / "report.json")
    assert QuantReport.from_dict(report.to_dict()) == report
    after = convert_qat_(model)
    plain = quantize_(tiny_llama(dtype=torch.bfloat16), W3)
    assert model.quant_report is after and after.algorithm == report.algorithm and after.warnings == []
    for one, other in zip(after.layers, plain.layers, strict=True):
        assert (one.name, one.status, one.bits_per_weight, one.format, one.reason) == (
            other.name, other.status, other.bits_per_weight, other.format, other.reason,
        )  # fmt: skip
        assert one.relative_error == pytest.approx(other.relative_error)
    assert after.quantized_fraction == plain.quantized_fraction > 0.8


def test_saving_comes_after_packing(tmp_path: Path) -> None:
    model = trainable()
    assert getattr(model.config, "quantization_config", None) is None
    with pytest.raises(ValueError, match=r"fake-quantized for training \(model\.layers\.0\..*convert_qat_\(model\) packs it"):
        torchq.save_pretrained(model, tmp_path / "early")
    assert not (tmp_path / "early").exists()
    losses(model)
    convert_qat_(model.eval())
    expected = logits(model)
    assert model.config.quantization_config["quant_method"] == "compressed-tensors"
    torchq.save_pretrained(model, tmp_path / "model")
    assert torch.equal(logits(torchq.load_pretrained(tmp_path / "model")), expected)
    weights = {name: layer.dequantize() for name, layer in packed_layers(model).items()}
    assert len(weights) == 14
    restored = torchq.load_pretrained(tmp_path / "model", dequantize=True)
    assert all(torch.equal(restored.get_submodule(name).weight, weight) for name, weight in weights.items())


def test_packed_and_fake_quantized_models_are_not_quantized_again() -> None:
    model = trainable()
    state = copy.deepcopy(model.state_dict())
    for qat in (False, True):
        with pytest.raises(ValueError, match=r"fake-quantized for training already \(model.*convert_qat_\(model\) packs it"):
            quantize_(model, W3, qat=qat)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    convert_qat_(model)
    with pytest.raises(ValueError, match="already quantized by torchq"):
        quantize_(model, W3, qat=True)
    with pytest.raises(ValueError, match=r"nothing in the model is fake-quantized; call quantize_\(model, config, qat=True\)"):
        convert_qat_(model)


STATIC_INT8 = Scheme(QuantArgs(8, strategy="channel"), QuantArgs(8, strategy="tensor"), name="STATIC")


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (QuantConfig("W4A16", group_size=32, algorithm="gptq"), ValueError, "algorithm='gptq' needs calibration data"),
        (QuantConfig("W8A8", algorithm="smoothquant"), ValueError, "algorithm='smoothquant' needs calibration data"),
        (QuantConfig("FP8"), NotImplementedError, r"static activation scales, got .* \(FP8\) and 11 more; use FP8_DYN"),
        (QuantConfig(STATIC_INT8), NotImplementedError, r"static activation scales, got .* \(STATIC\)"),
        (QuantConfig("W4A16", group_size=32, fuse_siblings=True), NotImplementedError, r"fuse_siblings_\(model\) after"),
        (QuantConfig("W4A16"), ValueError, "group_size=128 does not divide in_features=64"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_changes_nothing(config: QuantConfig, error: type[Exception], message: str) -> None:
    model = tiny_llama()
    modules = dict(model.named_modules())
    with pytest.raises(error, match=message):
        quantize_(model, config, qat=True)
    assert dict(model.named_modules()) == modules and not hasattr(model, "quant_report")


def test_nf4_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="NF4"):
        quantize_(tiny_llama(), "NF4", qat=True)


def test_a_diverged_training_is_not_packed() -> None:
    model = trainable()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
        model.model.layers[0].mlp.up_proj.weight_scale_log2[3, 1] = float("inf")
    modules = dict(model.named_modules())
    with pytest.raises(ValueError, match=r"NaN or inf: model\.layers\.0\.mlp\.up_proj, model\.layers\.1\.mlp\.up_proj; "):
        convert_qat_(model)
    assert dict(model.named_modules()) == modules


def test_warnings_as_errors_leave_the_model_as_it_was() -> None:
    model = trainable(QuantConfig("W4A16", group_size=32, ignore=[]), tie_word_embeddings=True)
    modules, report, config = dict(model.named_modules()), model.quant_report, str(model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="untied"):
            convert_qat_(model)
    assert dict(model.named_modules()) == modules and model.quant_report is report and str(model.config) == config
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_failure_while_preparing_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    modules, made = dict(model.named_modules()), []

    def fail(*arguments: Any, **settings: Any) -> Any:
        made.append(arguments)
        if len(made) == 5:
            raise KeyboardInterrupt
        return original(*arguments, **settings)

    original = torchq.quantize.fake_layers
    monkeypatch.setattr("torchq.quantize.fake_layers", fail)
    with pytest.raises(KeyboardInterrupt):
        quantize_(model, W3, qat=True)
    assert dict(model.named_modules()) == modules and not hasattr(model, "quant_report")


def test_parts_of_a_model() -> None:
    model = tiny_llama()
    quantize_(model.model.layers[1], W3, qat=True)
    assert len(fake_layers(model)) == 7
    with pytest.raises(ValueError, match="model is a single FakeQuantLinear"):
        convert_qat_(model.model.layers[1].mlp.up_proj)
    report = convert_qat_(model)
    assert len(packed_layers(model)) == 7 and not fake_layers(model)
    assert report.num_parameters == sum(parameter.numel() for parameter in tiny_llama().parameters())
    assert sum(layer.status == "quantized" for layer in report.layers) == 7 and report.scheme == "W3A16"


def test_what_is_left_out_is_warned_of() -> None:
    class OwnForward(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = nn.Sequential(nn.Linear(64, 64), OwnForward(64, 64))
    with pytest.warns(UserWarning, match=r"1 weights with .* stay in 16 bits: 1 \(OwnForward has a forward of its own"):
        report = quantize_(model, W3, qat=True)
    assert [layer.status for layer in report.layers[:2]] == ["fake-quantized", "skipped"]


def test_repr_is_that_of_the_packed_layer() -> None:
    model = mlp()
    quantize_(model, QuantConfig("W4A16_ASYM", group_size=32), qat=True)
    before = repr(model[0])
    assert "in_features=256, out_features=144, bias=True, scheme=W4A16_ASYM, weight=int4 group 32 asymmetric" in before
    convert_qat_(model)
    assert before.replace("FakeQuantLinear", "QuantLinear") == repr(model[0])
