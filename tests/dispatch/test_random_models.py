"""Models put together at random: whatever blocks and chains are found, planned and fused, the model computes what it did.

The kernels cannot run here: blocks compute by their high-precision reference, so that any difference is of what was fused.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import plan_for
from torch import Tensor, nn
from torch.nn import functional as F

import loka
from loka.core.errors import KernelUnavailable
from loka.core.estimate import Estimate
from loka.core.gemm import Role
from loka.core.plan import BlockPlan, Goal
from loka.core.recipe import Format
from loka.core.record import Record
from loka.core.site_record import SiteRecord
from loka.core.survey import BlockCandidate, Candidate, SiteSurvey, Survey, SurveyDocument
from loka.dispatch.apply import give_back
from loka.kernels.executor import SiteKernels
from loka.measure.block import _may_be_block, block_shape
from loka.measure.block_parts import build_block
from loka.nn.fused_block import FusedBlock
from loka.nn.fused_spec import BlockSpec
from loka.planner.plan import make_plan

ROWS, WIDTH = 8, 16
MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: loka.BlockNorm(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "hard swish": nn.Hardswish,
    "dropout": lambda: nn.Dropout(0.0),
    "identity": nn.Identity,
}
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "F.relu": lambda x, _: F.relu(x),
    "F.relu in place": lambda x, _: F.relu(x, inplace=True),
    "relu_": lambda x, _: x.relu_(),
    "F.layer_norm": lambda x, _: F.layer_norm(x, (WIDTH,)),
    "add": lambda x, other: x + other,
    "add in place": lambda x, other: x.add_(other),
    "again": lambda _, other: other,
    "shape": lambda x, _: x.reshape(2, -1, WIDTH).flatten(0, 1),
    "order": lambda x, _: x.flip(1),
    "halves": lambda x, other: torch.cat([x[:, : WIDTH // 2], other[:, WIDTH // 2 :]], 1),
    "by rows": lambda x, _: torch.vmap(torch.tanh)(x),
    "by a view": lambda x, _: (x.view(-1).mul_(0.5), x)[1],
}
KEEPS = ("kept", "beside")  # the tensor is in an attribute, and in the output
BY_WEIGHT = "by its weight"  # through a layer, past its module
# A layer with what a block may absorb, more often than chance would put it together.
USUAL = [
    ["linear", "norm", "hard swish"],
    ["linear", "norm", "relu"],
    ["linear", "norm", "F.relu"],
    ["linear", "norm"],
    ["linear", "relu"],
    ["order", "norm", "linear", "norm", "relu"],
]
STEPS = st.one_of(st.sampled_from(USUAL), st.sampled_from([*MODULES, *FUNCTIONS, *KEEPS]).map(lambda name: [name]))
Step = tuple[str, int, bool]  # what is done, with which of the tensors so far, and by a module that others use too


class Random(nn.Module):
    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps, self.kept = steps, None
        self.own = nn.ModuleDict({str(i): MODULES[name]() for i, (name, _, _) in enumerate(steps) if name in MODULES})
        self.shared = nn.ModuleDict({name: make() for name, make in MODULES.items()})
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        made, beside = [x], x.new_zeros(())
        for i, (name, which, is_shared) in enumerate(self.steps):
            x = made[-1]
            if name in MODULES:
                x = self.shared[name](x) if is_shared else self.own[str(i)](x)
            elif name == "kept":
                self.kept = x
            elif name == "beside":
                beside = beside + x.sin().mean()
            elif name == BY_WEIGHT:
                x = F.linear(x, self.shared["linear"].weight)  # type: ignore[arg-type]
            else:
                x = FUNCTIONS[name](x, made[which % len(made)])
            made.append(x)
        return self.head(made[-1]) + beside


@st.composite
def random_steps(draw: st.DrawFn) -> list[Step]:
    names = [name for group in draw(st.lists(STEPS, min_size=2, max_size=7)) for name in group]
    return [(name, draw(st.integers(0, 9)), draw(st.integers(0, 5)) == 0) for name in names]


def outcome(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output and all gradients, from x on."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x * 1)
    y.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **gradients}


def blocks_planned(record: Record) -> dict[str, BlockPlan]:
    """Those that the planner chooses where every block, and FP8 between them, is faster than anything else."""
    high = tuple(Candidate("torch.fp32", role, "fp32", forms=("fp32", "fp32"), gemm_us={ROWS: 100.0}) for role in Role)
    sites = tuple(
        SiteSurvey(
            site=site.name, k=site.k, n=site.n, has_bias=site.has_bias, is_head=site.is_head, calls=site.calls,
            baseline="torch.fp32", candidates=high, casts=(), blocks=block_candidates(site), producer=site.producer,
            notes=site.notes, stays=site.stays, stays_serving=site.stays_serving,
        )
        for site in record.sites.values() if site.was_called
    )  # fmt: skip
    survey = Survey(SurveyDocument(record.fingerprint, record.environment, Format.FP32, sites), {})
    return {site.site: site.block for site in make_plan(survey, goal="training").sites if site.block is not None}


def block_candidates(site: SiteRecord) -> tuple[BlockCandidate, ...]:
    if not _may_be_block(site):
        return ()
    block = build_block(block_shape(site, ROWS, Format.FP32), site.weight_NK, site.bias_N, torch.device("cpu"))
    if not isinstance(block, FusedBlock) or not isinstance(block.spec, BlockSpec):
        return ()
    fast, slow, cast = {ROWS: 1.0}, {ROWS: 200.0}, {ROWS: 10.0}
    error = {role: {"mere_floored": Estimate(0.05, 0.05, 0.05, 50)} for role in site.roles}
    entry = {"entry": site.entry, "entry_training_us": fast, "entry_baseline_training_us": slow} if site.entry else {}
    times = {"training_us": fast, "baseline_training_us": slow, "input_cast_us": cast, "epilogue_training_us": fast}
    return (BlockCandidate("triton.block", site.norm, site.activation, error=error, **times, **entry),)  # type: ignore[arg-type]


@pytest.mark.usefixtures("pretended_kernels")
@settings(max_examples=100)
@given(steps=random_steps(), number=st.integers(0, 9))
def test_what_is_fused_computes_what_it_did(steps: list[Step], number: int) -> None:
    """With all its blocks, with one of them given back, and with none."""
    torch.manual_seed(number)
    model, x = Random(steps), torch.randn(ROWS, WIDTH)
    try:
        expected = outcome(model, x)
    except RuntimeError:  # what was changed in place is needed for a gradient: torch's own refusal
        assume(False)
    probe = loka.Probe(model, every=1)
    with probe.step():
        model(x * 1).square().mean().backward()
    record = probe.record()
    probe.detach()
    plan = plan_for(model, blocks_planned(record))
    for example in ((x.clone(),), None):
        try:
            applied = loka.apply_plan(model, plan, example=example)
        except KernelUnavailable:
            assert example is None, "a plan of what the Probe saw does not run on the same batch"
            continue
        assert set(applied.sites) == {site.site for site in plan.sites if site.block is not None}
        torch.testing.assert_close(outcome(model, x), expected, rtol=1e-4, atol=1e-6)
        if applied.sites:
            give_back(model, applied.sites[number % len(applied.sites)], "drifted")
            torch.testing.assert_close(outcome(model, x), expected, rtol=1e-4, atol=1e-6)
        loka.restore(model)
        torch.testing.assert_close(outcome(model, x), expected, rtol=0, atol=0)


def by_int8(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, mean_K: Tensor) -> Tensor:
    """(x−μ)·wᵀ + μ·wᵀ + b, whose first factors are int8 with a scale for each row."""
    rows_MK, codes_NK = ((t / (s := t.abs().amax(1, keepdim=True) / 127)).round() * s.double() for t in (x - mean_K, weight_NK))
    y_MN = rows_MK.double() @ codes_NK.double().t() + weight_NK.double() @ mean_K.double()
    return (y_MN if bias_N is None else y_MN + bias_N).float()


def planned_in_int8(steps: list[Step], seed: int, means: dict[str, Tensor]) -> nn.Module:
    torch.manual_seed(seed)
    model = Random(steps).eval()
    sites = dict.fromkeys((vector.partition("/")[0] for vector in means), SiteKernels.same("reference.int8_rowwise"))
    loka.apply_plan(model, plan_for(model, sites, goal=Goal.SERVING, vectors=means))
    return model


@settings(max_examples=60)
@given(steps=random_steps(), reads=st.booleans(), number=st.integers(0, 9), drop=st.booleans())
@torch.no_grad()
def test_what_is_served_is_by_int8_at_every_planned_site(steps: list[Step], reads: bool, number: int, drop: bool) -> None:
    """Frozen with its weights or without, copied, and loaded into another, which is of other weights."""
    assume(not (reads and drop and any(name == "by rows" for name, _, _ in steps)))  # no trace goes through torch.vmap
    steps = [*steps, (BY_WEIGHT, 0, False)] if reads else steps
    torch.manual_seed(number)
    plain = Random(steps).eval()
    sites = [name for name, module in plain.named_modules() if isinstance(module, nn.Linear) and name != "head"]
    means = {f"{site}/center": torch.randint(-8, 9, (WIDTH,)) / 16 for site in sites}
    model, other = (planned_in_int8(steps, seed, means) for seed in (number, number + 1))
    for site in sites:

        def hook(module: Any, args: tuple[Tensor], _: Tensor, mean_K: Tensor = means[f"{site}/center"]) -> Tensor:
            return by_int8(*args, module.weight, module.bias, mean_K)

        plain.get_submodule(site).register_forward_hook(hook)
    batches = [torch.randn(rows, WIDTH) for rows in (2, 30)]
    expected = [plain(x.clone()) for x in batches]
    for one in (model, other):
        assert set(loka.freeze(one, drop_high_precision=drop).sites) == set(sites)
        one.kept = None
    other.load_state_dict(model.state_dict())
    for served in (model, copy.deepcopy(model), other):
        for x, y in zip(batches, expected, strict=True):
            torch.testing.assert_close(served(x.clone()), y, rtol=1e-4, atol=1e-5)
