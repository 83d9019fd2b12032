"""As the training examples of diffusers: each trains a part of a small diffusion model, the rest of it frozen.

What the examples draw in a step (noise, times, posteriors) is a function of the sample here (``drawn``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, compute_snr
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPTextConfig, CLIPTextModel

from tests.architectures import Samples
from tests.examples.data import SIZE, drawn
from tests.examples.place import Outcome, Place, outcome

VOCABULARY, LENGTH, WIDTH = 32, 6, 16
NUM_TIMES = 10
Batch = dict[str, Tensor]


def pictures(num_samples: int, *, seed: int = 0) -> Dataset[Any]:
    """``pixels``, a picture of the same size that it is ``like``, and ``tokens``."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(num_samples, 2, 3, SIZE, SIZE, generator=generator) * 2 - 1
    tokens = torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=generator)
    return Samples([{"pixels": p[0], "like": p[1], "tokens": t} for p, t in zip(pixels, tokens, strict=True)])


def times_of(like: Tensor) -> Tensor:
    """In place of ``torch.randint``."""
    return (like.detach().flatten(1).double().sum(1) * 1e3).long().remainder(NUM_TIMES)


class Diffusion(L.LightningModule):
    """What the examples share: a schedule of noise, and an optimizer with a warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.noise_scheduler = DDPMScheduler(num_train_timesteps=NUM_TIMES)

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.trained(), lr=1e-3, eps=1e-3, weight_decay=1e-2)
        schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def log_loss(self, loss: Tensor) -> Tensor:
        self.log("train_loss", loss, prog_bar=True)
        return loss


def fit(place: Place, make: Callable[[], L.LightningModule], *, collate: Any = None, **settings: Any) -> Outcome:
    trainer = place.trainer(max_epochs=2, gradient_clip_val=1.0, **settings)
    batches: DataLoader[Any] = DataLoader(pictures(24), batch_size=8, collate_fn=collate)
    trainer.fit(make(), batches, DataLoader(pictures(8, seed=1), batch_size=8, collate_fn=collate))
    return outcome(trainer, None)


def unet() -> UNet2DModel:
    return UNet2DModel(
        sample_size=SIZE,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=4,
    )


# ---- unconditional_image_generation


class Unconditional(Diffusion):
    """Averages weights by diffusers' EMAModel, made with the model, and validates with the averages."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.model = unet()
        self.is_late = late
        self.ema: Any = None if late else self.averages()

    def averages(self) -> EMAModel:
        return EMAModel(self.model.parameters(), decay=0.9, use_ema_warmup=False)

    def on_fit_start(self) -> None:
        if self.is_late:
            self.ema = self.averages()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        clean = batch["pixels"]
        noise, times = drawn(clean), times_of(clean)
        noisy = self.noise_scheduler.add_noise(clean, noise, times)
        return self.log_loss(F.mse_loss(self.model(noisy, times).sample, noise))

    def on_train_batch_end(self, *_: Any) -> None:
        self.ema.step(self.model.parameters())

    def on_validation_start(self) -> None:
        self.ema.store(self.model.parameters())
        self.ema.copy_to(self.model.parameters())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        clean = batch["pixels"]
        noise, times = drawn(clean), times_of(clean)
        predicted = self.model(self.noise_scheduler.add_noise(clean, noise, times), times).sample
        self.log("val_loss", F.mse_loss(predicted, noise))

    def on_validation_end(self) -> None:
        self.ema.restore(self.model.parameters())


class Plain(Unconditional):
    """Without averages."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    on_validation_start = on_validation_end = lambda self: None


def unconditional(place: Place) -> Outcome:
    return fit(place, Plain)


def unconditional_averaged(place: Place) -> Outcome:
    return fit(place, Unconditional)


# ---- text_to_image


class TextToImage(Diffusion):
    """Trains a U-Net on latents; encoders are frozen, and the loss is weighted by the ratio of signal to noise."""

    def __init__(self, *, snr_gamma: float | None = 5.0) -> None:
        super().__init__()
        self.snr_gamma = snr_gamma
        self.vae = AutoencoderKL(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=SIZE,
        )
        self.text_encoder = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=LENGTH,
                bos_token_id=0,
                eos_token_id=1,
            )
        )
        self.unet = UNet2DConditionModel(
            sample_size=SIZE // 2,
            layers_per_block=1,
            block_out_channels=(16, 32),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=WIDTH,
            attention_head_dim=8,
            norm_num_groups=4,
        )
        self.vae.requires_grad_(False)
        self.text_encoder.requires_grad_(False)

    def noised(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Noisy latents, their times, their noise, and the text's hidden states."""
        latents = self.vae.encode(batch["pixels"]).latent_dist.mode() * 0.18215
        noise, times = drawn(batch["pixels"], *latents.shape[1:]), times_of(batch["pixels"])
        text = self.text_encoder(batch["tokens"], return_dict=False)[0]
        return self.noise_scheduler.add_noise(latents, noise, times), times, noise, text

    def predicted(self, noisy: Tensor, times: Tensor, text: Tensor, batch: Batch) -> Tensor:
        made: Tensor = self.unet(noisy, times, text, return_dict=False)[0]
        return made

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        noisy, times, noise, text = self.noised(batch)
        predicted = self.predicted(noisy, times, text, batch)
        if self.snr_gamma is None:
            return self.log_loss(F.mse_loss(predicted.float(), noise.float(), reduction="mean"))
        ratio = compute_snr(self.noise_scheduler, times)
        weights = torch.stack([ratio, self.snr_gamma * torch.ones_like(times)], dim=1).min(dim=1)[0] / ratio
        loss = F.mse_loss(predicted.float(), noise.float(), reduction="none")
        return self.log_loss((loss.mean(dim=list(range(1, len(loss.shape)))) * weights).mean())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        noisy, times, noise, text = self.noised(batch)
        self.log("val_loss", F.mse_loss(self.predicted(noisy, times, text, batch), noise))


def text_to_image(place: Place) -> Outcome:
    return fit(place, TextToImage)


# ---- controlnet


# ---- dreambooth


# ---- textual_inversion


class Inversion(TextToImage):
    """Trains the embedding of one token, and puts all others back after every step."""

    def __init__(self) -> None:
        super().__init__(snr_gamma=None)
        self.unet.requires_grad_(False)
        self.text_encoder.get_input_embeddings().requires_grad_(True)

    def on_train_start(self) -> None:
        self.before = self.text_encoder.get_input_embeddings().weight.data.clone()

    def on_train_batch_end(self, *_: Any) -> None:
        others = torch.ones(VOCABULARY, dtype=torch.bool)
        others[3] = False
        with torch.no_grad():
            self.text_encoder.get_input_embeddings().weight[others] = self.before[others]


def inversion(place: Place) -> Outcome:
    return fit(place, Inversion)


# ---- text_to_image_lora
