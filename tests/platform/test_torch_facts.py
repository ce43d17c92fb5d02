"""Facts of torch that the engine relies on, and traps that it avoids: if one changes, read its user again."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

hooks = torch.autograd.graph.saved_tensors_hooks


def test_functional_call_gives_plain_tensors_and_keeps_buffers_live():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("replaced", torch.zeros(()))

        def forward(self) -> bool:
            self.calls += 1
            self.replaced = self.replaced + 1
            return isinstance(self.weight, nn.Parameter)

    module = Counts()
    assert functional_call(module, {"weight": torch.zeros(1)}, ()) is False
    assert (module.calls.item(), module.replaced.item()) == (1, 1)


def test_moving_to_meta_unties_weights():
    """So ties are recorded before anything moves."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model.to("meta")
    assert model[1].weight is not model[0].weight


def test_only_the_innermost_hooks_are_asked():
    """So ours are not pushed inside a checkpoint, which they would defeat."""
    asked = []

    def asking(name: str) -> hooks:
        return hooks(lambda tensor: asked.append(name) or tensor, lambda tensor: tensor)

    x = torch.ones(2, requires_grad=True)
    with asking("outer"), asking("inner"):
        x.square()
    assert asked == ["inner"]


def test_hooks_switch_version_checks_off():
    """So the engine checks what it keeps, and counts versions of units."""
    x = torch.ones(2, requires_grad=True)
    seen: list[tuple[Tensor, int]] = []
    with hooks(lambda tensor: seen.append((tensor, tensor._version)) or tensor, lambda tensor: tensor):
        y = x * 2
        z = y.square()
    with torch.no_grad():
        y.fill_(100.0)
    z.sum().backward()
    assert x.grad.tolist() == [400.0, 400.0], "wrong, and nobody says so"
    assert any(tensor._version != version for tensor, version in seen), "but the count goes on"


def test_a_checkpoint_inside_a_call_recomputes_when_the_slots_are_empty_again():
    """So an absent parameter gives its view back while backward runs."""
    module = nn.Linear(2, 2)
    seen = []

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = module

        def forward(self, x: Tensor) -> Tensor:
            def part(y: Tensor) -> Tensor:
                seen.append(self.linear.weight)
                return torch.tanh(self.linear(y))

            return checkpoint(part, x, use_reentrant=False)

    given = torch.ones(2, 2, requires_grad=True)
    functional_call(Inside(), {"linear.weight": given}, (torch.ones(2, requires_grad=True),)).sum().backward()
    assert seen[0] is given
    assert seen[1] is module.weight


def test_a_storage_counts_who_looks_at_it():
    """Views count, and stop counting when they go: this is how the pool knows that a buffer is still seen."""
    flat = torch.zeros(4)
    storage = flat.untyped_storage()
    alone = torch._C._storage_Use_Count(storage._cdata)
    view = flat[1:].view(3, 1).detach()
    assert torch._C._storage_Use_Count(storage._cdata) == alone + 1
    del view
    assert torch._C._storage_Use_Count(storage._cdata) == alone


def test_autograd_tells_which_nodes_a_pass_will_run():
    """So a unit that only the gradient of an input needs is let go at once."""
    assert torch._C._current_graph_task_id() == -1
    told = []
    x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    made = w * 1
    y = x * made
    y.register_hook(lambda grad: told.append(torch._C._will_engine_execute_node(made.grad_fn)))
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    y.sum().backward()
    assert told == [False, True]
