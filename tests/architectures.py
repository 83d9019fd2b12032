"""Architectures with difficult dataflow, and tiny ones from transformers with random weights, and data for them.

None of them knows of parallelism. Each is a LightningModule whose ``compute_loss`` is the mean over the samples of a
batch, so that microbatches of any size average to it exactly; the exceptions (statistics over the batch) say so.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from tests.models import ADAM_EPS

VOCABULARY, LENGTH, WIDTH, NUM_CLASSES = 100, 12, 16, 4
"""Of the data; models fit them."""


class Trained(L.LightningModule):
    """Trains ``compute_loss`` by AdamW."""

    lr = 3e-3

    @abstractmethod
    def compute_loss(self, batch: Any) -> Tensor:
        """Of one batch; 0-d."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.compute_loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=self.num_samples(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.compute_loss(batch), sync_dist=True, batch_size=self.num_samples(batch))

    def num_samples(self, batch: Any) -> int | None:
        """For what is logged; Lightning finds it if None."""
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trainable, lr=self.lr, eps=ADAM_EPS)


# ------------------------------------------------------------------------------------------------------------- data


class Samples(Dataset[Any]):
    """A list of samples."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _ids(num_samples: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (num_samples, length), generator=_generator())


def text(num_samples: int) -> Dataset[Any]:
    """``input_ids`` and equal ``labels``, (LENGTH,) int64."""
    return Samples([{"input_ids": ids, "labels": ids} for ids in _ids(num_samples)])


def masked_text(num_samples: int) -> Dataset[Any]:
    """``text`` with an ``attention_mask`` of which the last positions are 0 in every other sample."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, -3:] = 0
    return Samples(
        [{"input_ids": ids, "attention_mask": mask[i % 2], "labels": ids} for i, ids in enumerate(_ids(num_samples))]
    )


def images(num_samples: int, key: str = "pixel_values", size: int = 16) -> Dataset[Any]:
    """``pixel_values`` (3, size, size) float32 with a class each as ``labels``."""
    pixels = torch.randn(num_samples, 3, size, size, generator=_generator())
    return Samples([{key: image, "labels": torch.tensor(i % NUM_CLASSES)} for i, image in enumerate(pixels)])


def segmented_images(num_samples: int) -> Dataset[Any]:
    """``pixel_values`` (3, 32, 32) with a class per pixel, (32, 32), as ``labels``."""
    pixels = torch.randn(num_samples, 3, 32, 32, generator=_generator())
    return Samples([{"pixel_values": image, "labels": (image[0] > 0).long()} for image in pixels])


def images_with_text(num_samples: int) -> Dataset[Any]:
    """``input_ids`` and ``pixel_values``, for two towers."""
    pixels = torch.randn(num_samples, 3, 16, 16, generator=_generator())
    pairs = zip(_ids(num_samples), pixels, strict=True)
    return Samples([{"input_ids": ids, "pixel_values": image} for ids, image in pairs])


def spectrograms(num_samples: int) -> Dataset[Any]:
    """``input_features`` (8, 32) with token ``labels``."""
    features = torch.randn(num_samples, 8, 32, generator=_generator())
    pairs = zip(_ids(num_samples), features, strict=True)
    return Samples([{"input_features": feature, "labels": ids} for ids, feature in pairs])


def waveforms(num_samples: int) -> Dataset[Any]:
    """``input_values`` (400,) with a class each."""
    waves = torch.randn(num_samples, 400, generator=_generator())
    return Samples([{"input_values": wave, "labels": torch.tensor(i % NUM_CLASSES)} for i, wave in enumerate(waves)])


def vectors(num_samples: int) -> Dataset[Any]:
    """``(inputs, targets)``, (WIDTH,) and (NUM_CLASSES,) float32."""
    inputs = torch.randn(num_samples, WIDTH, generator=_generator())
    return Samples([(x, x[:NUM_CLASSES].sin()) for x in inputs])


def sequences(num_samples: int) -> Dataset[Any]:
    """``(inputs, targets)``, (LENGTH, WIDTH) and (LENGTH, NUM_CLASSES) float32."""
    inputs = torch.randn(num_samples, LENGTH, WIDTH, generator=_generator())
    return Samples([(x, x[:, :NUM_CLASSES].sin()) for x in inputs])


def token_pairs(num_samples: int) -> Dataset[Any]:
    """``(inputs, targets)``, both (LENGTH,) int64, shifted by one."""
    return Samples([(ids[:-1], ids[1:]) for ids in _ids(num_samples, LENGTH + 1)])


# ------------------------------------------------------------------------------------------- skips, towers, recurrence


class UNet(Trained):
    """Skip connections over the whole depth; defined in another order than called."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.out = nn.Conv2d(width, NUM_CLASSES, 1)
        self.up = nn.ModuleList(nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(3))
        self.mid = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True))
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if i == 0 else width, width, 3, padding=1), nn.ReLU()) for i in range(3)
        )

    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        x, skips = batch["pixel_values"], []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.mid(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return F.cross_entropy(self.out(x).mean((2, 3)), batch["labels"])


class EncoderDecoder(Trained):
    """``nn.Transformer``, whose memory is read by every decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        source, target = batch
        mask = nn.Transformer.generate_square_subsequent_mask(source.shape[1])
        return F.mse_loss(self.head(self.transformer(source, source.flip(1), tgt_mask=mask)), target)


