"""Every kernel of the registry, every role, random and hostile shapes and values, against the oracle at float64."""

import re
from dataclasses import dataclass

import pytest
import torch
from contract_check import check_product, operands_of, values
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loka.core.errors import InvalidInput, KernelUnavailable
from loka.core.gemm import SOURCES, GemmProblem, Role, SiteShape, TensorName
from loka.core.recipe import Format, Scaling
from loka.kernels.casting import cast
from loka.kernels.contract import KERNELS, Kernel, is_oracle, multiply, require, why_not
from loka.kernels.device import device_of
from loka.kernels.operand import Form, OperandSpec
from loka.kernels.providers.reference import Reference

AXES = st.one_of(st.integers(1, 40), st.sampled_from([48, 64, 100, 127, 128, 129, 200, 256]))
ALL = [(name, role) for name in KERNELS.names() for role in Role]
IDS = [f"{name}-{role}" for name, role in ALL]


def make_tensors(site: SiteShape, seed: int, spread: float, device: torch.device) -> dict[TensorName, Tensor]:
    """Rows and features whose scales differ by ``e^spread``, a dead row, a dead feature, exact zeros, one outlier."""
    generator = torch.Generator().manual_seed(seed)

    def hostile(rows: int, cols: int, std: float) -> Tensor:
        x = std * torch.randn(rows, cols, generator=generator)
        x *= (spread * torch.randn(rows, 1, generator=generator)).exp()
        x *= (torch.rand(rows, cols, generator=generator) > 0.2).float()
        x[rows // 2] = 0
        x[:, cols // 2] = 0
        x[0, 0] = 30 * std
        return x.to(device)

    return {
        TensorName.X: hostile(site.m, site.k, 1.0),
        TensorName.DY: hostile(site.m, site.n, 1e-3),
        TensorName.W: hostile(site.n, site.k, site.k**-0.5),
    }


def able(name: str, role: Role, site: SiteShape, device: torch.device) -> Kernel:
    kernel = KERNELS.get(name)
    if reason := kernel.missing(device_of(device)):
        pytest.skip(reason)
    if reason := kernel.why_not(GemmProblem.of(role, site, Format.FP32, device_of(device), across=True)):
        pytest.skip(reason)
    return kernel


@pytest.mark.parametrize(("name", "role"), ALL, ids=IDS)
@given(m=AXES, k=AXES, n=AXES, seed=st.integers(0, 2**20), spread=st.sampled_from([0.0, 2.0]), bias=st.booleans())
def test_product_is_the_oracles(
    device: torch.device, name: str, role: Role, m: int, k: int, n: int, seed: int, spread: float, bias: bool
) -> None:
    kernel = KERNELS.get(name)
    if reason := kernel.missing(device_of(device)):
        pytest.skip(reason)
    site = SiteShape(m, k, n)
    problem = GemmProblem.of(role, site, Format.FP32, device_of(device), across=True)
    if kernel.why_not(problem):
        return  # said no: nothing is promised; that able shapes remain is tested below
    tensors = make_tensors(site, seed, spread, device)
    bias_n = torch.randn(problem.n, generator=torch.Generator().manual_seed(seed)).to(device) if bias else None
    for dtype in (torch.float32, torch.bfloat16):
        check_product(kernel, role, tensors, dtype, bias_n)


@pytest.mark.parametrize(("name", "role"), ALL, ids=IDS)
def test_realistic_shape_is_taken_and_right(device: torch.device, name: str, role: Role) -> None:
    site = SiteShape(512, 512, 512)
    kernel = able(name, role, site, device)
    assert why_not(kernel, GemmProblem.of(role, site, Format.BF16, device_of(device), across=True)) is None
    check_product(kernel, role, make_tensors(site, 1, 1.0, device), torch.bfloat16)


@pytest.mark.parametrize(("name", "role"), ALL, ids=IDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nonfinite_values_stay_visible(device: torch.device, name: str, role: Role, poison: float) -> None:
    site = SiteShape(64, 512, 64)
    kernel = able(name, role, site, device)
    a_source, b_source = SOURCES[role]
    for index, source in enumerate((a_source, b_source)):
        tensors = make_tensors(site, 2, 0.0, device)
        row, col = (5, 3) if source.transposed else (3, 5)  # the operand's outer index is 3 either way
        tensors[source.tensor][row, col] = poison
        out = multiply(kernel, role, *operands_of(kernel, role, tensors), torch.float32)
        touched = out[3] if index == 0 else out[:, 3]
        assert not touched.isfinite().any(), f"{poison} in operand {'ab'[index]} vanished"


@pytest.mark.parametrize(("name", "role"), ALL, ids=IDS)
@pytest.mark.parametrize("site", [SiteShape(0, 64, 48), SiteShape(7, 64, 48)], ids=str)
def test_empty_and_tiny_batches(device: torch.device, name: str, role: Role, site: SiteShape) -> None:
    kernel = able(name, role, SiteShape(512, 64, 48), device)
    tensors = {
        TensorName.X: torch.randn(site.m, site.k, device=device),
        TensorName.DY: torch.randn(site.m, site.n, device=device),
        TensorName.W: torch.randn(site.n, site.k, device=device),
    }
    check_product(kernel, role, tensors, torch.float32)


@pytest.mark.parametrize("site", [SiteShape(64, 16, 16), SiteShape(100, 100, 100), SiteShape(100, 13, 512)], ids=str)
def test_padding_is_refused_only_where_it_cannot_pay(site: SiteShape) -> None:
    @dataclass(frozen=True)
    class Padded(Reference):
        def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
            spec = OperandSpec(Format.E4M3, Scaling.ROWWISE, outer_multiple=16, contraction_multiple=16)
            return spec, spec

    kernel = Padded("padded", Format.E4M3, Scaling.ROWWISE, Scaling.ROWWISE, Format.E4M3)
    device = device_of(torch.device("cpu"))
    assert why_not(kernel, GemmProblem.of(Role.FPROP, site, Format.FP32, device)) is None
    refusal = why_not(kernel, GemmProblem.of(Role.FPROP, SiteShape(site.m, site.k, 1), Format.FP32, device))
    assert refusal == "n=1 would be padded to 16 (a multiple of 16), 16× the work"


def test_each_axis_is_padded_as_the_operand_asks_that_it_is_of() -> None:
    @dataclass(frozen=True)
    class Padded(Reference):
        def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
            a, b = (OperandSpec(Format.E4M3, Scaling.ROWWISE, outer_multiple=multiple) for multiple in (4, 16))
            return a, b

    kernel = Padded("padded", Format.E4M3, Scaling.ROWWISE, Scaling.ROWWISE, Format.E4M3)
    device = device_of(torch.device("cpu"))

    def refusal(m: int, n: int) -> str | None:
        return why_not(kernel, GemmProblem.of(Role.FPROP, SiteShape(m, 64, n), Format.FP32, device))

    assert refusal(4, 16) is None
    assert refusal(1, 16) == "m=1 would be padded to 4 (a multiple of 4), 4× the work"
    assert refusal(4, 4) == "n=4 would be padded to 16 (a multiple of 16), 4× the work"


def test_padding_changes_no_value(device: torch.device) -> None:
    kernel = KERNELS.get("reference.rowwise")
    site = SiteShape(37, 21, 19)
    tensors = make_tensors(site, 3, 1.0, device)
    plain = [values(operand) for operand in operands_of(kernel, Role.FPROP, tensors)]

    @dataclass(frozen=True)
    class Padded(Reference):
        def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
            spec = OperandSpec(Format.E4M3, Scaling.ROWWISE, outer_multiple=16, contraction_multiple=32)
            return spec, spec

    padded = operands_of(Padded("p", Format.E4M3, Scaling.ROWWISE, Scaling.ROWWISE, Format.E4M3), Role.FPROP, tensors)
    assert [tuple(operand.codes.shape) for operand in padded] == [(48, 32), (32, 32)]
    for operand, expected in zip(padded, plain, strict=True):
        assert torch.equal(values(operand), expected)
        assert not operand.codes.float()[operand.outer :].any()
        assert not operand.codes.float()[:, operand.contraction :].any()


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("fault", ["wrong_axis", "no_scale", "lost_tail", "transposed_b"])
def test_a_faulty_kernel_fails_the_check(role: Role, fault: str) -> None:
    """The check itself must be able to fail: each fault is one a real kernel could have."""

    @dataclass(frozen=True)
    class Faulty(Reference):
        def multiply(self, a, b, out_dtype, bias):  # type: ignore[no-untyped-def]
            if fault == "no_scale":
                b = b._replace(scale=torch.ones_like(b.scale))
            elif fault == "wrong_axis":
                b = b._replace(scale=b.scale.flip(0))
            elif fault == "lost_tail":
                codes = a.codes.clone()
                codes[:, -1] = 0
                a = a._replace(codes=codes)
            elif fault == "transposed_b":
                b = b._replace(codes=b.codes.t().contiguous())
            return super().multiply(a, b, out_dtype, bias)

    kernel = Faulty("faulty", Format.E4M3, Scaling.ROWWISE, Scaling.ROWWISE, Format.E4M3)
    tensors = make_tensors(SiteShape(32, 32, 32), 4, 2.0, torch.device("cpu"))
    for tensor in tensors.values():
        tensor[:, -1] = 1.0
        tensor[-1] = 1.0
    with pytest.raises(AssertionError, match="values are off"):
        check_product(kernel, role, tensors, torch.float32)


def test_the_oracle_is_who_says_so_whatever_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's kernel says nothing of it, as docs/add-a-kernel.md has it, and may be called anything."""
    oracle = {name for name, kernel in KERNELS.items() if isinstance(kernel, Reference)}
    assert "reference.rowwise" in oracle
    assert {name for name in KERNELS.names() if is_oracle(name)} == oracle

    class Mine:
        name = "reference.mine"

    class Renamed(Reference):
        name = "mine.reference"  # type: ignore[assignment]

    added = (Mine(), Renamed("rowwise", Format.E4M3, Scaling.ROWWISE, Scaling.ROWWISE, Format.E4M3))
    monkeypatch.setattr(KERNELS, "_entries", {kernel.name: kernel for kernel in added})
    assert not is_oracle("reference.mine")
    assert is_oracle("mine.reference")


class TestBadInput:
    kernel = KERNELS.get("reference.rowwise")

    def operands(self, k_a: int = 32, k_b: int = 32):  # type: ignore[no-untyped-def]
        tensors = {TensorName.X: torch.randn(8, k_a), TensorName.W: torch.randn(16, k_b)}
        return operands_of(self.kernel, Role.FPROP, tensors)

    def test_unequal_contractions_name_kernel_and_shapes(self) -> None:
        a, b = self.operands(32, 48)
        with pytest.raises(InvalidInput, match=r"reference.rowwise, fprop: a is 8×32 .* b is 16×48 .* equal length"):
            multiply(self.kernel, Role.FPROP, a, b, torch.float32)

    def test_operands_cast_for_another_kernel(self) -> None:
        a, b = self.operands()
        with pytest.raises(InvalidInput, match="takes a cast to e4m3 tensorwise"):
            multiply(KERNELS.get("reference.tensorwise"), Role.FPROP, a, b, torch.float32)

    @pytest.mark.parametrize("shape", [(8,), (1, 16), (16, 1)], ids=str)
    def test_bias_of_another_shape(self, shape: tuple[int, ...]) -> None:
        a, b = self.operands()
        with pytest.raises(InvalidInput, match=re.escape(f"bias must have shape (16,), got {shape}")):
            multiply(self.kernel, Role.FPROP, a, b, torch.float32, torch.zeros(shape))

    def test_output_dtype_no_kernel_writes(self) -> None:
        a, b = self.operands()
        with pytest.raises(InvalidInput, match=r"torch.int64 is none of LoKA's formats"):
            multiply(self.kernel, Role.FPROP, a, b, torch.int64)

    def test_kernel_the_device_lacks(self) -> None:
        with pytest.raises(KernelUnavailable, match=r"torch.rowwise cannot run on .*needs an NVIDIA GPU.*`loka kernels`"):
            require(KERNELS.get("torch.rowwise"), device_of(torch.device("cpu")))

    def test_operands_on_two_devices(self) -> None:
        a, b = self.operands()
        b = b._replace(codes=b.codes.to("meta"))
        with pytest.raises(InvalidInput, match="they lie on cpu and meta"):
            multiply(self.kernel, Role.FPROP, a, b, torch.float32)


@pytest.mark.parametrize("name", ["torch.tensorwise", "torch.static_fast"])
@pytest.mark.parametrize("n", [24, 32], ids=["padded", "as it is"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_is_added_in_the_output_s_dtype(name: str, n: int, dtype: torch.dtype) -> None:
    """``torch._scaled_mm`` runs on a CPU too."""
    generator = torch.Generator().manual_seed(0)
    x_MK, w_NK = torch.randn(16, 64, generator=generator), torch.randn(n, 64, generator=generator)
    bias_N, kernel = 100 * torch.randn(n, generator=generator), KERNELS.get(name)
    tensors = zip((TensorName.X, TensorName.W), (x_MK, w_NK), kernel.operands(Role.FPROP), strict=True)
    a, b = (cast(tensor_name, tensor, [Form(spec, False)])[0] for tensor_name, tensor, spec in tensors)
    got = kernel.multiply(a, b, dtype, bias_N)
    assert (got.dtype, got.shape) == (dtype, (16, n))
    expected = x_MK.double() @ w_NK.double().t() + bias_N.double()
    torch.testing.assert_close(got.double(), expected, rtol=2.0**-7, atol=1.5)
