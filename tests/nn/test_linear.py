"""LokaLinear against the oracle: outputs, all gradients, and everything a module lives through."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import loka
from loka.core.errors import InvalidInput, UnknownName
from loka.core.gemm import SOURCES, Device, GemmProblem, Role, SiteShape, TensorName
from loka.core.recipe import Format, Transform
from loka.kernels.contract import KERNELS
from loka.kernels.device import constant_when_traced, device_of
from loka.kernels.executor import SiteExecutor, SiteKernels
from loka.kernels.providers import fbgemm, torch_casts, triton
from loka.kernels.providers.torch_high import TorchHighPrecision
from loka.numerics.reference import gemm
from loka.numerics.scaling import quantize

TRIPLES = [
    SiteKernels.same("reference.tensorwise"),
    SiteKernels.same("reference.rowwise"),
    SiteKernels.same("reference.blockwise"),
    SiteKernels.same("reference.int8_rowwise"),
    SiteKernels("reference.static", "reference.rowwise_e5m2", "reference.tensorwise_e5m2"),
    SiteKernels("reference.rowwise", "torch.fp32", "reference.tensorwise"),
    SiteKernels("torch.fp32", "reference.blockwise", "torch.fp32"),
]
SAME = SiteKernels.same("reference.rowwise")


def oracle(kernels: SiteKernels, role: Role, tensors: dict[TensorName, Tensor]) -> Tensor:
    """The role's output from the definition: orient both tensors, quantize as the kernel's recipe says, multiply at float64."""
    operands = []
    for source, spec in zip(SOURCES[role], KERNELS.get(kernels.of(role)).operands(role), strict=True):
        oriented = tensors[source.tensor].t() if source.transposed else tensors[source.tensor]
        is_8bit = spec.format.is_8bit
        operands.append(quantize(oriented, spec.format, spec.scaling, static_scale=spec.static_scale) if is_8bit else oriented)
    return gemm(*operands)


def assert_close(actual: Tensor, expected: Tensor, rtol: float = 1e-5) -> None:
    scale = expected.square().mean().sqrt().item()
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=rtol * scale + 1e-30)


def run(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("kernels", TRIPLES, ids=str)
@given(m=st.integers(1, 40), k=st.integers(1, 150), n=st.integers(1, 150), bias=st.booleans(), seed=st.integers(0, 2**16))
def test_output_and_gradients_are_the_oracles(kernels: SiteKernels, m: int, k: int, n: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    module = loka.LokaLinear(k, n, bias, kernels=kernels)
    x, dy = torch.randn(m, k), 1e-3 * torch.randn(m, n)
    y, dx = run(module, x, dy)
    tensors = {TensorName.X: x, TensorName.DY: dy, TensorName.W: module.weight.detach()}
    assert_close(y, oracle(kernels, Role.FPROP, tensors) + (module.bias.detach() if bias else 0))
    assert_close(dx, oracle(kernels, Role.DGRAD, tensors))
    assert module.weight.grad is not None
    assert_close(module.weight.grad, oracle(kernels, Role.WGRAD, tensors))
    if bias:
        assert module.bias.grad is not None
        assert_close(module.bias.grad, dy.double().sum(0))


GPU_KERNELS = [name for name in KERNELS.names() if not name.startswith(("reference.", "onednn."))]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in GPU_KERNELS), ("torch.rowwise", torch.float32)], ids=str
)
def test_gpu_kernels_under_autograd_are_the_oracles(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "torch.rowwise":  # one kernel with compiled casts; for the others compiling them again would show nothing new
        monkeypatch.setattr(torch_casts, "_compiled_cast", torch_casts.quantize_forms)
    device = device_of(torch.device("cuda"))
    kernel = KERNELS.get(name)
    if reason := kernel.missing(device):
        pytest.skip(reason)
    site = SiteShape(520, 512, 768)
    able = {role: kernel.why_not(GemmProblem.of(role, site, Format.BF16, device)) is None for role in Role}
    kernels = SiteKernels(*(name if able[role] else "torch.fp32" for role in Role))
    module = loka.LokaLinear(site.k, site.n, device="cuda", dtype=dtype, kernels=kernels)
    x, dy = (
        torch.randn(site.m, site.k, device="cuda", dtype=dtype),
        1e-6 * torch.randn(site.m, site.n, device="cuda", dtype=dtype),
    )
    y, dx = run(module, x, dy)
    tensors = {TensorName.X: x, TensorName.DY: dy, TensorName.W: module.weight.detach()}
    assert module.weight.grad is not None
    for role, actual in ((Role.FPROP, y - module.bias.detach()), (Role.DGRAD, dx), (Role.WGRAD, module.weight.grad)):
        expected = oracle(kernels, role, tensors)
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < (0.006 if dtype is torch.bfloat16 else 0.002)  # of the product alone: bf16 is rounded to 8 bits


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kernels", [*TRIPLES, SiteKernels("onednn.int8", "torch.fp32", "torch.fp32")], ids=str)
def test_compiles_into_one_graph_and_changes_nothing(kernels: SiteKernels) -> None:
    module = loka.LokaLinear(48, 32, kernels=kernels)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, dy = torch.randn(20, 48), torch.randn(20, 32)
    y, dx = run(module, x, dy)
    dw = module.weight.grad
    module.zero_grad()
    compiled_y, compiled_dx = run(compiled, x, dy)
    assert_close(compiled_y, y)
    assert_close(compiled_dx, dx)
    assert dw is not None
    assert module.weight.grad is not None
    assert_close(module.weight.grad, dw)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["fbgemm.rowwise", "reference.rowwise"])
def test_compiles_where_fbgemm_is_installed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library and for Hopper: choosing a caster and loading it must not break the graph."""
    package = tmp_path / "fbgemm_gpu" / "experimental" / "gen_ai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    hopper = Device("cuda", "NVIDIA H200", (9, 0))
    for where in ("loka.kernels.casting.device_of", "loka.kernels.contract.device_of"):
        monkeypatch.setattr(where, constant_when_traced(lambda device: hopper))
    monkeypatch.setattr(fbgemm, "_not_installed", constant_when_traced(lambda: None))
    monkeypatch.setattr(triton, "_not_installed", constant_when_traced(lambda: "not installed"))  # it would need a driver
    with torch.library._scoped_library("fbgemm", "FRAGMENT") as library:
        library.define("f8f8bf16_rowwise(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, *, bool use_fast_accum) -> Tensor")
        library.impl(
            "f8f8bf16_rowwise",
            lambda a, b, a_scale, b_scale, use_fast_accum: (
                (a.float() * a_scale[:, None]) @ (b.float() * b_scale[:, None]).t()
            ).bfloat16(),
            "CompositeExplicitAutograd",
        )
        module = loka.LokaLinear(48, 32, kernels=SiteKernels.same(name))
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        x, dy = torch.randn(32, 48), torch.randn(32, 32)
        for actual, expected in zip(run(compiled, x, dy), run(module, x, dy), strict=True):
            assert_close(actual, expected)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    "handed_on",
    [lambda out: out.to(out.dtype), lambda out: nn.functional.pad(out, (0, 3))[:, :-3]],
    ids=["as it was", "a view"],
)
def test_whatever_a_kernel_hands_on_is_an_output_like_any_other(
    handed_on: Callable[[Tensor], Tensor], is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be changed in place, and it has its gradient, which a compiled graph of torch 2.11 lost for the first."""
    multiply = TorchHighPrecision.multiply
    monkeypatch.setattr(TorchHighPrecision, "multiply", lambda *args: handed_on(multiply(*args)))
    linear = loka.LokaLinear(48, 32, bias=False, kernels=SiteKernels("torch.fp32", "reference.rowwise", "reference.rowwise"))
    module = nn.Sequential(linear, nn.ReLU(inplace=True), nn.Linear(32, 8))
    x, dy = torch.randn(20, 48), torch.randn(20, 8)
    y, dx = run(torch.compile(module, fullgraph=True, backend="aot_eager") if is_compiled else module, x, dy)
    hidden = x @ linear.weight.detach().t()
    assert_close(y, module[2](hidden.relu()).detach())
    dz = (dy @ module[2].weight.detach()) * (hidden > 0)
    tensors = {TensorName.X: x, TensorName.DY: dz, TensorName.W: linear.weight.detach()}
    assert linear.weight.grad is not None
    assert_close(dx, oracle(SAME, Role.DGRAD, tensors))
    assert_close(linear.weight.grad, oracle(SAME, Role.WGRAD, tensors))


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "name",
    ["torch.bf16", "torch.rowwise_fast", "torch.tensorwise_fast", "torch.blockwise", "fbgemm.rowwise_fast",
     "triton.rowwise_fast", "triton.static_fast", "torch.static_fast"],
)  # fmt: skip
def test_gpu_kernels_train_a_compiled_model_as_an_eager_one(name: str) -> None:
    """Under autocast and in front of a norm, which needs the kernel's output in backward, as in a model that trains."""
    if reason := KERNELS.get(name).missing(device_of(torch.device("cuda"))):
        pytest.skip(reason)
    backward = "torch.rowwise_fast"
    linear = loka.LokaLinear(512, 512, bias=False, device="cuda", kernels=SiteKernels(name, backward, backward))
    module = nn.Sequential(linear, nn.LayerNorm(512, device="cuda"), nn.SiLU(), nn.Linear(512, 1, device="cuda"))
    x, dy = torch.randn(512, 512, device="cuda"), torch.randn(512, 1, device="cuda", dtype=torch.bfloat16)
    gradients = []
    for called in (module, torch.compile(module, fullgraph=True)):
        module.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            _, dx = run(called, x, dy)
        gradients.append([dx, *(parameter.grad for parameter in module.parameters())])
    for eager, compiled in zip(*gradients, strict=True):
        assert (compiled.double() - eager.double()).norm() < 0.05 * eager.double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["torch.rowwise", "torch.tensorwise_fast", "torch.static_fast", "torch.blockwise", "torch.tf32", "fbgemm.rowwise_fast"],
)
def test_gpu_kernels_compile_into_one_graph(name: str) -> None:
    kernel = KERNELS.get(name)
    if reason := kernel.missing(device_of(torch.device("cuda"))):
        pytest.skip(reason)
    module = loka.LokaLinear(512, 512, device="cuda", dtype=torch.bfloat16, kernels=SiteKernels.same(name))
    x, dy = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for actual, expected in zip(run(torch.compile(module, fullgraph=True), x, dy), run(module, x, dy), strict=True):
        assert (actual.double() - expected.double()).norm() < 0.02 * expected.double().norm()


