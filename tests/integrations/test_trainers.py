"""Packed models train with what people train models with: a plain loop, accelerate, transformers' Trainer, TRL, torch.compile."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from torchq import QuantConfig, QuantLinear, load_pretrained, quantize_
from torchq.testing import tiny_llama
from torchq.training import prepare_for_training

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # the hosts' own, of each other
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TOKENS = 3 + (torch.arange(32)[:, None] + 5 * torch.arange(16)) % 20  # [32, 16]: something there is to learn
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]
COMMON = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              head_dim=16, vocab_size=128, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny_llama,
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**COMMON, tie_word_embeddings=True)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**COMMON, sliding_window=8)),
}


def packed(name: str = "llama", scheme: str = "W4A16", dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    torch.manual_seed(0)
    model = tiny_llama(**overrides) if overrides else MODELS[name]()
    model.to(dtype)
    quantize_(model, QuantConfig(scheme, group_size=32 if scheme == "W4A16" else None), progress=False)
    return model


def adapted(model: Any, *, seed: int = 0, prepare: dict[str, Any] | None = None, **config: Any) -> PeftModel:
    torch.manual_seed(seed)
    settings = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.0} | config
    return get_peft_model(prepare_for_training(model, **(prepare or {})), LoraConfig(**settings))


def packed_tensors(model: nn.Module) -> list[Tensor]:
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    return [tensor.clone() for layer in layers for tensor in layer.canonical_tensors().values()]


def assert_untouched(model: nn.Module, before: list[Tensor]) -> None:
    after = packed_tensors(model)
    assert len(after) == len(before) > 0
    for tensor, expected in zip(after, before, strict=True):
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)


def trainer(model: Any, folder: Path, **settings: Any) -> hf.Trainer:
    args = dict(output_dir=str(folder), use_cpu=True, report_to="none", logging_steps=1, max_steps=6, learning_rate=1e-2, seed=0,
                per_device_train_batch_size=4, save_strategy="no", disable_tqdm=True)  # fmt: skip
    return hf.Trainer(model=model, args=hf.TrainingArguments(**(args | settings)), train_dataset=ROWS, eval_dataset=ROWS[:8])


def losses(model: Any, folder: Path, resume: str | None = None, **settings: Any) -> list[float]:
    run = trainer(model, folder, **settings)
    run.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def tensor_names(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


# --------------------------------------------------------------------------------------------------------------------- Trainer


@pytest.mark.parametrize("name", MODELS)
def test_trainer_trains_the_adapters_alone(name: str, tmp_path: Path) -> None:
    model = adapted(packed(name))
    before, frozen = packed_tensors(model), {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    steps = losses(model, tmp_path)
    assert steps[-1] < steps[0] - 0.05
    assert_untouched(model, before)
    assert all(torch.equal(parameter, frozen[n]) for n, parameter in model.named_parameters() if n in frozen)
    assert all("lora_" in n for n, parameter in model.named_parameters() if n not in frozen)


def test_trainer_takes_a_loaded_model_as_it_does_a_quantized_one(tmp_path: Path) -> None:
    model = packed()
    model.save_pretrained(tmp_path / "packed")
    loaded = load_pretrained(tmp_path / "packed")
    assert losses(adapted(loaded), tmp_path) == losses(adapted(model), tmp_path)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_loss(use_reentrant: bool, tmp_path: Path) -> None:
    expected = losses(adapted(packed()), tmp_path)
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    assert losses(adapted(packed()), tmp_path, **settings) == expected


@pytest.mark.filterwarnings("error:.*gradient_checkpointing_enable.*:FutureWarning")
def test_prepare_for_training_turns_checkpointing_on() -> None:
    model = prepare_for_training(packed(), gradient_checkpointing=True)
    seen: list[Any] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    model = get_peft_model(model, LoraConfig(target_modules="all-linear")).train()
    model(input_ids=TOKENS[:2], labels=TOKENS[:2], use_cache=False).loss.backward()
    assert len(seen) == 4  # each layer in the forward pass, and again in the backward pass


def test_training_that_is_resumed_goes_on_as_if_uninterrupted(tmp_path: Path) -> None:
    config = {"lora_dropout": 0.1, "use_rslora": True}
    whole = losses(adapted(packed(), **config), tmp_path / "whole")
    saving = {"save_strategy": "steps", "save_steps": 3}
    assert losses(adapted(packed(), **config), tmp_path / "parts", **saving) == whole
    resumed = adapted(packed(), seed=1, **config)  # other adapters, which the checkpoint replaces
    assert losses(resumed, tmp_path / "parts", str(tmp_path / "parts/checkpoint-3")) == whole


def test_checkpoints_hold_adapters_alone(tmp_path: Path) -> None:
    losses(adapted(packed()), tmp_path, save_strategy="steps", save_steps=6)
    folder = tmp_path / "checkpoint-6"
    assert [file.name for file in folder.glob("*.safetensors")] == ["adapter_model.safetensors"]
    assert not list(folder.glob("pytorch_model*"))
    names = tensor_names(folder / "adapter_model.safetensors")
    assert len(names) == 28 and all(".lora_A." in name or ".lora_B." in name for name in names)


def test_the_best_adapter_is_loaded_evaluated_and_predicts(tmp_path: Path) -> None:
    model = adapted(packed())
    run = trainer(model, tmp_path, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
                  load_best_model_at_end=True, greater_is_better=True, max_steps=4)  # fmt: skip
    run.train()
    history = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    assert history[0] > history[1] + 0.01  # so that "the best" of the two is not what training ended with
    assert Path(run.state.best_model_checkpoint).name == "checkpoint-2"
    assert run.evaluate()["eval_loss"] == pytest.approx(history[0], abs=1e-6)
    predictions = run.predict(ROWS[:8]).predictions
    with torch.no_grad():
        expected = model(input_ids=TOKENS[:8]).logits
    assert torch.allclose(torch.from_numpy(predictions), expected, atol=1e-5)
    again = PeftModel.from_pretrained(prepare_for_training(packed()), tmp_path / "checkpoint-2").eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=TOKENS[:8]).logits, expected)


def test_a_prepared_model_without_adapters_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing in the model is trainable.*get_peft_model"):
        losses(prepare_for_training(packed()), tmp_path)


def test_without_preparation_what_is_not_packed_trains(tmp_path: Path) -> None:
    model = packed()
    before, norm = packed_tensors(model), model.model.norm.weight.clone()
    whole = losses(model, tmp_path, save_strategy="steps", save_steps=3)
    assert whole[-1] < whole[0] - 0.05
    assert_untouched(model, before)
    assert not torch.equal(model.model.norm.weight, norm)
    loaded = load_pretrained(tmp_path / "checkpoint-6")  # what Trainer saved is a quantized checkpoint
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=TOKENS).logits, model.eval()(input_ids=TOKENS).logits)
    assert losses(packed(), tmp_path, str(tmp_path / "checkpoint-3")) == whole


def test_bfloat16_base_with_float32_adapters_under_autocast(tmp_path: Path) -> None:
    model = adapted(packed(dtype=torch.bfloat16))
    steps = losses(model, tmp_path, bf16=True)
    assert steps[-1] < steps[0] - 0.05
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


# ------------------------------------------------------------------------------------------------------------------------- TRL


@pytest.fixture
def tokenizer() -> hf.PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{index}" for index in range(124))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}",
    )


def trl_settings(folder: Path) -> dict[str, Any]:
    return dict(output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", logging_steps=1, max_steps=5, seed=0,
                learning_rate=1e-2, per_device_train_batch_size=4, save_strategy="no", disable_tqdm=True)  # fmt: skip


def sentence(start: int, length: int) -> str:
    return " ".join(f"w{(start + 7 * index) % 124}" for index in range(length))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sft_trainer_adds_the_adapters(packing: bool, tokenizer: Any, tmp_path: Path) -> None:
    model = prepare_for_training(packed(dtype=torch.bfloat16))
    before = packed_tensors(model)
    run = SFTTrainer(
        model=model,
        args=SFTConfig(**trl_settings(tmp_path), packing=packing, max_length=32),
        train_dataset=Dataset.from_dict({"text": [sentence(index, 5 + index % 9) for index in range(64)]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )
    run.train()
    steps = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert steps[-1] < steps[0] - 0.1
    assert_untouched(run.model, before)
    trained = {name: parameter.dtype for name, parameter in run.model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 28 and set(trained.values()) == {torch.float32}
    run.save_model()
    assert len(tensor_names(tmp_path / "adapter_model.safetensors")) == 28


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dpo_trainer_takes_the_base_without_adapters_for_its_reference(tokenizer: Any, tmp_path: Path) -> None:
    model = prepare_for_training(packed())
    rows = [{"prompt": sentence(i, 4) + " ", "chosen": sentence(i, 6), "rejected": sentence(i + 50, 6)} for i in range(32)]
    run = DPOTrainer(
        model=model,
        args=DPOConfig(**trl_settings(tmp_path)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )
    run.train()
    steps = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert steps[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: at first the adapters change nothing
    assert steps[-1] < steps[0] - 0.05


# ------------------------------------------------------------------------------------------------------ accelerate, plain loops


def plain_loop(model: Any, step: Callable[[Any, Tensor], Tensor], batch_size: int = 8) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    values = []
    for batch in TOKENS.split(batch_size):
        loss = step(model.train(), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def loss_of(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8_DYNAMIC", "NF4"])
def test_plain_loop_of_each_kind_of_scheme(scheme: str) -> None:
    model = adapted(packed(scheme=scheme))
    before = packed_tensors(model)
    values = plain_loop(model, loss_of)
    assert values[-1] < values[0] - 0.05
    assert_untouched(model, before)


def test_accelerate_accumulates_the_gradients_of_micro_batches() -> None:
    model = adapted(packed())
    expected = copy.deepcopy(model)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loader = torch.utils.data.DataLoader(TOKENS, batch_size=4)  # type: ignore[arg-type]
    prepared, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_of(prepared, batch))
            accelerator.clip_grad_norm_(prepared.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
    optimizer = torch.optim.SGD([p for p in expected.parameters() if p.requires_grad], lr=0.1)
    for batch in TOKENS.split(16):
        optimizer.zero_grad()
        loss_of(expected.train(), batch).backward()
        optimizer.step()
    for parameter, other in zip(accelerator.unwrap_model(prepared).parameters(), expected.parameters(), strict=True):
        assert torch.allclose(parameter, other, rtol=1e-4, atol=1e-6)


def test_autocast_computes_in_bfloat16() -> None:
    model, batch = adapted(packed(), init_lora_weights=False).train(), TOKENS[:8]
    exact = loss_of(model, batch)
    dtypes = set()
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda _, args, y: dtypes.add((args[0].dtype, y.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, batch)
    loss.backward()
    assert dtypes == {(torch.bfloat16, torch.bfloat16)}
    assert loss.item() == pytest.approx(exact.item(), rel=2e-2)
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and g.dtype == torch.float32 and torch.isfinite(g).all() for g in grads)


# ------------------------------------------------------------------------------------------------------------------- compiled


def compiled_as_eager(model: Any, *, autocast: bool = False) -> None:
    """Compare losses and gradients of one whole step, compiled without a break, and eager."""
    torch._dynamo.reset()
    eager, batch = copy.deepcopy(model).train(), TOKENS[:2]

    def step(module: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss_of(module, batch)

    loss = torch.compile(step, backend="aot_eager", fullgraph=True)(model.train())
    expected = step(eager)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3 if autocast else 1e-6)
    loss.backward()
    expected.backward()
    checked = 0
    for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None)
        if parameter.grad is not None and other.grad is not None:
            error = torch.linalg.norm(parameter.grad - other.grad) / torch.linalg.norm(other.grad)
            assert error < (2e-2 if autocast else 1e-5)
            checked += 1
    assert checked >= 14


@pytest.mark.parametrize("autocast", [False, True])
def test_a_training_step_compiles_as_one_graph(autocast: bool) -> None:
    model = adapted(packed(num_hidden_layers=1), init_lora_weights=False)
    compiled_as_eager(model, autocast=autocast)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "prepare", "config"),
    [
        ("W4A16", {"merge_aware": True}, {}),
        ("W4A16", {}, {"use_dora": True}),
        ("W8A8", {}, {}),
        ("FP8_DYNAMIC", {}, {}),
        ("NF4", {}, {}),
    ],
)
def test_each_way_of_multiplying_compiles_as_one_graph(scheme: str, prepare: dict[str, Any], config: dict[str, Any]) -> None:
    model = adapted(packed(scheme=scheme, num_hidden_layers=1), prepare=prepare, init_lora_weights=False, **config)
    compiled_as_eager(model)


@pytest.mark.slow
def test_trainer_compiles(tmp_path: Path) -> None:
    torch._dynamo.reset()
    expected = losses(adapted(packed(num_hidden_layers=1)), tmp_path)
    settings = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    assert losses(adapted(packed(num_hidden_layers=1)), tmp_path, **settings) == pytest.approx(expected, rel=1e-5)


def test_compiled_steps_train_as_eager_ones() -> None:
    torch._dynamo.reset()
    model = adapted(packed(num_hidden_layers=1), target_modules=["q_proj", "down_proj"])
    eager = copy.deepcopy(model)
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    assert plain_loop(model, compiled) == pytest.approx(plain_loop(eager, loss_of), rel=1e-5)
