"""Packed weights of oneDNN: right in every call that finds one again, and few."""

from weakref import WeakSet

import pytest
import torch
from contract_check import check_product, operands_of, values

from loka.core.gemm import Role, TensorName
from loka.kernels.contract import KERNELS, Kernel, multiply
from loka.kernels.device import device_of
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
@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_each_row_of_the_weight_keeps_its_own_scale(name: str) -> None:
    weight = torch.randn(48, 64) * torch.logspace(-6, 6, 48)[:, None]
    check_product(able(name), Role.FPROP, {TensorName.X: torch.randn(33, 64), TensorName.W: weight}, torch.float32)


@pytest.mark.parametrize("name", ["onednn.int8", "onednn.int8_tensorwise"])
def test_long_sums_are_exact(name: str) -> None:
    x, weight = torch.full((17, 60_000), 127.0), torch.full((32, 60_000), 127.0)
    x[:, ::7] = 126.0
    check_product(able(name), Role.FPROP, {TensorName.X: x, TensorName.W: weight}, torch.float32)


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
    packed_for = onednn._pack_for_dynamic(torch.ones(8, 32, dtype=torch.int8), torch.ones(8, 1))
    for rows in range(1, 100):
        packed_for(rows)
    assert len(alive) == onednn.ROW_COUNTS_KEPT
    assert packed_for(99) in alive
    del packed_for
    assert not alive
