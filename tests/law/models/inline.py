"""Programs that no stages of a pipeline can follow: they run inline."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.architectures import Trained
from tests.hugging_face import small_job
from tests.law.models.row import Model
from tests.models import TinyMLP, features
from tests.parity import Layout

WIDTH = 16


class Penalised(TinyMLP):
    """The loss has the size of the gradient of the output, through all blocks (Gulrajani et al. 2017)."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        output = self(inputs)
        (slope,) = torch.autograd.grad(output, inputs, torch.ones_like(output), create_graph=True)
        loss = F.mse_loss(output, batch[1]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class HeatEquation(TinyMLP):
    """The loss has second derivatives by two coordinates, one after the other (Raissi et al. 2019)."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        points = batch[0].clone().requires_grad_()
        heat = self(points)
        (slopes,) = torch.autograd.grad(heat.sum(), points, create_graph=True)
        bends = [torch.autograd.grad(slopes[:, i].sum(), points, create_graph=True)[0][:, i] for i in (1, 2)]
        loss = F.mse_loss(heat, batch[1]) + (slopes[:, 0] - 0.1 * sum(bends)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class _Tally:
    """What layers tell those after them, as a cache."""

    def __init__(self, means: list[Tensor]) -> None:
        self.num_layers, self.means = len(means), means


class _Half(nn.Module):
    """What is added to one half of the features, from the other and from what layers before it have told."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8))

    def forward(self, x: Tensor, tally: _Tally) -> Tensor:
        tally.num_layers += 1
        tally.means.append(x.detach().mean(1, keepdim=True))
        return self.again(x, tally.means[tally.num_layers // 2])

    def again(self, x: Tensor, mean: Tensor) -> Tensor:
        return self.inner(x) + mean  # type: ignore[no-any-return]


class _Reversing(torch.autograd.Function):
    """Keeps nothing of the layers for its backward, which goes back through them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        (new, old), tally = x.chunk(2, 1), _Tally([])
        for layer in layers:
            new, old = old + layer(new, tally), new
        ctx.layers, ctx.means = layers, tally.means
        ctx.save_for_backward(new, old)
        return torch.cat([new, old], 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (new, old), (of_new, of_old) = ctx.saved_tensors, gradient.chunk(2, 1)
        for i, layer in reversed([*enumerate(ctx.layers)]):
            with torch.enable_grad():
                x = old.detach().requires_grad_()
                added = layer(x, _Tally(ctx.means[:i])) if i % 2 else layer.again(x, ctx.means[(i + 1) // 2])
                added.backward(of_new)
            new, old = x.detach(), (new - added).detach()
            of_new, of_old = of_old + x.grad, of_new
        return torch.cat([of_new, of_old], 1), None


class Reversible(Trained):
    """Layers that are called in a custom function, and again in its backward (Gomez et al. 2017), with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(_Half() for _ in range(4))

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.head(_Reversing.apply(self.first(batch[0]), self.layers)), batch[1])


def _perceptron(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, outputs))


class Quantised(L.LightningModule):
    """Quantises what it encodes by a codebook that code outside of blocks reads, against a judge with a penalty; by
    manual optimization, with two backwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.encoder, self.decoder, self.judge = _perceptron(8, 4), _perceptron(4, 8), _perceptron(8, 1)
        self.codes = nn.Embedding(6, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        encoded = self.encoder(x) * self.scale
        nearest = self.codes(torch.cdist(encoded, self.codes.weight).argmin(1))
        loss = F.mse_loss(nearest, encoded.detach()) + 0.25 * F.mse_loss(encoded, nearest.detach())
        return self.decoder(encoded + (nearest - encoded).detach()), loss

    def _loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        decoded, loss = self(batch[0])
        return F.mse_loss(decoded, batch[0]) + loss - 0.1 * self.judge(decoded).mean(), decoded.detach()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss, decoded = self._loss(batch)
        self.manual_backward(loss, retain_graph=True)
        between = (0.3 * decoded + 0.7 * batch[0]).requires_grad_()
        (slope,) = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)
        judged = F.relu(1 - self.judge(batch[0])).mean() + (slope.norm(dim=1) - 1).square().mean()
        self.manual_backward(judged)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log_dict({"loss": loss, "judged": judged}, on_step=True, on_epoch=True, sync_dist=True)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch)[0], sync_dist=True)


class Balanced(Quantised):
    """Weighs the judge's loss by the gradients of the last weight (Esser et al. 2021)."""

    def _loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        decoded, loss = self(batch[0])
        error, judged = F.mse_loss(decoded, batch[0]), -self.judge(decoded).mean()
        if torch.is_grad_enabled():
            last = self.decoder[2].weight
            sizes = [torch.autograd.grad(part, last, retain_graph=True)[0].norm() for part in (error, judged)]
            judged = judged * (sizes[0] / (sizes[1] + 1e-4)).clamp(max=10)
        return error + loss + 0.1 * judged, decoded.detach()


class Reading(Trained):
    """Leaves a layer out, or takes one twice, by what those before it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = self.inlet(batch[0])
        for layer in self.layers:
            for _ in range(1 + int(x.sum().abs() * 10) % 2):
                x = x + layer(x)
        return F.mse_loss(self.head(x), batch[1])


class Carrying(Trained):
    """A hidden state goes on from batch to batch (truncated backpropagation through time)."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.state: list[Tensor | None] = [None] * 3

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, new = batch[0], list[Tensor]()
        for cell, hidden in zip(self.cells, self.state, strict=True):
            x = x + cell(x, None if hidden is None or len(hidden) != len(x) else hidden)
            new.append(x)
        if self.training:
            self.state = [hidden.detach() for hidden in new]
        return F.mse_loss(self.head(x), batch[1])


class Graphs(Trained):
    """Passes messages along the edges of graphs, of which a batch has all nodes in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def num_samples(self, batch: dict[str, Tensor]) -> int:
        return len(batch["targets"])

    def compute_loss(self, batch: dict[str, Tensor]) -> Tensor:
        x, (sources, ends) = batch["nodes"], batch["edges"]
        for layer in self.layers:
            x = x + torch.zeros_like(x).index_add(0, ends, layer(x)[sources])
        graphs = x.new_zeros(len(batch["targets"]), 8).index_add(0, batch["graph"], x)
        return F.mse_loss(self.head(graphs), batch["targets"])


class DeepQ(L.LightningModule):
    """Q-learning: acts by what it has learned, learns from what it remembers, and by a target that follows at times
    (Mnih et al. 2015), copied in a step, or slowly between steps (Lillicrap et al. 2016). The batch is the environment:
    states, and the reward of each action.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values, self.target = _perceptron(8, 4), _perceptron(8, 4).requires_grad_(False)
        self.replay: list[tuple[Tensor, ...]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        states, rewards = batch
        if self.global_step % 2 == 0:
            self.target.load_state_dict(self.values.state_dict())
        with torch.no_grad():
            actions = self.values(states).argmax(1, keepdim=True)
        self.replay.append((states, actions, rewards.gather(1, actions), 0.9 * states.roll(1, 1)))
        states, actions, rewards, following = self.replay[len(self.replay) // 2]
        expected = rewards + 0.9 * self.target(following).amax(1, keepdim=True)
        loss = F.smooth_l1_loss(self.values(states).gather(1, actions), expected)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", batch[1].gather(1, self.values(batch[0]).argmax(1, keepdim=True)).mean())

    def on_train_batch_end(self, *args: Any) -> None:
        for target, values in zip(self.target.parameters(), self.values.parameters(), strict=True):
            target.data.mul_(0.5).add_(values.data, alpha=0.5)


class ProximalPolicy(L.LightningModule):
    """An actor and its critic, several epochs over what was done (Schulman et al. 2017), by manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = _perceptron(8, 4), _perceptron(8, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        states, rewards = batch
        with torch.no_grad():
            chances = F.log_softmax(self.actor(states), 1)
            actions = chances.exp().multinomial(1)
            before, returns = chances.gather(1, actions), rewards.gather(1, actions)
            advantages = returns - self.critic(states)
        for _ in range(2):
            for rows in torch.randperm(len(states), device=states.device).chunk(2):
                chances = F.log_softmax(self.actor(states[rows]), 1)
                ratio = (chances.gather(1, actions[rows]) - before[rows]).exp()
                gain = torch.minimum(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows]).mean()
                entropy = -(chances.exp() * chances).sum(1).mean()
                loss = F.mse_loss(self.critic(states[rows]), returns[rows]) - gain - 0.01 * entropy
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
        self.log("loss", loss.detach(), on_step=True, on_epoch=True)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.critic(batch[0]), batch[1].mean(1, keepdim=True)))


class Mixup(Trained):
    """Mixes each sample with another before the blocks, and the losses after them (Zhang et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, WIDTH), *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in "abc")
        )
        self.head = nn.Linear(WIDTH, 4)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, targets = batch
        rows = torch.randperm(len(x), device=x.device) if self.training else torch.arange(len(x), device=x.device)
        output = self.head(self.layers(0.7 * x + 0.3 * x[rows]))
        return 0.7 * F.mse_loss(output, targets) + 0.3 * F.mse_loss(output, targets[rows].flip(1))


def _joined(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Of each sample a ring of as many nodes as its place and two, which are shares of it."""
    sizes = [2 + i % 3 for i in range(len(samples))]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    rings = [torch.arange(size) for size in sizes]
    return {
        "nodes": torch.cat([x.expand(size, 8) / size for (x, _), size in zip(samples, sizes, strict=True)]),
        "edges": torch.cat([torch.stack([r, r.roll(1)]) + start for r, start in zip(rings, starts, strict=True)], 1),
        "graph": torch.cat([torch.full((size,), i) for i, size in enumerate(sizes)]),
        "targets": torch.stack([targets for _, targets in samples]),
    }


class Penalties(Trained):
    """Goes by the parameters themselves, and by what a block gave: their sizes, a decay by hand, their values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8)) for _ in "abc")
        )

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        first, *others = self.layers.parameters()
        if self.training:
            for weight in others[:3]:
                weight.data = weight.data * 0.99
                weight.data.sub_(1e-3 * weight.detach().sign())
        large = max(float(parameter.detach().abs().max()) for parameter in (first, *others))
        x = self.layers(batch[0])
        sizes = sum(parameter.abs().sum() for parameter in self.layers.parameters())
        turned = first.T @ first - torch.eye(8, device=x.device, dtype=x.dtype)
        flat = nn.utils.parameters_to_vector(self.layers[-1].parameters())
        penalty = 1e-3 * (sizes + turned.square().sum()) + 0.01 * large * flat.norm()
        return F.mse_loss(x[:, :4] * (1 + int(x.sum()) % 2), batch[1]) + penalty


