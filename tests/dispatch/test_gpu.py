"""Plans on a GPU: kernels mixed with a fused chain in one model, compiled, captured, and watched."""

import pytest
import torch
from cuda_graphs import captured
from plans import plan_for
from torch import Tensor, nn

import loka
from loka.core.plan import BlockPlan, Plan
from loka.dispatch.planned import PassThrough, PlannedLinear
from loka.kernels.contract import KERNELS
from loka.kernels.device import device_of
from loka.kernels.executor import SiteKernels
from loka.nn.fused_block import FusedBlock

pytestmark = pytest.mark.gpu
WIDTH, ROWS = 512, 1024


class Model(nn.Module):
    """A chain of two blocks behind a norm, and one without a norm, between layers of four kernels, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Hardswish(), nn.Linear(WIDTH, WIDTH), nn.Hardswish())
        self.norm = loka.BlockNorm(WIDTH)
        self.chain = nn.Sequential()
        for _ in range(2):
            self.chain.extend([nn.Linear(WIDTH, WIDTH, bias=False), loka.BlockNorm(WIDTH), nn.Hardswish()])
        self.plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.back = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Hardswish(), nn.Linear(WIDTH, WIDTH), nn.Hardswish())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.back(self.plain(self.chain(self.norm(self.front(x))))))


def model() -> Model:
    torch.manual_seed(0)
    return Model().to("cuda", torch.bfloat16)


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1))


def mixed(model: nn.Module) -> Plan:
    here = device_of(torch.device("cuda"))
    wanted = ["torch.rowwise", "torch.tensorwise", "torch.blockwise", "fbgemm.rowwise", "triton.rowwise"]
    names = [name for name in wanted if name in KERNELS and KERNELS.get(name).missing(here) is None][:4]
    sites = ("front.0", "front.2", "back.0", "back.2")
    kernels: dict[str, SiteKernels | BlockPlan] = {s: SiteKernels.same(n) for s, n in zip(sites, names, strict=False)}
    kernels["chain.0"] = BlockPlan("triton.block", "chain.1", "chain.2", entry="norm")
    kernels["chain.3"] = BlockPlan("triton.block", "chain.4", "chain.5", fp8_input=True, producer="chain.0")
    kernels["plain.0"] = BlockPlan("triton.block", None, "plain.1")
    return plan_for(model, kernels)


def run(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    module.zero_grad()
    y = module(x)
    y.float().square().mean().backward()
    names = {name.removeprefix("_orig_mod."): p.grad for name, p in module.named_parameters()}
    return y.detach(), {name: gradient.clone() for name, gradient in names.items() if gradient is not None}


def close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((actual.double() - expected.double()).norm() < tolerance * expected.double().norm())


def test_four_kernels_and_a_chain_in_one_model_stay_near_bf16() -> None:
    plain, planned = model(), model()
    applied = loka.apply_plan(planned, mixed(planned))
    assert len(applied.sites) >= 6
    assert isinstance(planned.chain[0], FusedBlock)
    assert planned.chain[0].followers == (planned.chain[3],)
    assert isinstance(planned.norm, PassThrough)
    (y, gradients), (expected, expected_gradients) = run(planned, batch()), run(plain, batch())
    assert close(y, expected, 0.3)
    for name, gradient in gradients.items():
        assert close(gradient, expected_gradients[name], 0.4), name
    loka.restore(planned)
    assert torch.equal(planned(batch()), plain(batch()))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_into_one_graph(dynamic: bool | None) -> None:
    torch.compiler.reset()
    eager, other = model(), model()
    loka.apply_plan(eager, mixed(eager))
    loka.apply_plan(other, mixed(other))
    y, gradients = run(torch.compile(other, fullgraph=True, dynamic=dynamic), batch())
    expected, expected_gradients = run(eager, batch())
    assert close(y, expected, 0.05)
    for name, gradient in gradients.items():
        assert close(gradient, expected_gradients[name], 0.15), name


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own, captured to reserve its memory
def test_trains_under_torchs_own_cuda_graphs() -> None:
    """mode="reduce-overhead" launches nothing by itself: what it replays must read the casts that each step has written."""
    steps = 12
    losses = {}
    for mode in (None, "reduce-overhead"):
        torch.compiler.reset()
        planned = model()
        loka.apply_plan(planned, mixed(planned))
        optimizer = torch.optim.AdamW(planned.parameters(), lr=1e-4, fused=True)  # 1e-2 is chaotic, in fp32 too
        compiled = torch.compile(planned, fullgraph=True, mode=mode)
        losses[mode] = []
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            loss = (compiled(batch()) - 1).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[mode].append(loss.item())
    assert losses[None][-1] < 0.5 * losses[None][0]
    assert losses["reduce-overhead"] == pytest.approx(losses[None], rel=0.05)


@torch.no_grad()
def test_captured_in_a_cuda_graph() -> None:
    planned = model()
    loka.apply_plan(planned, mixed(planned))
    loka.freeze(planned)
    x = batch()
    expected = planned(x).clone()
    graph, y = captured(lambda: planned(x))
    x.copy_(2 * x)
    graph.replay()
    assert not torch.equal(y, expected)
    x.copy_(0.5 * x)
    graph.replay()
    assert torch.equal(y, expected)


def test_a_last_batch_runs_in_high_precision_and_is_counted_on_the_device() -> None:
    planned = model()
    applied = loka.apply_plan(planned, mixed(planned))
    planned(batch(3)).sum().backward()
    counted = applied.high_precision_calls()
    assert counted
    assert all(isinstance(planned.get_submodule(site), PlannedLinear) for site in counted)


def test_checks_wait_for_the_device_once_and_steps_between_never() -> None:
    planned = model()
    probe = loka.Probe(planned, every=1)
    with probe.step():
        run(planned, batch())
    record = probe.record()
    probe.detach()
    loka.apply_plan(planned, mixed(planned))
    guard = loka.Guard(planned, record, every=3)
    with guard.step():
        run(planned, batch())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            with guard.step():
                run(planned, batch())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert guard.events == []