class ResidualViT(Trained):
    """Residuals and an in-place addition in glue; the cls token and the positions belong to glue."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(48, WIDTH)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH))
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True),
                    nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)),
                ]
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        image = batch["pixel_values"]
        patches = image.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        x = self.embed(patches)
        x = torch.cat([self.cls.expand(len(image), -1, -1), x], 1)
        x += self.positions
        start = x
        for layer in self.layers:
            attention, mlp = layer.children()
            x = attention(x) + x
            x = mlp(x) + x
        return F.cross_entropy(self.head((x + 0.1 * start)[:, 0]), batch["labels"])


class Recurrent(Trained):
    """A language model of two recurrent layers that return their state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = (nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, targets = batch
        x, state = self.first(self.embed(ids))
        x, _ = self.second(x, state)  # starts where the first ended
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class UnrolledCell(Trained):
    """A cell called once per position, and a shared layer applied several times after it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, targets = batch
        state, outputs = x.new_zeros(len(x), WIDTH), []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            outputs.append(state)
        y = torch.stack(outputs, 1)
        for _ in range(3):
            y = y + torch.tanh(self.shared(y))
        return F.mse_loss(self.head(y), targets)


# ----------------------------------------------------------------------------------- what blocks take and return


class InterleavedShard(NamedTuple):
    """A block's output as a named tuple."""

    x: Tensor
    mask: Tensor
    depth: int


@dataclass
class Hidden:
    """A block's output as a dataclass that torch knows nothing of."""

    x: Tensor
    skipped: Tensor | None
    scale: float


class _ReturnsTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, depth: int) -> tuple[InterleavedShard, None, list[Tensor]]:
        y = self.linear(x)
        return InterleavedShard(x + y.tanh(), y > 0, depth + 1), None, [y.argmax(-1)]


class _ReturnsDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        x = self.linear(inputs["x"]).masked_fill(inputs["mask"], 0.0) * inputs["depth"]
        return {"x": x, "auxiliary": x.square().mean((1, 2)), "mask": inputs["mask"], "nothing": None}


class _ReturnsDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, hidden: Hidden | None = None) -> Hidden:
        if hidden is not None and hidden.skipped is not None:
            x = x + hidden.skipped * hidden.scale
        return Hidden(x=self.linear(x).relu(), skipped=x, scale=0.5)


class Structures(Trained):
    """Tuples, dicts, dataclasses, None, ints and boolean masks between blocks; an auxiliary loss from one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = _ReturnsTuple()
        self.b = _ReturnsDict()
        self.c = nn.ModuleList(_ReturnsDataclass() for _ in range(3))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, targets = batch
        parts, nothing, (chosen,) = self.a(x, depth=1)
        assert nothing is None
        out = self.b({"x": parts.x, "mask": parts.mask, "depth": parts.depth})
        hidden: Hidden | None = None
        x = out["x"]
        for block in self.c:
            hidden = block(x, hidden=hidden)
            x = hidden.x
        x = x * (1 + F.one_hot(chosen, WIDTH)) + out["mask"] * 0.1
        loss: Tensor = F.mse_loss(self.head(x), targets) + 0.1 * out["auxiliary"].mean()
        return loss


class Expert(nn.Module):
    """A block that leaves its auxiliary loss in an attribute, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.auxiliary = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        self.auxiliary = weights.square().mean((1, 2))
        chosen = weights.argmax(-1)
        output = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            where = (chosen == i).nonzero(as_tuple=True)  # its length depends on the data
            given = expert(x[where]) * weights[where][:, i, None]
            output = output.index_put(where, given.to(output.dtype))  # autocast's may be another
        return x + output


class Mixture(Trained):
    """Experts chosen by data-dependent indexing, with auxiliary losses read from the blocks' attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Expert() for _ in range(4)]
        self.registered = nn.ModuleList(self.blocks)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, targets = batch
        for block in self.blocks:
            x = block(x)
        auxiliary = torch.stack([block.auxiliary.mean() for block in self.blocks]).sum()
        return F.mse_loss(self.head(x), targets) + 0.1 * auxiliary


class _Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, collected: dict[str, list[Tensor]]) -> Tensor:
        collected["states"].append(x.tanh())
        output: Tensor = self.linear(x) + sum(collected["states"])
        return output


class Collected(Trained):
    """Blocks that append to a list which they share, forward hooks on blocks and on modules inside of them, a hook that
    changes the output of its module, and in-place changes of views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Collects() for _ in range(4))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.seen: list[Tensor] = []
        self.blocks[0].register_forward_hook(lambda module, args, output: self.seen.append(output))
        self.blocks[2].register_forward_hook(lambda module, args, output: 0.5 * output)
        linears: list[Any] = [block.linear for block in self.blocks]
        linears[1].register_forward_hook(lambda module, args, output: self.seen.append(args[0] * output))
        linears[3].register_forward_hook(lambda module, args, output: output + 1)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, targets = batch
        self.seen.clear()
        collected: dict[str, list[Tensor]] = {"states": [x]}
        for block in self.blocks:
            x = block(x, collected)
        assert len(collected["states"]) == 1 + len(self.blocks)
        y = self.head(x)
        y[:, 0].mul_(2)
        y[:, -1] += 1
        auxiliary = collected["states"][1].square().mean() + sum(seen.square().mean() for seen in self.seen)
        return F.mse_loss(y, targets) + 0.1 * auxiliary


