"""A small BERT on masked words: sentences padded to the longest of a batch, the mask drawn by the collator."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD, MASK, FIRST_WORD, VOCAB = 0, 1, 2, 64
WIDTH, EPOCHS, BATCH_SIZE, MASKED = 32, 2, 16, 4


class Sentences(Dataset):
    """Every sentence counts upwards from a word of its own; lengths differ."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(6, 20, (count,), generator=generator)
        starts = torch.randint(VOCAB - FIRST_WORD, (count,), generator=generator)
        self.sentences = [
            FIRST_WORD + (start + torch.arange(length)) % (VOCAB - FIRST_WORD)
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        return self.sentences[index]


def collate(sentences):
    longest = max(map(len, sentences))
    ids = torch.full((len(sentences), longest), PAD)
    labels = torch.full_like(ids, -100)
    for row, sentence in enumerate(sentences):
        ids[row, : len(sentence)] = sentence
        # The same number of masked words in every sentence, so each worker's mean counts alike.
        chosen = torch.randperm(len(sentence))[:MASKED]
        labels[row, chosen] = sentence[chosen]
        ids[row, chosen] = MASK
    return {"input_ids": ids, "attention_mask": ids != PAD, "labels": labels}


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH, padding_idx=PAD)
        self.positions = nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, input_ids, attention_mask):
        hidden = self.words(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        hidden = self.encoder(hidden, src_key_padding_mask=~attention_mask)
        return self.transform(hidden) @ self.words.weight.T + self.bias


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DistributedDataParallel(Bert())
    dataset = Sentences(96)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE // world_size, sampler=sampler, collate_fn=collate)
    no_decay = ("bias", "norm")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(part in n for part in no_decay)]},
        {
            "params": [p for n, p in model.named_parameters() if any(part in n for part in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.01)
    total_steps = EPOCHS * len(loader)
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / 3, (total_steps - step) / total_steps))
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    torch.manual_seed(100 + rank)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            labels = batch.pop("labels")
            logits = model(**batch)
            loss = criterion(logits.view(-1, VOCAB), labels.view(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
