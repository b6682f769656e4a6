"""A factory for ``ullage trace``: any module, its optimizer, and a function that runs one whole step."""

import torch
from torch import nn


def block(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
    )


def factory():
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.Sequential(*(block(64) for _ in range(8))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = torch.randn(32, 3, 64, 64), torch.randint(0, 10, (32,))

    def step() -> None:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
