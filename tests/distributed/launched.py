"""Run by ``accelerate launch``: prints what a training script finds, as a line of JSON a process."""

import json

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin


def main() -> None:
    accelerator = Accelerator()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 8)).float().square().mean())
    optimizer.step()
    plugin = FullyShardedDataParallelPlugin()  # reads what the launcher put into the environment
    found = {
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "fsdp_version": plugin.fsdp_version,
        "reshard_after_forward": plugin.reshard_after_forward,
        "activation_checkpointing": plugin.activation_checkpointing,
    }
    print("FOUND " + json.dumps(found), flush=True)


main()
