"""Programs of users: parameters of all kinds, steps that change, change themselves, or keep books."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from tests import architectures as a
from tests.law.models.row import UNEVEN, Model
from tests.models import features
from tests.parity import Job, Layout

CLASSES = 4


class Gained(nn.Module):
    """Parameters of no dims, of no elements, and of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.gain, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 3))
        self.precise = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.precise.square().mean().to(x.dtype)
        return x + self.gain * self.inner(x) * scale + self.nothing.sum()


class Inner(nn.Module):
    """Has another method than ``forward``, and children that others call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(7, 16), nn.Linear(16, 7)

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()  # type: ignore[no-any-return]


class Selection(nn.Module):
    """Scales with modules that it is given, which others have, too."""

    def __init__(self, scalers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.scalers = nn.ModuleDict(scalers)
        self.inner = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        for scaler in self.scalers.values():
            x = scaler(x).tanh()
        result: Tensor = self.inner(x)
        return result


class OddParameters(a.Trained):
    """Parameters of shapes that do not divide, of glue, tied, shared, frozen, unused, and read by other code."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Linear(8, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.gained, self.by_method = Gained(), Inner()
        self.scalers = nn.ModuleDict({name: nn.Linear(7, 7) for name in ("one", "two")})
        self.encoder, self.decoder = Selection({"one": self.scalers["one"]}), Selection(dict(self.scalers.items()))
        self.head = nn.Linear(7, 4)
        self.token, self.scale = nn.Parameter(torch.zeros(1, 7)), nn.Parameter(torch.ones(()))
        self.fixed = nn.Parameter(torch.ones(5), requires_grad=False)
        self.order = nn.Parameter(torch.arange(4), requires_grad=False)
        self.empty, self.unused = nn.Parameter(torch.ones(0, 4)), nn.Linear(3, 3)
        self.register_parameter("nothing", None)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = self.embed(batch[0]) + self.token * self.fixed[0]
        x = self.gained(self.second(torch.tanh(self.first(x))))
        x = x + self.by_method.outer(self.by_method.encode(x))
        x = x + self.decoder(self.encoder(x))
        x = x + 0.1 * x @ self.embed.weight @ self.embed.weight.T + 0.1 * F.linear(x, self.first.weight)
        output = (self.head(x) * self.scale + self.empty.sum())[:, self.order]
        return F.mse_loss(output, batch[1])


class Clamped(nn.Linear):
    """Clamps its own weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True).clamp(min=0.25))
        return super().forward(x)


class SelfChanging(a.Trained):
    """Teaches itself, changes weights, uses layers in some steps alone, and has a penalty on its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)
        self.normed, self.sometimes, self.late = Clamped(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)
        self.num_steps = 0

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs = batch[0].detach().clone().requires_grad_()
        with torch.enable_grad():
            output = self.layers(inputs) + self.normed(inputs)
            (slope,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=self.training, retain_graph=True)
        if self.num_steps % 2:
            output = output + self.sometimes(inputs)
        if self.global_step > 1:
            self.late.weight.data = self.late.weight.data * 0.9
            output = output + self.late(inputs)
        with torch.no_grad():
            taught = self.teacher(batch[0] + 0.1)
        loss = F.mse_loss(output, batch[1]) + 0.1 * F.mse_loss(output, taught) + 0.1 * slope.square().sum(1).mean()
        return loss + 1e-2 * sum(parameter.square().sum() for parameter in self.layers.parameters())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.num_steps += 1
        return super().training_step(batch, batch_idx)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for learner, teacher in zip(self.layers.parameters(), self.teacher.parameters(), strict=True):
            teacher.mul_(0.9).add_(learner, alpha=0.1)


