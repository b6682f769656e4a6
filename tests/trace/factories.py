"""Factories that the tests trace: sound ones, and one for each thing that can be wrong."""

import torch
from torch import nn


def _trained(model, batch, **optimizer):
    made = torch.optim.AdamW(model.parameters(), **optimizer)

    def step():
        model(batch).sum().backward()
        made.step()
        made.zero_grad()

    return model, made, step


def mlp():
    return _trained(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)), torch.randn(4, 64))


def cast():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)).to(torch.bfloat16)
    return _trained(model, torch.randn(4, 64, dtype=torch.bfloat16), foreach=True)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(32, 32, batch_first=True) for _ in range(3))
        self.head = nn.Linear(32, 100)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


def recurrent():
    return _trained(Recurrent(), torch.randn(4, 20, 32), fused=True)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.last = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return torch.relu(x + self.last(self.body(x)))


def convolutional():
    stem, head = nn.Conv2d(3, 16, 3, stride=2), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    layers = nn.ModuleList(Residual(16) for _ in range(4))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.layers, self.head = stem, layers, head

        def forward(self, x):
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    return _trained(Net(), torch.randn(2, 3, 64, 64), fused=True)


def forward_only():
    model = nn.Linear(4, 4)
    return model, None, lambda: model(torch.randn(2, 4))


def accumulating():
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 256)

    def step():
        for _ in range(3):
            model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


# -- sharded


def _mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def fsdp2():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = _mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = [nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2))) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(256, 128, bias=False))
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _trained(model, torch.randn(4, 256), foreach=True)


def ddp():
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))))
    return _trained(model, torch.randn(4, 256), foreach=True)


def tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(256, 1024, bias=False), nn.GELU(), nn.Linear(1024, 256, bias=False))
    parallelize_module(model, _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return _trained(model, torch.randn(4, 256), foreach=True)


def read_twice(distributed):
    """A weight, as a DTensor or not, of which one tensor is made that two ops read."""
    from torch.distributed.tensor import DTensor, Replicate

    model = nn.Linear(256, 256, bias=False)
    if distributed:
        model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), _mesh(), [Replicate()], run_check=False))

    def step():
        value = model.weight * 2
        (value.sin() + value.cos()).sum().backward()
        model.zero_grad()

    return model, None, step


def sharded_llama():
    from ullage.job.read import read_job
    from ullage.trace.models import factory_of

    model = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 176, "vocab_size": 520, "max_position_embeddings": 64}  # fmt: skip
    job = {"schema": 1, "model": model, "cluster": "2xH100-SXM-80GB", "engine": {"name": "fsdp2"}, "recompute": "full",
           "precision": "bf16-mixed", "data": {"seq_len": 32, "micro_batch": 2, "grad_accum": 2}}  # fmt: skip
    return factory_of(read_job(job))()


# -- what is wrong


def _stepping(run):
    model = nn.Linear(4, 4)
    return model, None, lambda: run(model(torch.randn(2, 4)))


def asks():
    return _stepping(lambda out: out.sum().item())


def branches():
    return _stepping(lambda out: 1 if out.sum() > 0 else 0)


def selects():
    return _stepping(lambda out: out.nonzero())


def reads():
    return _stepping(lambda out: open("/etc/hostname").read())


def writes():
    with open("must-not-exist.txt", "w") as file:
        file.write("x")


def saves():
    torch.save(nn.Linear(4, 4).state_dict(), "must-not-exist.pt")


def saves_to_memory():
    import io

    torch.save({"size": 4}, io.BytesIO())
    return mlp()


def saves_safetensors():
    from safetensors.torch import save_file

    save_file({}, "must-not-exist.safetensors")


def maps():
    torch.UntypedStorage.from_file("must-not-exist.bin", True, 64)


def makes_a_folder():
    import os

    os.mkdir("must-not-exist")


def connects_to_a_database():
    import sqlite3

    sqlite3.connect("must-not-exist.db")


def connects():
    import socket

    socket.create_connection(("192.0.2.1", 80), timeout=1)


def spawns():
    import subprocess

    subprocess.run(["touch", "must-not-exist.txt"], check=False)


def raises():
    raise ValueError("no such\nthing")


def leaves():
    raise SystemExit(3)


def returns_a_number():
    return 3


def returns_no_model():
    return 1, None, print


@torch.library.custom_op("ullage_tests::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def has_no_fake_kernel():
    return _stepping(copied)


def asks_for_cuda():
    return nn.Linear(4, 4, device="cuda"), None, print
