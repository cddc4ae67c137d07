"""Fine-tunes a small language model with transformers' Trainer, four batches for each update."""

import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

BATCH = 2
VOCABULARY = 24


class Sequences(Dataset):
    """128 sequences of eight tokens, each one counting up from its first token."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        starts = torch.randint(VOCABULARY, (128, 1), generator=generator)
        steps = torch.randint(1, 4, (128, 1), generator=generator)
        self.tokens = (starts + steps * torch.arange(9)) % VOCABULARY

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


class LanguageModel(nn.Module):
    """Predicts each next token from a token and the mean of those before it."""

    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.mix = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids, labels, **kwargs):
        """Return the mean loss of the tokens and the logits."""
        hidden = self.embed(input_ids)
        before = hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[:, None]
        logits = self.head(torch.tanh(self.mix(torch.cat([hidden, before], dim=-1))))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def main():
    """Train for two epochs and print the losses."""
    torch.manual_seed(0)
    model = LanguageModel()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=4,
        average_tokens_across_devices=False,
        optim="sgd",
        learning_rate=0.05,
        lr_scheduler_type="cosine",
        max_grad_norm=0.0,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sequences())
    trainer.train()


if __name__ == "__main__":
    main()
