"""A `transformers.Trainer` that trains by a plan: `plan_trainer(trainer, budget_gb=...)`.

    python examples/trainer.py runs/gpt2 --budget-gb 0.009

Needs the extra `trainer`. The plan is in `runs/gpt2/plan.json`; `--resume` goes on from the last checkpoint there, with
or without a plan.
"""

import argparse
import logging

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from planner.integrations.trainer import plan_trainer


def main() -> None:
    """Learn sequences that count upwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="for checkpoints and the plan")
    parser.add_argument("--budget-gb", type=float, help="GB of 2**30 bytes that a step may take")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("planner").setLevel(logging.INFO)  # one line after the first step

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    rows = [(torch.arange(64) + start) % 128 for start in range(32)]
    arguments = TrainingArguments(
        options.folder,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    if options.budget_gb is not None:
        plan_trainer(trainer, budget_gb=options.budget_gb)  # the one line
    trainer.train(resume_from_checkpoint=options.resume)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {entry['loss']:.6f}")


if __name__ == "__main__":
    main()
