"""As Lightning's example of reinforcement learning: data that the model itself makes while it is trained."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.examples.place import Outcome, Place, outcome

NUM_ACTIONS, NUM_OBSERVED = 2, 4


class World:
    """A state that turns and is pushed; an episode ends where it is far out or after 20 steps."""

    def __init__(self) -> None:
        self.state = [0.1, 0.0, -0.1, 0.2]
        self.age = 0

    def reset(self) -> list[float]:
        self.state, self.age = [0.1, 0.0, -0.1, 0.2], 0
        return self.state

    def step(self, action: int) -> tuple[list[float], float, bool]:
        a, b, c, d = self.state
        push = 0.2 if action == 1 else -0.2
        self.state = [a + 0.1 * b, b + push, c + 0.1 * d, d - push + 0.1 * a]
        self.age += 1
        return self.state, 1.0 - abs(self.state[0]), abs(self.state[1]) > 1.0 or self.age >= 20


class Experience(NamedTuple):
    state: list[float]
    action: int
    reward: float
    done: bool
    new_state: list[float]


class ReplayBuffer:
    def __init__(self, capacity: int) -> None:
        self.buffer: deque[Experience] = deque(maxlen=capacity)

    def sample(self, batch_size: int) -> tuple[Tensor, ...]:
        indices = random.sample(range(len(self.buffer)), batch_size)
        states, actions, rewards, dones, new = zip(*(self.buffer[i] for i in indices), strict=True)
        return (
            torch.tensor(states),
            torch.tensor(actions),
            torch.tensor(rewards, dtype=torch.float32),
            torch.tensor(dones, dtype=torch.bool),
            torch.tensor(new),
        )


class Replays(IterableDataset[tuple[Tensor, ...]]):
    def __init__(self, buffer: ReplayBuffer, sample_size: int) -> None:
        self.buffer, self.sample_size = buffer, sample_size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        yield from zip(*self.buffer.sample(self.sample_size), strict=True)


class Agent:
    def __init__(self, world: World, buffer: ReplayBuffer) -> None:
        self.world, self.buffer = world, buffer
        self.state = self.world.reset()
        self.num_played = 0

    @torch.no_grad()
    def play_step(self, net: nn.Module, epsilon: float) -> tuple[float, bool]:
        self.num_played += 1
        if (self.num_played * 37 % 100) / 100 < epsilon:  # in place of random numbers
            action = self.num_played * 7 % 5 % NUM_ACTIONS
        else:
            action = int(torch.max(net(torch.tensor([self.state])), dim=1)[1].item())
        new, reward, done = self.world.step(action)
        self.buffer.buffer.append(Experience(self.state, action, reward, done, new))
        self.state = self.world.reset() if done else new
        return reward, done


class QNet(nn.Module):
    def __init__(self, hidden_size: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(NUM_OBSERVED, hidden_size), nn.ReLU(), nn.Linear(hidden_size, NUM_ACTIONS))

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.net(x.float())
        return values


class QLearning(L.LightningModule):
    """Plays in its training step, and copies its weights into a target network there."""

    def __init__(self, sync_rate: int = 2, lr: float = 1e-2, batch_size: int = 4) -> None:
        super().__init__()
        self.sync_rate, self.lr, self.batch_size = sync_rate, lr, batch_size
        self.net, self.target_net = QNet(), QNet()
        self.buffer = ReplayBuffer(50)
        self.agent = Agent(World(), self.buffer)
        self.total_reward = self.episode_reward = 0.0
        for _ in range(50):
            self.agent.play_step(self.net, epsilon=1.0)

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.net(x)
        return values

    def training_step(self, batch: tuple[Tensor, ...], nb_batch: int) -> Any:
        states, actions, rewards, dones, new_states = batch
        epsilon = max(0.01, 1.0 - (self.global_step + 1) / 10)
        reward, done = self.agent.play_step(self.net, epsilon)
        self.episode_reward += reward
        values = self.net(states).gather(1, actions.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(new_states).max(1)[0]
            next_values[dones] = 0.0
            next_values = next_values.detach()
        loss = nn.MSELoss()(values, next_values * 0.99 + rewards)
        if done:
            self.total_reward, self.episode_reward = self.episode_reward, 0.0
        if self.global_step % self.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"reward": torch.tensor(reward), "total_reward": torch.tensor(self.total_reward)}, prog_bar=True)
        self.log("steps", torch.tensor(float(self.global_step)), logger=False, prog_bar=True)
        return {"loss": loss}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(self.net.parameters(), lr=self.lr, eps=1e-3)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Replays(self.buffer, 20), batch_size=self.batch_size, sampler=None)


def q_learning(place: Place) -> Outcome:
    trainer = place.trainer(max_epochs=3)
    module = QLearning()
    trainer.fit(module)
    played = [experience.action for experience in module.buffer.buffer]
    return outcome(trainer, {"actions": played, "reward": module.total_reward})