class FewSteps(Trained):
    """Learns from what its weights give once they have learned from other samples of the batch (Finn et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
        )
        self.rates = nn.ParameterList(nn.Parameter(torch.tensor(0.1)) for _ in self.layers.parameters())

    def _error(self, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.func.functional_call(self.layers, weights, (x,)), y)

    def _learned(self, x: Tensor, y: Tensor, others: Tensor, wanted: Tensor) -> Tensor:
        weights = dict(self.layers.named_parameters())
        slopes = torch.func.grad(self._error)(weights, x, y)
        steps = {name: slopes[name] * rate for name, rate in zip(weights, self.rates, strict=True)}
        return self._error({name: weight - steps[name] for name, weight in weights.items()}, others, wanted)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = (tensor.unflatten(0, (len(tensor) // 2, 2)) for tensor in batch)
        return torch.vmap(self._learned)(x, y, x.roll(1, 0), y.roll(1, 0)).mean()


def _with_one_replica(layout: Layout) -> bool:
    return layout.dp == 1


MODELS = {
    "penalised": Model(
        job=small_job(Penalised, features), runs_inline=True, lr=0.03, fits=lambda layout: layout.tp == 1
    ),
    "heat-equation": Model(
        job=small_job(HeatEquation, features),
        runs_inline=True,
        lr=0.03,
        families=frozenset({"pp"}),
        fits=lambda layout: layout.tp == 1,
    ),
    "reversible": Model(
        job=small_job(Reversible, features),
        runs_inline=True,
        lr=0.03,
        families=frozenset({"pp"}),
        fits=lambda layout: layout.tp == 1,
    ),
    "quantised": Model(job=small_job(Quantised, features), runs_inline=True, lr=0.03, has_plain_step=False),
    "balanced": Model(
        job=small_job(Balanced, features),
        runs_inline=True,
        lr=0.03,
        has_plain_step=False,
        families=frozenset({"pp"}),
        fits=lambda layout: layout.dp == layout.tp == 1,
    ),
    "reading": Model(job=small_job(Reading, features), runs_inline=True, lr=0.03, fits=_with_one_replica),
    "carrying": Model(
        job=small_job(Carrying, features), fits=_with_one_replica, warns=("How what ",), skips=frozenset({"plain"})
    ),
    "deep-q": Model(
        job=small_job(DeepQ, features),
        runs_inline=True,
        lr=0.03,
        fits=_with_one_replica,
        skips=frozenset({"resumed", "resumed-folder", "offloaded-resumed"}),  # checkpoints lack what it remembers
    ),
    "proximal-policy": Model(
        job=small_job(ProximalPolicy, features),
        runs_inline=True,
        lr=0.03,
        fits=_with_one_replica,
        has_plain_step=False,
        skips=frozenset({"clipped-values", "budget"}),  # Lightning clips nothing of a step by hand; it is not traced
    ),
    "penalties": Model(job=small_job(Penalties, features), runs_inline=True, lr=0.03, families=frozenset({"pp"})),
    "few-steps": Model(
        job=small_job(FewSteps, features),
        runs_inline=True,
        skips=frozenset({"calls"}),  # a call between steps, of blocks inside of a transform, is refused
        lr=0.03,
        families=frozenset({"pp"}),
        fits=lambda layout: layout.dp == layout.tp == 1,
    ),
    "mixup": Model(job=small_job(Mixup, features), fits=_with_one_replica, families=frozenset({"pp"})),
    "graphs": Model(
        job=small_job(Graphs, features, collate=_joined), runs_inline=True, lr=0.03, fits=_with_one_replica
    ),
}
