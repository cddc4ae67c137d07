"""Training scripts for transformers as strangers write them; each runs with Trainer in one process and on two workers.

A script gets :class:`Setting` and returns what is compared: weights, metrics, predictions. The batch of all workers
together is the same in both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["SCRIPTS", "Setting", "run_scripts"]


@dataclass(frozen=True)
class Setting:
    """How a script is run: which Trainer, on how many workers, with which options, and where it writes."""

    base: type
    workers: int
    folder: Path
    strategy: dict[str, Any] | None = None

    def args(self, **changes: Any) -> Any:
        """Returns TrainingArguments for a batch of 8 rows over all workers, in steps of SGD."""
        from transformers import TrainingArguments

        given: dict[str, Any] = {
            "output_dir": str(self.folder),
            "per_device_train_batch_size": 8 // self.workers,
            "per_device_eval_batch_size": 8 // self.workers,
            "learning_rate": 0.1,
            "optim": "sgd",
            "max_steps": 6,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
        }
        return TrainingArguments(**{**given, **changes})

    def trainer(self, model: Any, args: Any, base: type | None = None, **kwargs: Any) -> Any:
        """Returns the trainer of this setting, or one of a class made from :attr:`base`."""
        extra = {} if self.strategy is None else {"strategy": self.strategy}
        return (base or self.base)(model=model, args=args, **extra, **kwargs)


def bert(seed: int = 0, **changes: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(**{**sizes, **none, "vocab_size": 32, "num_labels": 3, **changes}))


def llama(tied: bool = False, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**{**sizes, "num_key_value_heads": 2, "vocab_size": 32, "tie_word_embeddings": tied, **changes})
    )


def sentences(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Returns rows of 8 token ids with one of three labels."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 32, (count, 8), generator=made)
    return [{"input_ids": row, "labels": int(row.sum() % 3)} for row in ids]


def texts(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Returns rows of 8 token ids, of which a different number counts in the loss."""
    made = torch.Generator().manual_seed(seed)
    rows = []
    for ids in torch.randint(1, 32, (count, 8), generator=made):
        labels = ids.clone()
        labels[: int(torch.randint(0, 6, (1,), generator=made))] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def accuracy(prediction: Any) -> dict[str, float]:
    hits = np.argmax(prediction.predictions, axis=-1) == prediction.label_ids
    return {"accuracy": float(hits.mean()), "rows": float(len(hits))}


def saved(folder: Any) -> dict[str, Tensor]:
    """Returns the weights in a folder that ``save_model`` or a checkpoint wrote."""
    from safetensors.torch import load_file

    return dict(load_file(str(Path(folder) / "model.safetensors")))


def finished(trainer: Any) -> dict[str, Tensor]:
    """Returns what ``save_model`` writes, on worker 0."""
    trainer.save_model()
    return saved(trainer.args.output_dir) if trainer.args.should_save else {}


def logged(trainer: Any, *names: str) -> list[list[float]]:
    history = trainer.state.log_history
    return [[entry[name] for entry in history if name in entry] for name in names]


