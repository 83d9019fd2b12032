"""HABITS: what programs do besides training, as mixins of the LightningModule and callbacks, which go with any model.

What a habit sees it notes, and the judge compares that with one process, number by number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchmetrics import MeanMetric

from lightning_3d import ThreeDStrategy
from tests.law.settings import SETTINGS, descent
from tests.parity import Layout

Note = tuple[str, float]


class Noting(L.Callback):
    """A callback that notes numbers."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    def note(self, name: str, value: Tensor | float) -> None:
        self.notes.append((name, float(value)))


class Logs(L.LightningModule):
    """Logs numbers of every kind from the loss, also those of which microbatches' values do not simply add up."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)  # type: ignore[misc]
        self.log_dict({"double": 2 * loss.detach(), "square": loss.detach() ** 2}, on_step=True, on_epoch=False)
        self.log("mean", loss.detach(), on_step=False, on_epoch=True, batch_size=1)
        self.log("largest", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max", batch_size=1)
        return loss


class Metrics(L.LightningModule):
    """Logs a metric of torchmetrics that it updates by hand, and computes another one at the end of the epoch."""

    def add_to(self) -> None:
        self.running, self.whole = MeanMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)  # type: ignore[misc]
        self.running.update(loss.detach())
        self.whole.update(loss.detach() * 3)
        self.log("running", self.running, on_step=False, on_epoch=True, batch_size=1)
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("whole", self.whole.compute(), sync_dist=True)
        self.whole.reset()


class Hooks(L.LightningModule):
    """Overrides hooks of a step, changes gradients in one, and notes the order of them all."""

    def add_to(self) -> None:
        self.notes: list[Note] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.notes.append(("on_train_batch_start", batch_idx))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.notes.append(("on_before_zero_grad", self.global_step))

    def on_after_backward(self) -> None:
        self.notes.append(("on_after_backward", self.global_step))
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.notes.append(("optimizer_step", self.global_step))

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.notes.append(("on_train_epoch_end", self.current_epoch))


class Thawing(L.LightningModule):
    """Trains the second half of its parameters first, and all from the third step on."""

    def add_to(self) -> None:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        self.frozen = [name for name, p in self.named_parameters() if p in set(parameters[: len(parameters) // 2])]

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.global_step < 2:
            self._set(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.global_step == 2:
            self._set(True)

    def _set(self, is_trained: bool) -> None:
        for name, parameter in self.named_parameters():
            if name in self.frozen:
                parameter.requires_grad_(is_trained)


class Manual(L.LightningModule):
    """Optimizes by hand."""

    def add_to(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)  # type: ignore[misc]
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class Adversaries(L.LightningModule):
    """Steps two optimizers by hand, each for half of the parameters, the second one after two backwards."""

    def add_to(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(first)
        loss = super().training_step(batch, batch_idx)  # type: ignore[misc]
        self.manual_backward(loss)
        self.clip_gradients(first, 0.1, "norm")
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        for _ in range(2):
            self.manual_backward(self.compute_loss(batch))  # type: ignore[operator]
        nn.utils.clip_grad_norm_([p for group in second.param_groups for p in group["params"]], 0.1)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        return loss.detach()


def _by_halves(module: L.LightningModule, lr: float) -> list[torch.optim.Optimizer]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    half = len(trained) // 2
    return [torch.optim.SGD(part, lr=lr, momentum=0.9) for part in (trained[:half], trained[half:])]


class Clips(L.LightningModule):
    """Clips gradients with torch's own functions, half of them and all, by several norms and by value."""

    def add_to(self) -> None:
        self.notes: list[Note] = []

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        every = list(self.parameters())
        nn.utils.clip_grad_norm_(every[len(every) // 2 :], 0.5, norm_type=1)
        self.notes.append(("norm", float(nn.utils.clip_grad_norm_(every, 0.1))))
        self.notes.append(("largest", float(nn.utils.clip_grad_norm_(every, 0.05, norm_type=float("inf")))))
        nn.utils.clip_grad_value_(self.parameters(), 0.03)


class Early(L.LightningModule):
    """Has its optimizer before there is a Trainer, as LightningCLI makes those of its configuration."""

    def add_to(self) -> None:
        self.early = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1.0, momentum=0.9)


def _early(module: L.LightningModule, lr: float) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = module.early  # type: ignore[assignment]
    optimizer.param_groups[0]["lr"] = lr
    return optimizer


class Evaluated(L.LightningModule):
    """Is validated, tested and asked for predictions once it is trained."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.compute_loss(batch), sync_dist=True)  # type: ignore[operator]

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.compute_loss(batch)  # type: ignore[operator]
        return loss


def _evaluate(trainer: L.Trainer, module: L.LightningModule, data: Any) -> list[Note]:
    """What `validate` and `test` log, and the mean that replicas predict."""
    logged = [*trainer.validate(module, data, verbose=False), *trainer.test(module, data, verbose=False)]
    predicted = torch.stack(trainer.predict(module, data)).mean()  # type: ignore[arg-type]
    mean = trainer.strategy.reduce(predicted, reduce_op="mean")
    return [*(item for numbers in logged for item in sorted(numbers.items())), ("predicted", float(mean))]


def _nothing(trainer: L.Trainer, module: L.LightningModule, data: Any) -> list[Note]:
    return []


class Averages(L.Callback):
    """Averages that users write, of copies made before the model is made parallel and after; all end in the weights."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.early, self.averaged = copy.deepcopy(pl_module), AveragedModel(pl_module, multi_avg_fn=_AVERAGED)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.late, self.shadow = copy.deepcopy(pl_module), [p.detach().clone() for p in pl_module.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.averaged.update_parameters(pl_module)
        for average in (self.early.parameters(), self.late.parameters(), self.shadow):
            for mine, current in zip(average, pl_module.parameters(), strict=True):
                if mine.is_floating_point():
                    mine.lerp_(current.detach().to(mine.device), 0.5)

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = [[*each.parameters()] for each in (self.early, self.averaged.module, self.late)]
        for i, parameter in enumerate(pl_module.parameters()):
            parameter.copy_([*found, self.shadow][i % 4][i])


_AVERAGED = get_ema_multi_avg_fn(0.5)


class CallsOutside(Noting):
    """Calls the model between steps: its loss of the last batch, without gradients and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.batch: Any = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != 1:
            return
        pl_module.eval()
        with torch.no_grad():
            loss = pl_module.compute_loss(batch)
        pl_module.train()
        self.note("loss of the batch", trainer.strategy.reduce(loss, reduce_op="mean"))


class Summons(Noting):
    """Reads whole weights after a step, and writes to them."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for does_write in (False, True):
            with _whole(trainer, does_write):
                for name, parameter in pl_module.named_parameters():
                    assert type(parameter) is nn.Parameter
                    self.note(name, parameter.double().norm())
                    if does_write:
                        parameter.mul_(0.9)


def _whole(trainer: L.Trainer, writeback: bool) -> AbstractContextManager[None]:
    strategy = trainer.strategy
    return strategy.summon_full_params(writeback=writeback) if isinstance(strategy, ThreeDStrategy) else nullcontext()


class ChangesOptimizers(L.Callback):
    """Adds a group to the optimizer, of parameters that had gradients before, and later puts another in its place."""

    def __init__(self) -> None:
        self.num_changes = 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, number: int) -> None:
        (optimizer,) = trainer.optimizers
        parameters = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
        lr = optimizer.param_groups[0]["lr"]
        if trainer.global_step == 1 and self.num_changes == 0:
            optimizer.add_param_group({"params": parameters[1::2], "lr": 0.5 * lr})
            self.num_changes = 1
        is_last = (number + 1) % trainer.accumulate_grad_batches == 0  # gradients may have accumulated
        if trainer.global_step == 2 and self.num_changes == 1 and is_last:
            trainer.strategy.optimizers = [torch.optim.SGD(parameters, lr=lr, momentum=0.5)]
            self.num_changes = 2


