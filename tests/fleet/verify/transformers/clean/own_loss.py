"""A loss, an optimizer and a callback of the script's own; worker 0 alone writes a file."""

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Net(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)
        self.post_init()

    def forward(self, x, labels=None):
        return self.head(torch.relu(self.body(x)))


class OwnTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        scores = model(**inputs)
        loss = nn.functional.cross_entropy(scores, labels, label_smoothing=0.1)
        return (loss, {"logits": scores}) if return_outputs else loss


class Notes(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            with open("notes.txt", "a") as file:
                file.write(f"{state.global_step} {logs}\n")


def main():
    set_seed(3)
    model = Net(PreTrainedConfig())
    data = [{"x": torch.randn(8), "labels": torch.tensor(i % 3)} for i in range(90)]
    groups = [{"params": model.body.parameters(), "lr": 1e-3}, {"params": model.head.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=8,
        num_train_epochs=3,
        report_to="none",
        logging_steps=1,
        remove_unused_columns=False,
        eval_strategy="steps",
        eval_steps=4,
        dataloader_drop_last=True,
    )
    trainer = OwnTrainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data[:20],
        optimizers=(optimizer, schedule),
        callbacks=[Notes()],
    )
    trainer.train()


main()
