"""Reinforcement learning with memory: recurrent PPO on a task whose relevant observation is seen only once.

Each episode begins with a cue; many steps later a signal asks which cue it was.  Rollouts are collected step by step
with ``ostinato.Stepper``; training runs over whole rollouts, in which episodes end, with ``resets``.  For comparison,
``torch.nn``'s layers, which have no resets, run in a loop over time that masks their state.
"""

import time

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

import ostinato

ENVS, STEPS = 32, 128  # per rollout
EPOCHS, MINIBATCHES = 4, 2
GAMMA, LAMBDA, CLIP, ENTROPY, LEARNING_RATE = (
    0.0,
    0.9,
    0.2,
    0.01,
    3e-3,
)  # GAMMA is 0 as no action changes what comes after it
WIDTH = 64


class Recall(gymnasium.vector.VectorEnv):
    """Shows a cue at the first step, then noise, and asks at the last step which cue it was; the reward is 1 if right.

    Observations are the cue (one-hot), the question (0 or 1), and a random number.  A new episode begins in the same
    step in which the previous one ends.
    """

    def __init__(self, num_envs: int, cues: int = 4, delay: tuple[int, int] = (6, 12)) -> None:
        self.num_envs, self.cues, self.delay = num_envs, cues, delay
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (cues + 2,), np.float32)
        self.single_action_space = spaces.Discrete(cues)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.random = np.random.default_rng(seed)
        self.cue, self.left = np.zeros((2, self.num_envs), np.int64)
        return self._observe(np.ones(self.num_envs, bool)), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        done = self.left == 0
        rewards = (done & (actions == self.cue)).astype(np.float32)
        self.left -= 1
        return self._observe(done), rewards, done, np.zeros_like(done), {}

    def _observe(self, begins: np.ndarray) -> np.ndarray:
        self.cue[begins] = self.random.integers(self.cues, size=begins.sum())
        self.left[begins] = self.random.integers(*self.delay, size=begins.sum())
        observation = np.zeros((self.num_envs, self.cues + 2), np.float32)
        observation[begins, self.cue[begins]] = 1
        observation[:, -2] = self.left == 0
        observation[:, -1] = self.random.standard_normal(self.num_envs)
        return observation


class OurPolicy(nn.Module):
    """Computes the actions' logits and a value at every step, with one of our layers as the memory."""

    def __init__(self, layer: type[nn.Module], inputs: int, actions: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(inputs, WIDTH), nn.Tanh(), layer(WIDTH, WIDTH), nn.Linear(WIDTH, actions + 1)
        )
        self.stepper = ostinato.Stepper(self.network, ENVS)

    def step(self, x: Tensor, begins: Tensor) -> Tensor:
        self.stepper.reset(begins)
        return self.stepper(x)

    @property
    def state(self) -> Tensor | tuple[Tensor, ...]:
        return self.stepper.state[2]

    def forward(self, x: Tensor, state: Tensor | tuple[Tensor, ...], begins: Tensor) -> Tensor:
        inner, squash, memory, heads = self.network
        return heads(memory(squash(inner(x)), state, resets=begins)[0])


class TorchPolicy(nn.Module):
    """The same policy with a layer of ``torch.nn``."""

    def __init__(self, layer: type[nn.Module], inputs: int, actions: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(inputs, WIDTH), nn.Tanh(), layer(WIDTH, WIDTH), nn.Linear(WIDTH, actions + 1)
        )
        zeros = torch.zeros(1, ENVS, WIDTH)
        self.state = (zeros, zeros) if layer is nn.LSTM else zeros

    @torch.no_grad()
    def step(self, x: Tensor, begins: Tensor) -> Tensor:
        inner, squash, memory, heads = self.network
        y, self.state = memory(squash(inner(x))[None], masked(self.state, begins))
        return heads(y[0])

    def forward(self, x: Tensor, state: Tensor | tuple[Tensor, ...], begins: Tensor) -> Tensor:
        inner, squash, memory, heads = self.network
        outputs = []
        for x_t, begins_t in zip(squash(inner(x)), begins, strict=True):
            y, state = memory(x_t[None], masked(state, begins_t))
            outputs.append(y)
        return heads(torch.cat(outputs))


