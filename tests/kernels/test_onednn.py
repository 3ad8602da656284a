"""oneDNN: by its fast code or not at all; packed weights, right in every call that finds one again, and few."""

import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from weakref import WeakSet

import pytest
import torch
from contract_check import check_product, operands_of, values
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from loka.core.gemm import SOURCES, GemmProblem, Role, SiteShape, TensorName
from loka.core.recipe import Format
from loka.kernels.casting import cast
from loka.kernels.contract import KERNELS, Kernel, multiply
from loka.kernels.device import device_of
from loka.kernels.operand import Form
from loka.kernels.providers import onednn

KERNEL_NAMES = [name for name in KERNELS.names() if name.startswith("onednn.")]
ROWS = (1, 17, 64, 17, 1, 200, 33, 16, 65)  # more numbers than are kept, some of them again


def able(name: str) -> Kernel:
    kernel = KERNELS.get(name)
    if reason := kernel.missing(device_of(torch.device("cpu"))):
        pytest.skip(reason)
    return kernel


@pytest.fixture(params=sorted({onednn.IS_ARM, True}), ids=lambda is_arm: "as on Arm" if is_arm else "as on x86")
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of this machine, and Arm's, which is right everywhere."""
    monkeypatch.setattr(onednn, "IS_ARM", request.param)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_one_weight_multiplies_any_number_of_rows(name: str) -> None:
    kernel, weight = able(name), torch.randn(48, 64)
    _, b = operands_of(kernel, Role.FPROP, {TensorName.X: torch.randn(1, 64), TensorName.W: weight})
    for rows in ROWS:
        x = torch.randn(rows, 64)
        a, _ = operands_of(kernel, Role.FPROP, {TensorName.X: x, TensorName.W: weight})
        expected = x.double() @ values(b).t()
        out = multiply(kernel, Role.FPROP, a, b, torch.float32)  # b's own packed weight, found again
        assert (out - expected).norm() < 0.02 * expected.norm(), rows


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_nan_and_changes_no_other(poison: float) -> None:
    """Though one scale is for all rows."""
    kernel = able("onednn.int8_dynamic")
    tensors = {TensorName.X: torch.randn(5, 64), TensorName.W: torch.randn(48, 64)}
    poisoned = tensors | {TensorName.X: tensors[TensorName.X].clone()}
    tensors[TensorName.X][2] = 0.0
    poisoned[TensorName.X][2, 7] = poison
    out, expected = (
        multiply(kernel, Role.FPROP, *operands_of(kernel, Role.FPROP, one), torch.float32) for one in (poisoned, tensors)
    )
    assert out[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(out[others], expected[others])


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_each_row_of_the_weight_keeps_its_own_scale(name: str) -> None:
    weight = torch.randn(48, 64) * torch.logspace(-6, 6, 48)[:, None]
    check_product(able(name), Role.FPROP, {TensorName.X: torch.randn(33, 64), TensorName.W: weight}, torch.float32)


@pytest.mark.parametrize("name", ["onednn.int8", "onednn.int8_tensorwise"])
def test_long_sums_are_exact(name: str) -> None:
    x, weight = torch.full((17, 60_000), 127.0), torch.full((32, 60_000), 127.0)
    x[:, ::7] = 126.0
    check_product(able(name), Role.FPROP, {TensorName.X: x, TensorName.W: weight}, torch.float32)


@pytest.mark.parametrize("name", ["onednn.int8", "onednn.int8_tensorwise"])
def test_a_program_that_was_exported_on_arm_is_served_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, bias = able(name), torch.randn(48)
    a, b = operands_of(kernel, Role.FPROP, {TensorName.X: torch.randn(33, 64), TensorName.W: torch.randn(48, 64)})
    monkeypatch.setattr(onednn, "_PACKED_FOR_INT8", None)  # on x86 nothing is packed
    monkeypatch.setattr(onednn, "IS_ARM", False)
    arguments = a.codes, a.scale, b.codes, b.scale, bias, torch.float32, a.scale.numel() == 1
    expected = (values(a) @ values(b).t() + bias).float()
    torch.testing.assert_close(torch.ops.loka.onednn_int8_mm(*arguments), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("name", ["onednn.int8", "onednn.int8_tensorwise"])
def test_axes_of_one(name: str, role: Role) -> None:
    """Their strides say nothing of the order in which a matrix lies, and torch's product left its result unwritten there."""
    kernel = able(name)
    for m, k, n in product((1, 2, 20), repeat=3):
        tensors = {TensorName.X: torch.randn(m, k), TensorName.DY: torch.randn(m, n), TensorName.W: torch.randn(n, k)}
        a, b = (
            cast(source.tensor, tensors[source.tensor], [Form(spec, source.transposed)])[0]
            for source, spec in zip(SOURCES[role], kernel.operands(role), strict=True)
        )
        expected = values(a) @ values(b).t()
        if reason := kernel.why_not(GemmProblem.of(role, SiteShape(m, k, n), Format.FP32, device_of(torch.device("cpu")))):
            assert onednn.IS_ARM, reason
            continue
        torch.testing.assert_close(multiply(kernel, role, a, b, torch.float32).double(), expected, rtol=1e-5, atol=1e-6)


def test_packed_weights_are_kept_for_the_last_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Packed:
        pass

    alive: WeakSet[Packed] = WeakSet()

    def pack(_: torch.Tensor) -> Packed:
        packed = Packed()
        alive.add(packed)
        return packed

    monkeypatch.setattr(onednn, "IS_ARM", True)
    monkeypatch.setattr(onednn, "_pack_quantized", pack)
    packed_for, _ = onednn._pack_for_dynamic(torch.ones(8, 32, dtype=torch.int8), torch.ones(8, 1))
    for rows in range(1, 100):
        packed_for(rows)
    assert len(alive) == onednn.ROW_COUNTS_KEPT
    assert packed_for(99) in alive
    del packed_for
    assert not alive


@pytest.mark.parametrize("name", ["onednn.int8", "onednn.int8_tensorwise"])
def test_compiled_code_makes_a_scale_once(name: str) -> None:
    """And not again for each value that it scales: the least that a scale may be stands in one place."""
    kernel, weight = able(name), torch.randn(64, 64)
    _, b = operands_of(kernel, Role.FPROP, {TensorName.X: torch.randn(1, 64), TensorName.W: weight})
    form = Form(kernel.operands(Role.FPROP)[0], transposed=False)

    def layer(x: Tensor) -> Tensor:
        (a,) = cast(TensorName.X, x.relu(), (form,))
        return multiply(kernel, Role.FPROP, a, b, torch.float32).relu()

    x = torch.randn(64, 64)
    with torch.no_grad():
        expected = layer(x)
        out, (code,) = run_and_get_code(torch.compile(layer, fullgraph=True, dynamic=False), x)
    assert torch.equal(out, expected)
    assert code.count(str(torch.finfo(torch.float32).smallest_normal)) == 1


@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_threads_may_multiply_by_one_weight_at_once(name: str) -> None:
    """On Arm two of them ended the process in oneDNN's dynamic product."""
    kernel = able(name)
    x, weight = torch.randn(40, 64), torch.randn(48, 64)
    a, b = operands_of(kernel, Role.FPROP, {TensorName.X: x, TensorName.W: weight})
    expected = multiply(kernel, Role.FPROP, a, b, torch.float32)
    with ThreadPoolExecutor(4) as threads:
        products = threads.map(lambda _: multiply(kernel, Role.FPROP, a, b, torch.float32), range(200))
    assert all(torch.equal(product, expected) for product in products)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_scales_are_fp32_whatever_the_default_is(name: str, default: torch.dtype) -> None:
    kernel = able(name)
    tensors = {TensorName.X: torch.randn(8, 64), TensorName.W: torch.randn(48, 64)}
    expected = multiply(kernel, Role.FPROP, *operands_of(kernel, Role.FPROP, tensors), torch.float32)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        product = multiply(kernel, Role.FPROP, *operands_of(kernel, Role.FPROP, tensors), torch.float32)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(product, expected)


@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_operands_lie_on_the_cpu_whatever_the_default_is(name: str) -> None:
    kernel = able(name)
    tensors = {TensorName.X: torch.randn(8, 64), TensorName.W: torch.randn(48, 64)}
    a, b = operands_of(kernel, Role.FPROP, tensors)
    expected = multiply(kernel, Role.FPROP, a, b, torch.float32)
    onednn._zero.cache_clear()
    onednn._overflows.cache_clear()
    onednn._dynamic_overflows.cache_clear()
    with torch.device("meta"):
        assert kernel.missing(device_of(torch.device("cpu"))) is None
        assert torch.equal(multiply(kernel, Role.FPROP, a, b, torch.float32), expected)


def told_elsewhere(code: str, **environment: str) -> str:
    """What ``code`` prints in a process of its own; oneDNN reads its environment once."""
    return subprocess.check_output([sys.executable, "-c", code], env=os.environ | environment, text=True)


MULTIPLY_ALL = f"""
import torch
from loka.core.gemm import Role, TensorName
from loka.kernels.casting import cast
from loka.kernels.contract import KERNELS
from loka.kernels.operand import Form
for name in {KERNEL_NAMES}:
    kernel = KERNELS.get(name)
    a_spec, b_spec = kernel.operands(Role.FPROP)
    (a,) = cast(TensorName.X, torch.ones(32, 640), [Form(a_spec, transposed=False)])
    (b,) = cast(TensorName.W, torch.ones(64, 640), [Form(b_spec, transposed=False)])
    print(name, kernel.multiply(a, b, torch.float32, None)[1, 1].item())
"""
IS_X86 = platform.machine() == "x86_64"


@pytest.mark.skipif(not IS_X86, reason="elsewhere oneDNN calls its code by other names")
def test_nothing_is_left_to_reference_code() -> None:
    """It takes seconds where fast code takes milliseconds, for the same numbers."""
    for name in KERNEL_NAMES:
        able(name)
    told = told_elsewhere(MULTIPLY_ALL, ONEDNN_VERBOSE="1")
    ways = re.findall(r"primitive,exec,cpu,(gemm_api|matmul|inner_product),([^,]*),", told)
    assert sorted(primitive for primitive, _ in ways) == ["gemm_api", "gemm_api", "matmul"]  # torch's own loop tells nothing
    assert not [way for _, way in ways if way.startswith("ref")], ways


@pytest.mark.skipif(not IS_X86, reason="instructions of x86")
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE"])
def test_a_cpu_without_int8_products_is_refused(instructions: str) -> None:
    """Sums of oneDNN's stop at 32,767 there, and products are half of what is right. Where the CPU really has no more, torch
    multiplies plain matrices by a loop of its own, and is right."""
    ask = f"""
from loka.kernels.device import device_of
for name in {KERNEL_NAMES}:
    print(KERNELS.get(name).missing(device_of(torch.device("cpu"))))
"""
    told = told_elsewhere(MULTIPLY_ALL + ask, ONEDNN_MAX_CPU_ISA=instructions).splitlines()
    products = dict(line.split() for line in told[: len(KERNEL_NAMES)])
    reasons = dict(zip(KERNEL_NAMES, told[len(KERNEL_NAMES) :], strict=True))
    assert reasons.keys() == products.keys()
    for name, reason in reasons.items():
        is_half = float(products[name]) < 0.6 * 640
        assert is_half or float(products[name]) == pytest.approx(640, rel=0.01), products
        assert reason.startswith("needs a CPU with VNNI or AMX" if is_half else "None"), name
    assert not reasons["onednn.int8_dynamic"].startswith("None")


@pytest.mark.skipif(not IS_X86, reason="elsewhere torch's quantized linear layer multiplies")
def test_a_plain_loop_is_told_from_products_of_onednn() -> None:
    told = told_elsewhere(MULTIPLY_ALL, ONEDNN_VERBOSE="1")
    assert onednn._is_looped() is ("cpu,gemm_api" not in told)


@pytest.mark.parametrize("kernel", ["onednn.int8", "onednn.int8_tensorwise"])
def test_products_that_a_plain_loop_would_take_long_for_are_refused(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_is_looped", lambda: True)
    device, large, small = device_of(torch.device("cpu")), SiteShape(64, 512, 512), SiteShape(2048, 128, 128)

    def refusal(site: SiteShape) -> str | None:
        return KERNELS.get(kernel).why_not(GemmProblem.of(Role.FPROP, site, Format.FP32, device))

    assert refusal(small) is None
    assert (refusal(large) or "").startswith("takes weights of up to 128×128 alone: on a CPU without AVX512-VNNI")
    monkeypatch.setattr(onednn, "_is_looped", lambda: False)
    assert refusal(large) is None


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(("kernel", "packed"), [("onednn.int8", True), ("onednn.int8_dynamic", False)])
def test_a_weight_is_packed_for_the_kernel_that_reads_it(kernel: str, packed: bool) -> None:
    """A packed copy is as large as the codes, and a server pays for each. On x86 codes are multiplied as they lie."""
    _, spec = able(kernel).operands(Role.FPROP)
    (weight,) = cast(TensorName.W, torch.randn(32, 64), [Form(spec, transposed=False)])
    assert (weight.codes in onednn._PACKED_FOR_INT8._entries) is (packed and onednn.IS_ARM)
