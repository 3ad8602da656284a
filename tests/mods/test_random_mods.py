"""Models put together at random: what Mods make of them is what docs/mods.md says, worked out here from the steps alone."""

import copy
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import loka

WIDTH = 260  # two blocks
MODS = ["block_norm", "hard_swish", "insert_norm", "no_bias"]
MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "layer norm": lambda: nn.LayerNorm(WIDTH, eps=0.5),
    "rms norm": lambda: nn.RMSNorm(WIDTH, eps=0.1),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "dropout": lambda: nn.Dropout(0.0),
}
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, other: x + other,
    "half": lambda x, _: x / 2,
    "tanh": lambda x, _: x.tanh(),
    "again": lambda _, other: other.clone(),
}
LEARNED = ("linear", "without bias", "layer norm", "rms norm")
MAKES_NEW = (*LEARNED, "silu", "gelu", "tanh")  # what is in front of these is no prediction; a sigmoid belongs to one
USUAL = [["linear", "silu", "linear"], ["linear", "layer norm", "silu"], ["linear", "sigmoid", "again"], ["linear", "again"]]
STEPS = st.one_of(st.sampled_from(USUAL), st.sampled_from([*MODULES, *FUNCTIONS]).map(lambda name: [name]))
Step = tuple[str, int, bool]  # what is done, with which of the tensors so far, and by a module that others use too


@st.composite
def random_steps(draw: st.DrawFn) -> list[Step]:
    names = [name for group in draw(st.lists(STEPS, min_size=2, max_size=5)) for name in group]
    return [(name, draw(st.integers(0, 9)), draw(st.integers(0, 2)) == 0) for name in names]


def reads_of(steps: list[Step]) -> list[set[int]]:
    """The tensors that each step reads. The first is the model's input, and every step makes the next."""
    others = [which % (i + 1) for i, (_, which, _) in enumerate(steps)]
    return [{"add": {i, others[i]}, "again": {others[i]}}.get(name, {i}) for i, (name, _, _) in enumerate(steps)]


class Random(nn.Module):
    """Gives what its head makes of the last tensor, and all that no step reads. Two of its layers may have one bias."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps, self.unread = steps, sorted(set(range(len(steps))).difference(*reads_of(steps)))
        self.own = nn.ModuleDict({str(i): MODULES[name]() for i, (name, _, _) in enumerate(steps) if name in MODULES})
        self.shared = nn.ModuleDict({name: make() for name, make in MODULES.items()})
        self.head = nn.Linear(WIDTH, 1)
        for layer in self.own.values():
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                self.shared["linear"].bias = layer.bias

    def name_of(self, i: int) -> str:
        name, _, is_shared = self.steps[i]
        return f"shared.{name}" if is_shared else f"own.{i}"

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = [x]
        for i, (name, which, _) in enumerate(self.steps):
            if name in FUNCTIONS:
                made.append(FUNCTIONS[name](made[-1], made[which % len(made)]))
            else:
                made.append(self.get_submodule(self.name_of(i))(made[-1]))
        return self.head(made[-1]), *(made[tensor] for tensor in self.unread)


def layers_that_lose_their_bias(model: Random) -> set[str]:
    """Those that every time read something learned, are read by a layer, a norm or an activation, and are no output."""
    reads = reads_of(model.steps)
    is_learned = [False]
    for (name, _, _), of_step in zip(model.steps, reads, strict=True):
        is_learned.append(name in LEARNED or any(is_learned[read] for read in of_step))

    def is_read(tensor: int) -> bool:
        behind = [i for i, of_step in enumerate(reads) if tensor in of_step]
        by_the_head = tensor == len(model.steps)
        return by_the_head or any(model.steps[i][0] in MAKES_NEW or is_read(i + 1) for i in behind)

    def is_output(tensor: int) -> bool:
        alone = [i for i, of_step in enumerate(reads) if of_step == {tensor} and model.steps[i][0] not in MAKES_NEW]
        return tensor in model.unread or any(is_output(i + 1) for i in alone)

    layers: dict[str, bool] = {}
    for i, (name, _, _) in enumerate(model.steps):
        if name == "linear":
            loses = is_learned[i] and is_read(i + 1) and not is_output(i + 1)
            layers[model.name_of(i)] = layers.get(model.name_of(i), True) and loses
    return {layer for layer, loses in layers.items() if loses}


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = function


def block_rms(eps: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat(
        [part / (part.square().mean(-1, keepdim=True) + eps).sqrt() for part in x.split(WIDTH // 2, -1)], -1
    )


def changed_by_hand(model: Random, mods: list[str], normed: list[str]) -> Random:
    """As the table of docs/mods.md says. In front of which activations ``insert_norm`` puts a norm is not worked out."""
    model = copy.deepcopy(model)
    for layer in layers_that_lose_their_bias(model) if "no_bias" in mods else ():
        model.get_submodule(layer).bias = None
    for table in (model.own, model.shared):
        for name, module in table.items():
            now: nn.Module = module
            if isinstance(module, nn.LayerNorm | nn.RMSNorm) and "block_norm" in mods:
                now = Calls(block_rms(module.eps or 0.0))
            elif isinstance(module, nn.LayerNorm) and "no_bias" in mods:
                module.bias = None
            elif isinstance(module, nn.SiLU) and "hard_swish" in mods:
                now = Calls(lambda x: x * (x + 3).clamp(0, 6) / 6)
            if f"{'own' if table is model.own else 'shared'}.{name}" in normed:
                now = nn.Sequential(Calls(block_rms(1e-5)), now)
            table[name] = now
    return model


@settings(max_examples=100)
@given(steps=random_steps(), mods=st.sets(st.sampled_from(MODS), min_size=2).map(sorted), is_run=st.booleans())
def test_mods_do_what_they_say_and_no_more(steps: list[Step], mods: list[str], is_run: bool) -> None:
    torch.manual_seed(0)
    model, x = Random(steps).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm)):
        for parameter in norm.parameters():
            nn.init.constant_(parameter, 0.3)
    before, example = copy.deepcopy(model), (x,) if is_run else None
    optimizer = torch.optim.Adam(model.parameters())
    promised = loka.apply_mods(model, mods, example=example, dry_run=True)
    assert repr(model) == repr(before)
    report = loka.apply_mods(model, mods, example=example, optimizer=optimizer)
    assert (report.changes, report.left_alone) == (promised.changes, promised.left_alone)
    normed = [change.name for change in report.changes if change.mod == "insert_norm"]
    expected = changed_by_hand(before, mods, normed)
    torch.testing.assert_close(model(x), expected(x), rtol=1e-9, atol=1e-9)
    assert model.state_dict().keys() == expected.state_dict().keys()
    left = list(model.parameters())
    assert report.n_removed == sum(p.numel() for p in before.parameters()) - sum(p.numel() for p in left)
    assert set(map(id, optimizer.param_groups[0]["params"])) == set(map(id, left))
    assert not loka.apply_mods(model, mods, example=example).changes
