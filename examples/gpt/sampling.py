"""Text from a trained model."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def sample(model: nn.Module, prompt: str, num_bytes: int, length: int, temperature: float = 0.7, seed: int = 0) -> str:
    """Returns ``prompt`` continued by ``num_bytes`` bytes, which the seed decides; the model sees ``length`` of them.

    Where several workers hold the model together, all of them call this.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(num_bytes):
        logits: Tensor = model(tokens[:, -length:].to(device))
        shares = (logits[0, -1].double().cpu() / temperature).softmax(dim=0)
        tokens = torch.cat([tokens, torch.multinomial(shares, 1, generator=generator)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")
