"""An ordinary training script: the model is the user's, galv makes it parallel.

galv plan configs/models/llama-tiny.json --cluster cpu:4x1 --seq-len 128 --global-batch 16 -o plan.json
galv run plan.json examples/train.py [STEPS] [CHECKPOINTS]

With a folder for checkpoints, the same command with more steps goes on where the last one ended, whatever ended it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import galv


def main() -> None:
    """Trains a small Llama on random tokens, by default for ten steps."""
    steps, folder = int(sys.argv[1]) if len(sys.argv) > 1 else 10, sys.argv[2] if len(sys.argv) > 2 else None
    dist.init_process_group()
    plan = galv.Plan.from_json(Path(os.environ["GALV_PLAN"]).read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("configs/models/llama-tiny.json"))

    module = galv.parallelize(model, plan)
    optimizer = module.optimizer("adamw", lr=1e-3)
    checkpoints = None if folder is None else galv.CheckpointFolder(folder)
    done = checkpoints.resume(module, optimizer) if checkpoints else 0
    shape = (plan.training.global_batch, plan.training.seq_len or 128)
    for step in range(done + 1, steps + 1):
        # From the step alone, so that a resumed run sees the samples that it would have seen.
        tokens = torch.randint(4096, shape, generator=torch.Generator().manual_seed(step))
        loss = module.train_step(module.shard_batch({"input_ids": tokens, "labels": tokens}))
        module.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {float(loss):.4f}")
        if checkpoints and (step % 5 == 0 or step == steps):
            checkpoints.save(step, module, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
