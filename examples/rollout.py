"""Park the training state while a model generates, as loops of reinforcement learning do.

    python examples/rollout.py

The state leaves the GPU before each rollout, so an inference engine can have its memory, and the next step brings it
back. On a CPU both are in the same memory, and the loop is the same.
"""

import torch
from torch import nn

import zero

VOCAB, LENGTH = 16, 12


def policy() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, VOCAB))


@torch.no_grad()
def generate(weights: dict[str, torch.Tensor], rows: int) -> torch.Tensor:
    """Stand in for an inference engine: return (rows, LENGTH) tokens from a copy of the policy."""
    model = policy()
    model.load_state_dict(weights)
    tokens = torch.randint(0, VOCAB, (rows, 1))
    for _ in range(LENGTH - 1):
        following = torch.distributions.Categorical(logits=model(tokens[:, -1])).sample()
        tokens = torch.cat([tokens, following[:, None]], dim=1)
    return tokens


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of REINFORCE with a reward for each token that follows the one before it."""
    reward = (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCAB).float()
    log_probability = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return -((reward - reward.mean()) * log_probability).mean()


def main() -> None:
    torch.manual_seed(0)
    plan = zero.Plan(policy(), optimizer=zero.adamw(3e-3), world=zero.open_world(), stage=3)
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, loss_fn, retry=True)
    weights = dict(zero.stream_weights(state))
    for number in range(60):
        zero.move(state, offload="parked")
        tokens = generate(weights, rows=64)
        state, metrics = step(state, [tokens.to(plan.world.device)])
        weights = dict(zero.stream_weights(state))
        if number % 20 == 19:
            right = (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCAB).float().mean()
            print(f"step {number + 1}  loss {metrics.loss:.4f}  right {right:.2f}")
    state.close()


if __name__ == "__main__":
    main()