class Changing(a.Trained):
    """Takes other paths in some steps, batches and epochs, and reads what hooks leave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), *(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(16, 4)
        self.register_buffer("running", torch.zeros(()))

    def on_fit_start(self) -> None:
        self.register_buffer("weights", torch.linspace(0.5, 1.0, 4, device=self.device))

    def on_train_start(self) -> None:
        self.log("started", 1.0)
        self.factor = 0.5

    def on_train_epoch_start(self) -> None:
        self.loss, self.losses = nn.MSELoss(), list[Tensor]()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.number = batch_idx

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        first, *others = self.layers
        x = skipped = first(batch[0])
        for layer in others:
            posterior = Normal(x, 1.0 + x.square())  # whose arguments torch checks
            divergence = kl_divergence(posterior, Normal(torch.zeros_like(x), 1.0)).mean()
            x = layer(posterior.mean)
        x = x + skipped if self.global_step % 2 else x
        return self.loss_of(self.head(x), batch[1]) + 0.1 * divergence

    def loss_of(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(output * self.weights, targets)  # type: ignore[operator]

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        self.log("rate", rate)
        loss = self.compute_loss(batch)
        if self.number % 3 == 2:
            loss = (
                loss
                - Independent(Normal(self.layers[0](batch[0]), 1.0), 1)
                .log_prob(torch.ones(16, device=self.device))
                .mean()
            )
        self.losses.append(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss * self.factor * (1 + rate + self.trainer.num_val_batches[0])  # type: ignore[no-any-return]

    def on_train_epoch_end(self) -> None:
        self.log("mean_loss", torch.stack(self.losses).mean(), sync_dist=True)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:  # type: ignore[override]
        super().validation_step(batch, 0)


class LoggingBlock(nn.Module):
    """Logs from its forward, through a reference that is no submodule."""

    def __init__(self, owner: tuple[L.LightningModule], name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(16, 16), name
        object.__setattr__(self, "owner", owner)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.owner[0].log(f"mean_{self.name}", y.mean(), on_step=True, on_epoch=True, sync_dist=True)  # type: ignore[index,operator,union-attr]
        return y


class Bookkeeping(L.LightningModule):
    """Logs everywhere, by every reduction, has metrics of many kinds, lists, counters and outputs of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, CLASSES)
        self.layers = nn.Sequential(*(LoggingBlock((self,), str(i)) for i in range(4)))
        collection = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
                "micro_f1": MulticlassF1Score(CLASSES, average="micro"),  # in one compute group with the accuracy
                "f1": MulticlassF1Score(CLASSES),
                "auroc": MulticlassAUROC(CLASSES, thresholds=None),  # keeps all predictions in a list
            }
        )
        self.train_metrics, self.val_metrics = collection.clone(prefix="train_"), collection.clone(prefix="val_")
        self.by_hand = collection.clone(prefix="hand_")
        self.accuracy, self.auroc = MulticlassAccuracy(CLASSES), MulticlassAUROC(CLASSES)
        self.mean_loss, self.sum_loss, self.num_steps = MeanMetric(), SumMetric(), SumMetric()
        self.notes: list[tuple[str, float]] = []
        self.outputs: list[Tensor] = []
        self.by_loader: dict[str, list[Any]] = defaultdict(list)
        self.by_class: Counter[int] = Counter()
        self.num_batches, self.num_samples, self.total, self.classes = 0, 0, 0.0, set[int]()
        self.running: Tensor | None = None
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("confusion", torch.zeros(CLASSES, CLASSES, dtype=torch.int64))

    def _computed(self, batch: Any, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        sync = {"sync_dist": True}
        self.log(f"{kind}_input", batch[0].mean(), on_step=False, on_epoch=True, **sync)  # before the first block
        x = self.first(batch[0])
        self.log(f"{kind}_first", x.square().mean(), True, False, on_step=False, on_epoch=True, **sync)
        logits, classes = self.last(self.layers(x)), batch[1].argmax(1)
        loss = F.cross_entropy(logits, classes)
        self.log_dict({f"{kind}_loss": loss, f"{kind}_double": 2 * loss}, on_step=True, on_epoch=True, **sync)
        self.log(f"{kind}_max", logits.max(), reduce_fx="max", on_step=False, on_epoch=True, **sync)
        self.log(f"{kind}_min", logits.min(), reduce_fx=torch.min, on_step=False, on_epoch=True, **sync)
        correct = (logits.argmax(1) == classes).sum()
        self.log(f"{kind}_correct", correct, reduce_fx="sum", on_step=False, on_epoch=True, **sync)
        self.log(f"{kind}_sized", loss, batch_size=len(batch[0]), on_step=False, on_epoch=True, **sync)
        # Eight could be the samples of two microbatches.
        self.log(f"{kind}_weighing", loss, batch_size=8, on_step=False, on_epoch=True, **sync)
        self.log(f"{kind}_number", 3.0, on_step=False, on_epoch=True, prog_bar=True, **sync)
        return loss, logits, classes

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits, classes = self._computed(batch, "train")
        self.accuracy(logits, classes)
        self.log("class_accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict(self.train_metrics(logits, classes), on_step=True, on_epoch=False)  # values for the batch
        self.mean_loss.update(loss)
        self.sum_loss(loss)
        self.num_steps.update(1)
        self.num_batches += 1
        self.num_samples += len(logits)
        self.total += loss.item()
        self.average.mul_(0.9).add_(0.1 * loss.detach())  # type: ignore[operator]
        self.num_seen += 1
        self.running = loss.detach() if self.running is None else 0.5 * self.running + 0.5 * loss.detach()
        self.by_class.update(classes.tolist())
        pairs = classes * CLASSES + logits.argmax(1)
        self.confusion += torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES)
        self.register_buffer("positions", torch.arange(5.0), persistent=False)  # as caches of biases are
        pair = (classes, loss.detach() * 2)
        return {"loss": loss, "logits": logits, "pair": pair, "correct": (classes > 1).sum()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        classes, double = outputs["pair"]
        for name, value in (("logits", outputs["logits"].sum()), ("classes", classes.sum()), ("double", double)):
            self.notes.append((name, float(value)))
        self.notes += [("correct", float(outputs["correct"])), ("rows", float(len(outputs["logits"])))]

    def on_train_epoch_end(self) -> None:
        for name in ("mean_loss", "sum_loss", "num_steps"):
            self.notes.append((name, float(getattr(self, name).compute())))
            getattr(self, name).reset()
        self.notes += [(name, float(value)) for name, value in self.train_metrics.compute().items()]
        self.train_metrics.reset()
        numbers = {"batches": self.num_batches, "samples": self.num_samples, "total": self.total}
        self.notes += [(name, float(value)) for name, value in numbers.items()]
        self.notes += [(f"class {name}", float(count)) for name, count in sorted(self.by_class.items())]
        assert self.running is not None
        self.notes.append(("running", float(self.running)))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits, classes = self._computed(batch, "val")
        self.val_metrics.update(logits, classes)
        self.log_dict(self.val_metrics)
        self.by_hand.update(logits, target=classes)
        self.auroc.update(preds=logits, target=classes)
        self.outputs.append(logits)
        self.by_loader["loss"].append({"loss": loss, "classes": classes})
        self.by_loader["names"].extend([f"class {int(c)}" for c in classes])
        self.classes.update(classes.tolist())
        return {"size": len(logits), "index": batch_idx}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes += [("size", float(outputs["size"])), ("index", float(outputs["index"]))]

    def on_validation_epoch_end(self) -> None:
        self.notes += [(name, float(value)) for name, value in self.by_hand.compute().items()]
        self.by_hand.reset()
        self.log("auroc", self.auroc.compute(), sync_dist=True)
        self.auroc.reset()
        kept = torch.cat(self.outputs)
        self.notes += [("outputs", float(kept.sum())), ("rows", float(len(kept)))]
        self.notes.append(("losses", float(torch.stack([entry["loss"] for entry in self.by_loader["loss"]]).sum())))
        names = [float(name.removeprefix("class ")) for name in self.by_loader["names"]]
        self.notes += [("first class", names[0]), ("classes", sum(names)), ("kinds", float(len(self.classes)))]
        self.outputs.clear()
        self.by_loader.clear()
        self.classes = set()


def _whole(layout: Layout) -> bool:
    """In a pipeline a step is refused that reads or changes what other stages have."""
    return layout.pp == 1


EVERYWHERE = frozenset({"pp", "tp", "dp"})
MODELS = {
    "odd-parameters": Model(
        job=Job(model=OddParameters, data=features, num_val_batches=1),
        families=EVERYWHERE,
        skips=frozenset({"by-hand", "reads", "clips", "summons"}),  # which do not know of integers and empty parameters
    ),
    "self-changing": Model(
        job=Job(model=SelfChanging, data=features, num_val_batches=1),
        fits=_whole,
        families=frozenset({"tp", "dp"}),
    ),
    "changing": Model(
        job=Job(model=Changing, data=features, num_val_batches=1),
        families=EVERYWHERE,
        warns=("It is recommended to use `self.log('started'",),
        has_plain_step=False,
        skips=frozenset({"averages", "ema", "evaluated"}),  # a buffer comes when they have copied it
    ),
    "bookkeeping": Model(
        job=Job(model=Bookkeeping, data=partial(features, seed=2), num_missing=3, num_val_batches=2),
        runs_inline=True,
        traits=UNEVEN,
        has_plain_step=False,
        warns=("No negative samples", "No positive samples", "4 of the 15 entries of this state_dict"),
        skips=frozenset({"averages"}),  # its metrics' states come and go, which torch's averages can't follow
    ),
}