def _half(module: L.LightningModule, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad][::2], lr=lr, momentum=0.9)


class ByHand(L.Callback):
    """Changes gradients and weights between steps, and averages weights into the model, as users write it."""

    def __init__(self) -> None:
        self.copied: nn.Module | None = None
        self.assigned: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.copied = copy.deepcopy(pl_module)
        self.assigned = {name: parameter.data.clone() for name, parameter in pl_module.named_parameters()}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
                parameter.grad = parameter.grad + torch.full(
                    parameter.shape, 1e-3, dtype=parameter.dtype, device=parameter.device
                )

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        assert self.copied is not None
        for average, (name, parameter) in zip(self.copied.parameters(), pl_module.named_parameters(), strict=True):
            mask = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape) % 7 > 0
            parameter.mul_(0.5 + 0.5 * mask)
            parameter.data.add_(
                torch.linspace(-1, 1, parameter.numel(), device=parameter.device).view(parameter.shape), alpha=1e-3
            )
            parameter.data = parameter.data.clamp(-2, 2)
            if parameter.dim() > 1:
                parameter[0].mul_(0.9)
                parameter.data[:, 0] *= 0.9
            average.data.mul_(0.5).add_(parameter.data, alpha=0.5)
            self.assigned[name] = (0.5 * parameter.data + 0.5 * self.assigned[name]).clone()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self.copied is not None
        for index, (name, parameter) in enumerate(pl_module.named_parameters()):
            if index % 2:
                parameter.data = self.assigned[name].clone()
            else:
                parameter.data.copy_(self.copied.get_parameter(name).data)


