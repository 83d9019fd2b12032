"""Fine-tunes a causal language model of transformers on Python's own manual, and hands it back to transformers.

python examples/transformers_finetune.py                        a small Llama with random weights, on bytes
python examples/transformers_finetune.py --model gpt2           a folder, or a name on the Hugging Face hub
python examples/transformers_finetune.py --max_steps 200        run again with more steps, it goes on where it stopped
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import lightning as L
import torch
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, PreTrainedTokenizerBase

from lightning_3d import ThreeDStrategy
from lightning_3d.checkpoint import export_checkpoint

CONTEXT = 64


class FineTuning(L.LightningModule):
    """A causal language model of transformers; a batch is token ids (B, T) int64."""

    def __init__(self, model: str | None, vocabulary: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        if model:
            self.model = AutoModelForCausalLM.from_pretrained(model).train()  # it comes in eval mode
        else:
            small = LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=4,
                num_attention_heads=4,
            )
            self.model = AutoModelForCausalLM.from_config(small)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the next token."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def manual(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The topics of `help()` in pieces of `CONTEXT` tokens, (N, CONTEXT) int64."""
    ids = torch.tensor([token for topic in topics.values() for token in tokenizer(topic).input_ids])
    return ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)


def main(
    model: str | None = None,
    devices: int = 2,
    max_steps: int = 100,
    lr: float = 1e-3,
    output: Path = Path("runs/finetune"),
) -> None:
    """Train up to `max_steps`, from the last checkpoint of `output` if there is one, and export the weights.

    Args:
        model: Folder or name of a pretrained model; none for a small one with random weights.
        devices: Number of GPUs, or of processes where there are none; they share the layers in two pipeline stages.
        max_steps: Number of optimizer steps in all.
        lr: Learning rate.
        output: Folder for checkpoints and for the exported model.
    """
    L.seed_everything(1)
    tokenizer = AutoTokenizer.from_pretrained(model) if model else ByT5Tokenizer()
    module = FineTuning(model, len(tokenizer), lr)
    checkpoint = ModelCheckpoint(output, save_last=True)
    trainer = L.Trainer(
        strategy=ThreeDStrategy(pipeline_parallel_size=2, pipeline={"num_microbatches": 4}),
        devices=devices,
        max_steps=max_steps,
        callbacks=[checkpoint],
    )
    trainer.fit(module, DataLoader(manual(tokenizer), batch_size=16, shuffle=True), ckpt_path="last")

    if trainer.is_global_zero:
        exported = output / "exported"
        export_checkpoint(checkpoint.last_model_path, exported, prefix="model.", overwrite=True)
        module.model.config.save_pretrained(exported)
        tokenizer.save_pretrained(exported)

        trained = AutoModelForCausalLM.from_pretrained(exported)
        prompt = tokenizer("The class ", return_tensors="pt", add_special_tokens=False)
        print(tokenizer.decode(trained.generate(**prompt, max_new_tokens=60)[0]))


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
