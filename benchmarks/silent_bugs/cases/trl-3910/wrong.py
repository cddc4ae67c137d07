"""Fine-tunes a small Llama with the Trainer on samples that the collator joins into one row without padding."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

MAX_LENGTH = 16
VOCABULARY = 40
SAMPLES = 64


def make_data():
    """Returns samples of different lengths, each a walk through the vocabulary with a step of its own."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(SAMPLES):
        start, step = torch.randint(1, VOCABULARY, (2,), generator=generator).tolist()
        length = int(torch.randint(5, 24, (1,), generator=generator))
        samples.append({"input_ids": [(start + step * place) % VOCABULARY for place in range(length)][:MAX_LENGTH]})
    return samples


def join(samples):
    """Returns one row of all samples; positions start again in each, and no sample's first token is a target."""
    tokens, labels, positions = [], [], []
    for sample in samples:
        tokens += sample["input_ids"]
        labels += [-100, *sample["input_ids"][1:]]
        positions += range(len(sample["input_ids"]))
    return {
        "input_ids": torch.tensor([tokens]),
        "labels": torch.tensor([labels]),
        "position_ids": torch.tensor([positions]),
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.long),
    }


def main():
    """Trains for one pass over the samples."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        attn_implementation="sdpa",
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
        seed=3,
    )
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=make_data(), data_collator=join)
    trainer.train()


if __name__ == "__main__":
    main()
