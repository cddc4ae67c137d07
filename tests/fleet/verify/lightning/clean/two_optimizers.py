"""Manual optimization of two networks with data from a module, in bf16."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader


class Points(L.LightningDataModule):
    def setup(self, stage):
        self.points = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))

    def train_dataloader(self):
        return DataLoader(self.points, batch_size=8, shuffle=True, drop_last=True)


class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def training_step(self, batch, index):
        for_generator, for_critic = self.optimizers()
        made = self.generator(torch.randn_like(batch))
        one, zero = torch.ones(len(batch), 1), torch.zeros(len(batch), 1)
        self.toggle_optimizer(for_critic)
        loss = functional.binary_cross_entropy_with_logits(self.critic(batch), one)
        loss = loss + functional.binary_cross_entropy_with_logits(self.critic(made.detach()), zero)
        for_critic.zero_grad()
        self.manual_backward(loss)
        for_critic.step()
        self.untoggle_optimizer(for_critic)
        self.toggle_optimizer(for_generator)
        loss = functional.binary_cross_entropy_with_logits(self.critic(made), one)
        for_generator.zero_grad()
        self.manual_backward(loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9)) for net in (self.generator, self.critic)]

    def on_fit_start(self):
        torch.manual_seed(10 + self.global_rank)


L.seed_everything(3)
trainer = L.Trainer(
    max_epochs=2,
    devices=2,
    strategy="ddp_find_unused_parameters_true",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Gan(), datamodule=Points())