class Reads(Noting):
    """Reads parameters as wholes between steps and in a hook of the optimizer's, in ways that users do."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.optimizers[0].register_step_post_hook(self._stepped)

    @torch.no_grad()
    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.note("stepped", nn.utils.get_total_norm(optimizer.param_groups[0]["params"]))

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        copied = copy.deepcopy(pl_module)
        for name, parameter in pl_module.named_parameters():
            self.note(f"norm of {name}", parameter.norm())
            self.note(f"array of {name}", float(parameter.data.cpu().numpy().astype("float64").std()))
            self.note(f"list of {name}", sum(map(abs, parameter.flatten().tolist())))
            self.note(f"finite {name}", torch.isfinite(parameter).all())
            self.note(f"equal {name}", torch.equal(parameter, copied.get_parameter(name)))
        self.note("sum", sum(parameter.pow(2).sum() for parameter in pl_module.parameters()))
        self.note("vector", nn.utils.parameters_to_vector(pl_module.parameters()).norm())


class Epochs(Noting):
    """Notes what is logged at the end of an epoch, and the rates."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, value in sorted(trainer.callback_metrics.items()):
            self.note(name, value)
        for group in trainer.optimizers[0].param_groups:
            self.note("lr", group["lr"])


class Written(Noting):
    """Notes what a logger wrote, and what callbacks of Lightning that watch a metric have found."""

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logger = trainer.logger
        assert isinstance(logger, CSVLogger)
        if trainer.is_global_zero:
            for row in logger.experiment.metrics:
                for name, value in sorted(row.items()):
                    self.note(name, value)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping | ModelCheckpoint):
                best = callback.best_score if isinstance(callback, EarlyStopping) else callback.best_model_score
                self.note(type(callback).__name__, best)


def _anywhere(layout: Layout) -> bool:
    return True


def _without_replicas(layout: Layout) -> bool:
    return layout.dp == 1


def _without_pipelines(layout: Layout) -> bool:
    return layout.pp == 1


def _without_tensor_parallel(layout: Layout) -> bool:
    return layout.tp == 1