@pytest.mark.usefixtures("fresh_compiler")
def test_modules_compiled_apart_do_not_run_each_others_graph() -> None:
    """They share one code object; torch.compile does not guard on enums used as keys, so their kernels must tell them apart."""
    x = torch.randn(20, 48)
    outputs = []
    for kernels in TRIPLES:
        torch.manual_seed(0)
        module = loka.LokaLinear(48, 32, kernels=kernels)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        outputs.append(compiled(x).detach())
        assert_close(outputs[-1], module(x).detach())
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("kernels", [SAME, SiteKernels.same("torch.fp32")], ids=str)
def test_autocast_gives_the_autocast_dtype_and_full_gradients(kernels: SiteKernels) -> None:
    module = loka.LokaLinear(32, 16, kernels=kernels)
    x = torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx = run(module, x, torch.ones(8, 16, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert (dx.dtype, module.weight.grad.dtype) == (torch.float32, torch.float32)  # type: ignore[union-attr]
    assert_close(y, module(x.bfloat16().float()).detach(), rtol=0.01)


def test_autocast_reads_and_writes_its_dtype_alone() -> None:
    """Behind a norm, which autocast leaves in fp32, a cast would read, and dgrad write, twice the bytes."""
    module = loka.LokaLinear(32, 16, kernels=SAME)
    x, dy = torch.randn(8, 32), torch.randn(8, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y, dx = run(module, x, dy)
        rounded, _ = run(module, x.bfloat16(), dy)
    assert torch.equal(y, rounded)
    assert torch.equal(dx, dx.bfloat16().float())


@pytest.mark.parametrize("x", [torch.ones(8, 32).double(), torch.ones(8, 32).long(), torch.ones(8, 32).bool()], ids=str)
def test_autocast_rounds_nothing_that_it_would_not_touch(x: Tensor) -> None:
    """``nn.Linear`` refuses it there too: ids past 256 would be the same in bf16."""
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="same dtype"):
            nn.Linear(32, 16)(x)
        with pytest.raises(InvalidInput):
            loka.LokaLinear(32, 16, kernels=SAME)(x)


def test_leading_axes_are_kept() -> None:
    module = loka.LokaLinear(32, 16, kernels=SAME)
    x = torch.randn(3, 4, 32)
    assert module(x).shape == (3, 4, 16)
    assert torch.equal(module(x).reshape(12, 16), module(x.reshape(12, 32)))
    assert module(torch.randn(32)).shape == (16,)


def test_empty_batch_trains() -> None:
    module = loka.LokaLinear(32, 16, kernels=SAME)
    y, dx = run(module, torch.empty(0, 32), torch.empty(0, 16))
    assert (y.shape, dx.shape) == ((0, 16), (0, 32))
    assert module.weight.grad is not None
    assert not module.weight.grad.any()


def test_only_what_needs_a_gradient_gets_one() -> None:
    module = loka.LokaLinear(32, 16, kernels=SAME)
    module.weight.requires_grad_(False)
    x = torch.randn(8, 32, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    assert module.weight.grad is None
    module.weight.requires_grad_(True)
    module(x.detach()).sum().backward()
    assert module.weight.grad is not None
    with torch.no_grad():
        assert not module(x).requires_grad


def test_serving_casts_nothing_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    module = loka.LokaLinear(32, 16, kernels=SAME)
    asked: list[tuple[Role, ...]] = []
    cast = module.executor.cast

    def spy(name: TensorName, tensor: Tensor, roles: tuple[Role, ...], *vectors: object) -> object:
        asked.append(roles)
        return cast(name, tensor, roles, *vectors)

    monkeypatch.setattr(module.executor, "cast", spy)
    with torch.no_grad():
        module(torch.randn(8, 32))
    assert asked == [(Role.FPROP,)]


@pytest.mark.parametrize("kernels", [SAME, SiteKernels.same("onednn.int8")], ids=str)
def test_made_and_run_in_inference_mode_it_trains_outside_of_it(kernels: SiteKernels) -> None:
    """A script that serves may be in inference mode as a whole."""
    linear, x_MK = nn.Linear(32, 16), torch.randn(5, 32)
    expected_MN = loka.LokaLinear.from_linear(linear, kernels)(x_MK)
    with torch.inference_mode():
        module = loka.LokaLinear.from_linear(linear, kernels, Transform.CENTER, torch.zeros(32))
        assert torch.equal(module(x_MK), expected_MN)
    module(x_MK).sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert torch.equal(module(x_MK), loka.LokaLinear.from_linear(linear, kernels)(x_MK))


def test_a_parametrized_layer_is_refused() -> None:
    """What it would share is the weight of one call, which nobody trains."""
    with pytest.raises(InvalidInput, match="remove its parametrization"):
        loka.LokaLinear.from_linear(nn.utils.parametrizations.weight_norm(nn.Linear(32, 16)), SAME)


@pytest.mark.parametrize(
    "make",
    [
        lambda: loka.LokaLinear(16, 16, kernels="reference.rowwise"),  # type: ignore[arg-type]
        lambda: loka.LokaLinear.from_linear(nn.Linear(16, 16), "reference.rowwise"),  # type: ignore[arg-type]
    ],
)
def test_a_name_in_the_place_of_three_is_told_how_to_be_one(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(InvalidInput, match=r"kernels must be a SiteKernels, got str: SiteKernels\.same\(name\)"):
        make()


def test_a_second_derivative_is_refused() -> None:
    module = loka.LokaLinear(32, 16, kernels=SAME)
    x = torch.randn(8, 32, requires_grad=True)
    (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


class TestFaceOfLinear:
    def test_state_dict_is_that_of_linear(self) -> None:
        linear = nn.Linear(32, 24)
        module = loka.LokaLinear.from_linear(linear, SAME)
        assert list(module.state_dict()) == list(linear.state_dict())
        nn.Linear(32, 24).load_state_dict(module.state_dict())
        assert [id(p) for p in module.parameters()] == [id(p) for p in linear.parameters()]

    def test_checkpoint_without_loka(self) -> None:
        buffer = io.BytesIO()
        torch.save(loka.LokaLinear(8, 4, kernels=SAME).state_dict(), buffer)
        buffer.seek(0)
        nn.Linear(8, 4).load_state_dict(torch.load(buffer, weights_only=True))

    def test_repr_names_the_kernels(self) -> None:
        module = loka.LokaLinear(8, 4, kernels=SiteKernels("reference.static", "torch.fp32", "reference.rowwise"))
        assert "fprop=reference.static, dgrad=torch.fp32, wgrad=reference.rowwise" in repr(module)

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (torch.randn(4, 7), r"expected input of shape \(..., 8\), got \(4, 7\)"),
            (torch.tensor(1.0), r"expected input of shape \(..., 8\), got \(\)"),
            (torch.randn(4, 8, dtype=torch.bfloat16), "input is torch.bfloat16, the weight torch.float32: cast one of them"),
            (torch.randn(4, 8, device="meta"), "input is on meta, the weight on cpu"),
        ],
    )
    def test_bad_input_says_what_is_expected(self, x: Tensor, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            loka.LokaLinear(8, 4, kernels=SAME)(x)

    def test_unknown_kernel_suggests(self) -> None:
        with pytest.raises(UnknownName, match=r"no kernel is called 'torch.rowise'. Did you mean 'torch.rowwise'"):
            loka.LokaLinear(8, 4, kernels=SiteKernels.same("torch.rowise"))


def test_what_a_layer_holds_beside_its_weight_is_not_dropped() -> None:
    linear = nn.Linear(16, 16)
    linear.gain = nn.Parameter(torch.ones(16))
    with pytest.raises(InvalidInput, match="the linear layer holds gain too"):
        loka.LokaLinear.from_linear(linear, SiteKernels.same("reference.rowwise"))


def test_a_layer_that_an_older_version_pickled_is_told() -> None:
    state = loka.LokaLinear(16, 16, kernels=SiteKernels.same("reference.rowwise")).__getstate__()
    del state["_held"]
    with pytest.raises(InvalidInput, match="pickled whole by an older LoKA: load its weights, by state_dict"):
        loka.LokaLinear.__new__(loka.LokaLinear).__setstate__(state)


def test_the_weight_of_a_first_layer_may_be_written_before_backward() -> None:
    """As with nn.Linear: where nothing in front learns, its gradient does not read it."""
    layer = loka.LokaLinear(24, 16, kernels=SiteKernels.same("reference.rowwise"))
    x, dy = torch.randn(8, 24), torch.randn(8, 16)
    layer(x).backward(dy)
    expected, layer.weight.grad = layer.weight.grad, None
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    y.backward(dy)
    assert torch.equal(layer.weight.grad, expected)


def test_it_is_in_the_mode_of_the_layer_it_stands_for() -> None:
    linear = nn.Linear(32, 16)
    assert loka.LokaLinear.from_linear(linear, SiteKernels.same("reference.rowwise")).training
    assert not loka.LokaLinear.from_linear(linear.eval(), SiteKernels.same("reference.rowwise")).training


def test_gradients_are_summed_for_those_who_ask_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The column sums of dy are read by a bias, and by wgrad of a centered site."""
    monkeypatch.setattr(SiteExecutor, "cast_and_sum", lambda *_: pytest.fail("nobody asked for a sum"))
    module = loka.LokaLinear.from_linear(nn.Linear(32, 16, bias=False), SAME)
    module(torch.randn(8, 32, requires_grad=True)).sum().backward()
    assert module.weight.grad is not None
    with pytest.raises(pytest.fail.Exception):
        loka.LokaLinear.from_linear(nn.Linear(32, 16), SAME)(torch.randn(8, 32)).sum().backward()
