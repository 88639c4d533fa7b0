"""Recurrent PPO: our example, and sb3-contrib's with layers of ours as its memory."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ostinato

gymnasium = pytest.importorskip("gymnasium")
EXAMPLE = Path(__file__).parents[1] / "examples" / "reinforcement.py"


@pytest.fixture(autouse=True)
def one_thread():
    """As is fastest for layers this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def example():
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def test_the_example_runs(example, capsys):
    with torch.random.fork_rng():
        example.main(1, None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ostinato.MinGRU", "ostinato.GRU", "torch.nn.GRU", "torch.nn.LSTM"]


def test_resets_and_steps_train_as_a_masked_loop_does(example):
    """The same rewards, and after the update the same weights."""
    results = []
    for kind, layer in ((example.OurPolicy, ostinato.GRU), (example.TorchPolicy, nn.GRU)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            env = example.Recall(example.ENVS)
            policy = kind(layer, env.single_observation_space.shape[0], 4)
            curve, _ = example.train(policy, env, 2)
        results.append((curve, list(policy.network.parameters())))
    (ours, our_weights), (theirs, their_weights) = results
    assert ours == theirs
    for one, other in zip(our_weights, their_weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-4)  # Adam makes large of small differences


class Memory(ostinato.MinGRU):
    """With the state that sb3-contrib expects: two tensors, the second unused."""

    def forward(self, x, state, resets=None):
        h, c = state
        y, h = super().forward(x, h, resets=resets)
        return y, (h, c)


def policy_with_resets(policies):
    class Policy(policies.RecurrentActorCriticPolicy):
        @staticmethod
        def _process_sequence(features, states, episode_starts, memory):
            sequences = states[0].shape[1]
            x = features.view(sequences, -1, memory.input_size).transpose(0, 1)
            resets = episode_starts.view(sequences, -1).transpose(0, 1) > 0
            y, states = memory(x, states, resets=resets)
            return y.transpose(0, 1).flatten(0, 1), states

    return Policy


def learn(monkeypatch, layer, policy="MlpLstmPolicy", steps=256):
    """The trained policy of sb3-contrib's RecurrentPPO, with a layer in the place of torch's LSTM, and its rewards."""
    sb3 = pytest.importorskip("sb3_contrib")
    pytest.importorskip("stable_baselines3")
    rewards = []
    with torch.random.fork_rng(), monkeypatch.context() as patch:
        patch.setattr(nn, "LSTM", layer)
        agent = sb3.RecurrentPPO(
            policy,
            "CartPole-v1",
            n_steps=128,
            batch_size=64,
            n_epochs=2,
            seed=0,
            policy_kwargs={"lstm_hidden_size": 32, "enable_critic_lstm": False, "shared_lstm": True},
            device="cpu",
        )
        agent.learn(steps, callback=lambda local, _: rewards.append(float(local["rewards"][0])) or True)
    return agent.policy, rewards


def test_recurrent_ppo_with_our_lstm_is_the_same(monkeypatch):
    pytest.importorskip("sb3_contrib")
    (ours, our_rewards), (theirs, their_rewards) = (learn(monkeypatch, kind) for kind in (ostinato.LSTM, nn.LSTM))
    assert type(ours.lstm_actor) is ostinato.LSTM
    assert our_rewards == their_rewards
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-4)


def test_recurrent_ppo_with_a_minimal_layer(monkeypatch):
    """One pass over a sequence in which episodes end equals sb3-contrib's loop over time."""
    policies = pytest.importorskip("sb3_contrib.common.recurrent.policies")
    policy_class = policy_with_resets(policies)
    policy, rewards = learn(monkeypatch, Memory, policy_class)
    assert len(rewards) == 256
    torch.manual_seed(0)
    features, starts = torch.randn(3 * 8, policy.lstm_actor.input_size), (torch.rand(3 * 8) < 0.3).float()
    states = torch.randn(1, 3, 32), torch.zeros(1, 3, 32)
    ours = policy_class._process_sequence(features, states, starts, policy.lstm_actor)
    loop = policies.RecurrentActorCriticPolicy._process_sequence(features, states, starts, policy.lstm_actor)
    torch.testing.assert_close(ours, loop, rtol=0, atol=1e-6)