@dataclass(frozen=True, kw_only=True)
class Habit:
    """A row."""

    mixin: type[L.LightningModule] | None = None
    """Goes before the model's class; its `add_to` is called with the built model."""
    callbacks: Callable[[], list[L.Callback]] = list
    trainer: Callable[[], Mapping[str, Any]] = dict
    """More arguments of the Trainer, which may hold loggers."""
    fits: Callable[[Layout], bool] = _anywhere
    skips: frozenset[str] = field(default_factory=frozenset)
    """Settings that it does not go with."""
    optimizers: Callable[[L.LightningModule, float], Any] | None = None
    """In place of the setting's."""
    needs: str | None = None
    """A method that the model has to have."""
    warns: tuple[str, ...] = ()
    """Beginnings of warnings that it may give."""
    runs_inline: bool = False
    """Whether pipelines can't run steps with it in microbatches."""
    after: Callable[[L.Trainer, L.LightningModule, Any], list[Note]] = _nothing
    """Called after training, with batches; what it notes is compared, too."""

    @property
    def wraps_step(self) -> bool:
        """Whether it takes the loss that the training step returns."""
        return self.mixin is not None and "training_step" in vars(self.mixin)


_STEPS_BY_HAND = frozenset(
    {"accumulated", "clipped", "clipped-values", "unseen", "warmed-up", "stepped", "plateau", "sam"}
    | {"fp16", "lars", "incomplete-window", "budget"}
)
"""What Lightning leaves to who steps by hand, or is planned for steps that it makes itself."""
_RESUMED = frozenset(name for name, setting in SETTINGS.items() if setting.is_resumed)
_OTHER_OPTIMIZERS = frozenset(name for name, setting in SETTINGS.items() if setting.optimizer is not descent)


def _watching() -> list[L.Callback]:
    return [
        ModelCheckpoint(dirpath="watched", monitor="val_loss", save_weights_only=True),
        EarlyStopping("val_loss", patience=9),
        LearningRateMonitor(),
        Written(),
    ]


HABITS = {
    "none": Habit(),
    "logs": Habit(mixin=Logs, callbacks=lambda: [Epochs()], fits=_without_replicas),
    "metrics": Habit(mixin=Metrics, callbacks=lambda: [Epochs()]),
    "hooks": Habit(mixin=Hooks),
    "thawing": Habit(mixin=Thawing),
    "manual": Habit(
        mixin=Manual,
        runs_inline=True,
        fits=_without_tensor_parallel,
        skips=_STEPS_BY_HAND,
    ),
    "adversaries": Habit(
        mixin=Adversaries,
        runs_inline=True,
        optimizers=_by_halves,
        fits=_without_tensor_parallel,
        skips=_STEPS_BY_HAND | _OTHER_OPTIMIZERS | _RESUMED,
        needs="compute_loss",
    ),
    "clips": Habit(mixin=Clips, skips=frozenset({"unseen"})),
    "averages": Habit(callbacks=lambda: [Averages()], skips=_RESUMED | {"double"}),  # copies are made before it is
    "ema": Habit(
        callbacks=lambda: [EMAWeightAveraging(decay=0.5)],
        skips=_RESUMED,
        warns=("66 of the 70 entries of this state_dict",),  # where the end is saved; the file is whole
    ),
    "anomalies": Habit(trainer=lambda: {"detect_anomaly": True}),
    "calls": Habit(callbacks=lambda: [CallsOutside()], needs="compute_loss"),
    "early": Habit(mixin=Early, optimizers=_early, skips=_OTHER_OPTIMIZERS),
    "summons": Habit(callbacks=lambda: [Summons()]),
    "changes-optimizers": Habit(
        callbacks=lambda: [ChangesOptimizers()],
        optimizers=_half,
        fits=_without_pipelines,
        skips=_OTHER_OPTIMIZERS | {"fp16"},
    ),
    "evaluated": Habit(mixin=Evaluated, after=_evaluate, needs="compute_loss"),
    "by-hand": Habit(callbacks=lambda: [ByHand()], skips=frozenset({"unseen"}) | _RESUMED),
    "reads": Habit(callbacks=lambda: [Reads()], fits=_without_pipelines),
    "watching": Habit(
        callbacks=_watching,
        trainer=lambda: {"logger": CSVLogger("logs", flush_logs_every_n_steps=99), "enable_checkpointing": True},
    ),
}
