"""A LoRA training script for 16-bit models that two lines make one for packed 4-bit models: those marked with arrows.

python examples/training_script_one_line.py
"""

import torch
from peft import LoraConfig, get_peft_model

import torchq
from torchq.evaluation.divergence import english_text, token_windows
from torchq.testing import smollm2


def main(steps: int = 30, length: int = 128, batch: int = 4) -> list[float]:
    torch.manual_seed(0)
    model, tokenizer = smollm2()
    torchq.quantize_(model, torchq.QuantConfig("W4A16", group_size=64))  # <-- a quarter of the memory
    torchq.prepare_for_training(model)  # <-- in place of peft.prepare_model_for_kbit_training
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()

    windows = torch.stack(token_windows(tokenizer, english_text(), num_windows=steps * batch, length=length))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-4)
    losses = []
    for step, ids in enumerate(windows.split(batch)):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step:3d}  loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
