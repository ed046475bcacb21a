"""A DataLoader whose worker processes augment images at random. Nothing is seeded."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Digits of noise: each access crops, flips and blurs with another generator."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.full((1, 12, 12), index / 96) + 0.1 * torch.randn(1, 12, 12)
        top, left = random.randrange(4), random.randrange(4)
        image = image[:, top : top + 8, left : left + 8]
        if np.random.random() < 0.5:
            image = image.flip(2)
        return image, index % 4


def main() -> None:
    """Train for three epochs."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Noisy(), batch_size=16, shuffle=True, num_workers=3)
    for epoch in range(3):
        total = 0.0
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}  loss {total / len(loader):.6f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