# ------------------------------------------------------------------------------------------------- shared and frozen


class Lora(nn.Module):
    """A frozen linear layer with a trained low-rank update."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.up(self.down(x))
        return output


class Adapted(Trained):
    """LoRA on some layers of a frozen network; the first block is frozen as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(inplace=True),
            *(nn.Sequential(Lora(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(3)),
            nn.Linear(WIDTH, NUM_CLASSES),
        )
        self.layers[0].requires_grad_(False)
        self.layers[-1].requires_grad_(False)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.layers(batch[0]), batch[1])


class Parameterless(Trained):
    """A Sequential with activations, pooling and flattening between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Hardtanh(inplace=True),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, NUM_CLASSES),
        )

    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.layers(batch["pixel_values"]), batch["labels"])


class Ties(Trained):
    """One weight in the first and the third block, another in the second and the last; a module used at two places;
    the output head is the embedding, applied as a function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.layers[2].weight = self.layers[0].weight
        self.layers[4].weight = self.layers[1].weight
        self.again = self.layers[1]

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, targets = batch
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(input=x))
        x = self.again(x)
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), targets.flatten())


# ----------------------------------------------------------------------------- functions of torch that hide their work


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, exponent: int) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.exponent = exponent
        return x * scale**exponent

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, scale = ctx.saved_tensors
        (gradient,) = gradients
        d_scale = ctx.exponent * scale ** (ctx.exponent - 1) * (gradient * x).sum((0, 1))
        return gradient * scale**ctx.exponent, d_scale, None


_scaled: Callable[[Tensor, Tensor, int], Tensor] = _Scaled.apply  # the reference that most code keeps


class CustomFunctions(Trained):
    """Own autograd functions and checkpointed regions in glue, around blocks and glue calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, targets = self.first(batch[0]), batch[1]
        for layer in self.layers:
            y = checkpoint(self._region, layer, x, use_reentrant=False) if self.training else self._region(layer, x)
            x = _scaled(x + 0.1 * y, self.scale, 2)
        return F.mse_loss(self.head(x), targets)

    @staticmethod
    def _region(layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(x)) * x.sigmoid()


# ----------------------------------------------------------------------------------------------------------- batches


@dataclass
class Example:
    """A batch as a dataclass, with all that batches hold."""

    ids: Tensor
    extra: dict[str, Any]
    names: list[str]
    scale: int
    nothing: None = None


def collate_examples(samples: list[dict[str, Any]]) -> Example:
    """Pad to the longest of the samples; (B, longest)."""
    longest = max(len(sample["ids"]) for sample in samples)
    padded = torch.stack([F.pad(sample["ids"], (0, longest - len(sample["ids"]))) for sample in samples])
    return Example(
        ids=padded,
        extra={"mask": padded > 0, "pairs": [(padded.float(), "text"), (None, 3)]},
        names=[sample["name"] for sample in samples],
        scale=2,
    )


def collate_encoding(samples: list[dict[str, Any]]) -> Mapping[str, Any]:
    """A ``BatchEncoding``, as tokenizers return it."""
    encoding: Any = importlib.import_module("transformers").BatchEncoding
    ids = torch.stack([sample["input_ids"] for sample in samples])
    batch: Mapping[str, Any] = encoding({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    return batch


def named_text(num_samples: int) -> Dataset[Any]:
    """``ids`` of different lengths with a ``name``."""
    return Samples([{"ids": ids[: 5 + i % 7], "name": f"sample {i}"} for i, ids in enumerate(_ids(num_samples))])


class NestedBatches(Trained):
    """Takes an ``Example`` apart; the loss is the mean over samples of a sum over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def num_samples(self, batch: Example) -> int:
        return len(batch.ids)

    def compute_loss(self, batch: Example) -> Tensor:
        assert len(batch.names) == len(batch.ids)
        assert batch.nothing is None
        (values, _), (none, _) = batch.extra["pairs"]
        assert none is None
        x = self.embed(batch.ids) * batch.scale + 0.001 * values[..., None]
        for layer in self.layers:
            x = x + layer(x).tanh()
        losses = F.cross_entropy(self.head(x).flatten(0, 1), batch.ids.flatten(), reduction="none")
        loss: Tensor = (losses.view_as(batch.ids) * batch.extra["mask"]).sum(1).mean() / LENGTH
        return loss