def masked(state: Tensor | tuple[Tensor, ...], begins: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Set the state to zero where an episode begins."""
    keep = ~begins[:, None]
    return tuple(s * keep for s in state) if isinstance(state, tuple) else state * keep


def of_environments(state: Tensor | tuple[Tensor, ...], which: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Select the states of some environments."""
    return tuple(s[:, which] for s in state) if isinstance(state, tuple) else state[:, which]


def advantages(rewards: Tensor, values: Tensor, begins: Tensor) -> Tensor:
    """Estimate generalised advantages; ``values`` and ``begins`` have one step more than ``rewards``."""
    result, later = torch.zeros_like(rewards), torch.zeros(ENVS)
    for t in reversed(range(len(rewards))):
        continues = (~begins[t + 1]).float()
        delta = rewards[t] + GAMMA * continues * values[t + 1] - values[t]
        result[t] = later = delta + GAMMA * LAMBDA * continues * later
    return result


def train(policy: OurPolicy | TorchPolicy, env: Recall, updates: int) -> tuple[list[float], float]:
    """Train, and return the share of right answers in each rollout and the environment steps per CPU second."""
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE)
    observation, begins = torch.from_numpy(env.reset(seed=0)[0]), torch.ones(ENVS, dtype=torch.bool)
    curve, start = [], time.process_time()
    for _ in range(updates):
        state, steps = policy.state, []
        for _ in range(STEPS):
            output = policy.step(observation, begins)
            chances = torch.distributions.Categorical(logits=output[:, :-1])
            action = chances.sample()
            after, reward, done, _, _ = env.step(action.numpy())
            steps.append(
                (observation, begins, action, chances.log_prob(action), output[:, -1], torch.from_numpy(reward))
            )
            observation, begins = torch.from_numpy(after), torch.from_numpy(done)
        x, marks, actions, log_probs, values, rewards = map(torch.stack, zip(*steps, strict=True))
        # The value after the last step is taken to be that of the last step: a rollout truncates few episodes.
        gains = advantages(rewards, torch.cat([values, values[-1:]]), torch.cat([marks, begins[None]]))
        targets = gains + values
        curve.append((rewards.sum() / (marks[1:].sum() + begins.sum())).item())

        for _ in range(EPOCHS):
            for which in torch.randperm(ENVS).chunk(MINIBATCHES):
                output = policy(x[:, which], of_environments(state, which), marks[:, which])
                chances = torch.distributions.Categorical(logits=output[..., :-1])
                ratio = (chances.log_prob(actions[:, which]) - log_probs[:, which]).exp()
                gain = gains[:, which]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
                value_loss = (output[..., -1] - targets[:, which]).square().mean()
                loss = value_loss / 2 - surrogate - ENTROPY * chances.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()
    return curve, updates * STEPS * ENVS / (time.process_time() - start)


def main(updates: int = 60, picture: str | None = "reinforcement.png") -> dict[str, tuple[list[float], float]]:
    """Return for each policy what :func:`train` returns."""
    results = {}
    policies = [
        (OurPolicy, ostinato.MinGRU),
        (OurPolicy, ostinato.GRU),
        (TorchPolicy, nn.GRU),
        (TorchPolicy, nn.LSTM),
    ]
    for policy_type, layer in policies:
        torch.manual_seed(0)
        env = Recall(ENVS)
        policy = policy_type(layer, env.single_observation_space.shape[0], int(env.single_action_space.n))
        curve, speed = train(policy, env, updates)
        name = f"{'ostinato' if policy_type is OurPolicy else 'torch.nn'}.{layer.__name__}"
        results[name] = curve, speed
        print(f"{name:16} answers rightly {np.mean(curve[-5:]):4.0%}   {speed:7,.0f} steps a second")
    if picture is not None:
        import matplotlib.pyplot as plt

        for name, (curve, _) in results.items():
            plt.plot(np.arange(1, updates + 1) * STEPS * ENVS, curve, label=name)
        plt.xlabel("environment steps")
        plt.ylabel("questions answered rightly")
        plt.legend()
        plt.savefig(picture)
        print(f"the curves are in {picture}")
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)  # a step is too small for several threads
    main()