def text_classification(on: Setting) -> dict[str, Any]:
    """The tutorial: an epoch, metrics after it, predictions, and the model read back."""
    from transformers import BertForSequenceClassification

    args = on.args(max_steps=-1, num_train_epochs=2, eval_strategy="epoch", warmup_steps=2)
    rows, test = sentences(32), sentences(21, seed=2)
    trainer = on.trainer(bert(), args, train_dataset=rows, eval_dataset=test, compute_metrics=accuracy)
    trainer.train()
    scores, output = trainer.evaluate(), trainer.predict(sentences(13, seed=3))
    weights = finished(trainer)
    found = {"weights": weights, "log": logged(trainer, "loss", "grad_norm", "learning_rate", "eval_accuracy")}
    if trainer.args.should_save:
        again = BertForSequenceClassification.from_pretrained(args.output_dir).state_dict()
        found["read"] = float(sum((again[name] - value).abs().sum() for name, value in weights.items()))
        found["files"] = sorted(os.listdir(args.output_dir))
    return found | {
        "scores": [scores["eval_accuracy"], scores["eval_rows"]],
        "predictions": output.predictions,
        "labels": output.label_ids,
    }


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(30))]
    made = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def language_model(on: Setting) -> dict[str, Any]:
    """A causal language model on texts of different lengths, padded by the collator, two batches an update."""
    from transformers import DataCollatorForLanguageModeling

    tokenizer, made = word_tokenizer(), np.random.default_rng(0)
    lines = [" ".join(f"w{n}" for n in made.integers(0, 30, made.integers(3, 12))) for _ in range(64)]
    rows = [tokenizer(line, return_token_type_ids=False) for line in lines]
    trainer = on.trainer(
        llama(tied=True),
        on.args(max_steps=-1, num_train_epochs=1, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2),
        train_dataset=rows,
        eval_dataset=rows[:16],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    return {"weights": finished(trainer), "log": logged(trainer, "loss", "grad_norm", "eval_loss")}


def own_loss(on: Setting) -> dict[str, Any]:
    """A subclass with its own compute_loss, as in the documentation."""

    class WeightedTrainer(on.base):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = nn.functional.cross_entropy(outputs.logits, labels, torch.tensor([1.0, 1.0, 1.0]))
            return (loss, outputs) if return_outputs else loss

    rows = sentences(32)
    trainer = on.trainer(bert(), on.args(), WeightedTrainer, train_dataset=rows, eval_dataset=rows[:16])
    trainer.train()
    return {"weights": finished(trainer), "scores": [trainer.evaluate()["eval_loss"]]}


def loss_function(on: Setting) -> dict[str, Any]:
    """compute_loss_func, which is given the number of items."""

    def compute(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    args = on.args(gradient_accumulation_steps=2)
    trainer = on.trainer(llama(), args, train_dataset=texts(64), compute_loss_func=compute)
    trainer.train()
    return {"weights": finished(trainer), "log": logged(trainer, "loss", "grad_norm")}


def early_stopping(on: Setting) -> dict[str, Any]:
    """Stops when the metric does not get better, and loads the best checkpoint."""
    from transformers import EarlyStoppingCallback

    trainer = on.trainer(
        bert(),
        on.args(
            max_steps=20,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            greater_is_better=False,
            learning_rate=0.5,
        ),
        train_dataset=sentences(32),
        eval_dataset=sentences(16, seed=2),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint or "").name
    score = trainer.evaluate()["eval_loss"]
    return {"weights": finished(trainer), "best": best, "steps": trainer.state.global_step, "scores": [score]}


def own_optimizer(on: Setting) -> dict[str, Any]:
    """A subclass that overrides create_optimizer: a higher rate for the head."""

    class TwoRates(on.base):  # type: ignore[misc, name-defined]
        def create_optimizer(self, *args: Any) -> Any:
            head = [p for name, p in self.model.named_parameters() if name.startswith("classifier")]
            body = [p for name, p in self.model.named_parameters() if not name.startswith("classifier")]
            self.optimizer = torch.optim.AdamW([{"params": body, "lr": 1e-3}, {"params": head, "lr": 1e-2}], eps=1e-2)
            return self.optimizer

    trainer = on.trainer(bert(), on.args(), TwoRates, train_dataset=sentences(32))
    trainer.train()
    return {"weights": finished(trainer), "log": logged(trainer, "loss", "learning_rate")}


def given_optimizer(on: Setting) -> dict[str, Any]:
    """An optimizer and a schedule made by the script."""
    model = bert()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    trainer = on.trainer(model, on.args(), train_dataset=sentences(32), optimizers=(optimizer, schedule))
    trainer.train()
    return {"weights": finished(trainer), "log": logged(trainer, "loss", "learning_rate")}


def two_trainers(on: Setting) -> dict[str, Any]:
    """One trains the model, evaluated before; a second one continues with other data; the first evaluates again."""
    model, test = bert(), sentences(16, seed=2)
    first = on.trainer(model, on.args(), train_dataset=sentences(32), eval_dataset=test)
    before = first.evaluate()["eval_loss"]
    first.train()
    second = on.trainer(model, on.args(seed=7), train_dataset=sentences(32, seed=5), eval_dataset=test)
    second.train()
    scores = [before, second.evaluate()["eval_loss"], first.evaluate()["eval_loss"]]
    return {"weights": finished(second), "scores": scores}


def trained_twice(on: Setting) -> dict[str, Any]:
    """train() called twice: the second call starts a new schedule with the optimizer of the first."""
    trainer = on.trainer(bert(), on.args(optim="adamw_torch", adam_epsilon=1e-2), train_dataset=sentences(32))
    trainer.train()
    trainer.train()
    return {"weights": finished(trainer), "steps": trainer.state.global_step}


def made_models(on: Setting) -> dict[str, Any]:
    """model_init: every train() starts with a new model."""
    extra = {} if on.strategy is None else {"strategy": on.strategy}
    trainer = on.base(model_init=lambda: bert(), args=on.args(), train_dataset=sentences(32), **extra)
    trainer.train()
    trainer.train()
    return {"weights": finished(trainer)}


def streamed(on: Setting) -> dict[str, Any]:
    """Rows from an IterableDataset."""

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(sentences(64))

    trainer = on.trainer(bert(), on.args(), train_dataset=Stream())
    trainer.train()
    return {"weights": finished(trainer)}


def plateau(on: Setting) -> dict[str, Any]:
    """A rate that falls when the loss of the evaluation does not."""
    args = on.args(
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "threshold": 10.0, "threshold_mode": "abs"},
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
    )
    trainer = on.trainer(bert(), args, train_dataset=sentences(32), eval_dataset=sentences(16, seed=2))
    trainer.train()
    return {"weights": finished(trainer), "log": logged(trainer, "learning_rate")}


class Plain(nn.Module):
    """A model that is none of transformers, with a layer that some batches skip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.unused = nn.Embedding(32, 8), nn.Linear(8, 3), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.table(input_ids).mean(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def plain_module(on: Setting) -> dict[str, Any]:
    """A module of the script's own; one layer is never used."""
    args = on.args(gradient_accumulation_steps=2, weight_decay=0.1)
    trainer = on.trainer(Plain(), args, train_dataset=sentences(64), eval_dataset=sentences(10, seed=2))
    trainer.train()
    return {"weights": finished(trainer), "log": logged(trainer, "loss", "grad_norm"), "rows": len(
        trainer.predict(sentences(11, seed=3)).predictions)}  # fmt: skip


def grouped_lengths(on: Setting) -> dict[str, Any]:
    """Batches of rows of equal length."""
    made = torch.Generator().manual_seed(3)
    rows = [
        {**row, "input_ids": row["input_ids"][: int(torch.randint(2, 9, (1,), generator=made))]}
        for row in sentences(32)
    ]
    name = "group_by_length" if "group_by_length" in on.args().__dict__ else "train_sampling_strategy"
    args = on.args(**{name: True if name == "group_by_length" else "group_by_length"})

    def padded(batch: list[Any]) -> dict[str, Tensor]:
        longest = 8
        ids = torch.stack([nn.functional.pad(row["input_ids"], (0, longest - len(row["input_ids"]))) for row in batch])
        return {"input_ids": ids, "attention_mask": ids.ne(0), "labels": torch.tensor([row["labels"] for row in batch])}

    trainer = on.trainer(bert(), args, train_dataset=rows, data_collator=padded)
    trainer.train()
    return {"steps": trainer.state.global_step, "rows": len(trainer.predict(rows[:11]).predictions)}


def saved_by_callback(on: Setting) -> dict[str, Any]:
    """A callback that writes the model on worker 0, with the model that Trainer hands to it."""
    from transformers import TrainerCallback

    class Writer(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.is_world_process_zero and state.global_step == 3:
                model.save_pretrained(Path(args.output_dir) / "third")

    trainer = on.trainer(bert(), on.args(), train_dataset=sentences(32), callbacks=[Writer()])
    trainer.train()
    return {"weights": saved(on.folder / "third") if trainer.args.should_save else {}}


def metrics_in_batches(on: Setting) -> dict[str, Any]:
    """batch_eval_metrics, label smoothing, preprocessed logits."""
    hits: list[Any] = []

    def compute(prediction: Any, compute_result: bool) -> dict[str, float]:
        hits.extend((prediction.predictions == prediction.label_ids).tolist())
        return {"hits": float(sum(hits)), "rows": float(len(hits))} if compute_result else {}

    trainer = on.trainer(
        bert(),
        on.args(batch_eval_metrics=True, label_smoothing_factor=0.1),
        train_dataset=sentences(32),
        eval_dataset=sentences(19, seed=2),
        compute_metrics=compute,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    trainer.train()
    scores = trainer.evaluate()
    return {"weights": finished(trainer), "scores": [scores["eval_hits"], scores["eval_rows"]]}


SCRIPTS: tuple[Callable[[Setting], dict[str, Any]], ...] = (
    text_classification,
    language_model,
    own_loss,
    loss_function,
    early_stopping,
    own_optimizer,
    given_optimizer,
    two_trainers,
    trained_twice,
    made_models,
    streamed,
    plateau,
    plain_module,
    grouped_lengths,
    saved_by_callback,
    metrics_in_batches,
)


def run_scripts(
    rank: int, world_size: int, fleet_trainer: bool, names: list[str], folder: str, strategy: dict[str, Any] | None
) -> dict[str, Any]:
    """Runs the named scripts one after the other in this process; a worker of ``run_workers``.

    The result of a script that raises is the text of its error, under ``"error"``.
    """
    import traceback

    import transformers

    transformers.logging.set_verbosity_error()
    if fleet_trainer:
        from fleet.integrations.hf import FleetTrainer as base
    else:
        base = transformers.Trainer
    found = {}
    for script in SCRIPTS:
        if script.__name__ in names:
            divided = ((strategy or {}).get("hybrid_configs") or {}).get("mp_degree", 1)
            on = Setting(
                base, world_size // divided, Path(folder) / script.__name__, strategy if fleet_trainer else None
            )
            try:
                found[script.__name__] = script(on)
            except Exception:
                found[script.__name__] = {"error": traceback.format_exc()}
    return found
