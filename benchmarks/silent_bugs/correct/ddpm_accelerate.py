"""An unconditional diffusion model with Accelerate, as its example trains one: noise and timesteps for every batch."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scheduler:
    def __init__(self, steps):
        self.steps = steps
        self.alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0)

    def add_noise(self, images, noise, timesteps):
        share = self.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
        return share.sqrt() * images + (1 - share).sqrt() * noise


class Model(nn.Module):
    def __init__(self, steps, width=12):
        super().__init__()
        self.time = nn.Embedding(steps, width)
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(3, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, noisy, timesteps):
        h = self.first(noisy) + self.time(timesteps)[:, :, None, None]
        return self.last(h + self.middle(h))


class Images(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, index):
        column = torch.arange(8) == index % 8
        return {"input": (2.0 * column - 1).expand(1, 8, 8).clone()}


def main():
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, project_config=ProjectConfiguration(project_dir="ddpm")
    )
    set_seed(0)
    noise_scheduler = Scheduler(100)
    model = Model(noise_scheduler.steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.95, 0.999), weight_decay=1e-6)
    loader = DataLoader(Images(), batch_size=8 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    set_seed(0, device_specific=True)
    global_step = 0
    for _epoch in range(1):
        model.train()
        for batch in loader:
            clean_images = batch["input"]
            noise = torch.randn(clean_images.shape)
            timesteps = torch.randint(0, noise_scheduler.steps, (clean_images.shape[0],)).long()
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(noisy_images, timesteps), noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
                accelerator.print(f"step {global_step}: loss {loss.detach().item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
