"""Launches go to the GPU that their tensors lie on, and find the kernel that Triton compiled for such arguments."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import triton

from loka.kernels.triton import launch as launch_module
from loka.kernels.triton.launch import launch, on_its_gpu, recorded


def test_the_first_arguments_gpu_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [torch.device("cuda", 0)]

    @contextmanager
    def device(other: torch.device):  # type: ignore[no-untyped-def]
        current.append(other)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1].index)
    launched = on_its_gpu(lambda x, factor=1: (current[-1], factor))
    on_first, on_second = (
        SimpleNamespace(is_cuda=True, device=torch.device("cuda", index), get_device=lambda index=index: index)
        for index in range(2)
    )
    assert launched(on_second, factor=3) == (torch.device("cuda", 1), 3)
    assert launched(on_first, factor=3) == (torch.device("cuda", 0), 3)
    assert launched(torch.ones(2), factor=3) == (torch.device("cuda", 0), 3)
    assert current == [torch.device("cuda", 0)]


class Compiled:
    """Stands for what Triton compiled: keeps what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args: self.launches.append((grid, *args))


class Kernel(triton.JITFunction):
    """A kernel (x_ptr, size, factor, LENGTH, NORM) whose every way through Triton compiles anew."""

    def __init__(self) -> None:
        self.arg_names = ["x_ptr", "size", "factor", "LENGTH", "NORM"]
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled]:
        def run(*args: object, **options: object) -> Compiled:
            assert options.keys() == {"LENGTH", "NORM", "num_warps", "num_stages", "launch_pdl"}
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch_module, "_compiled", {})
    return Kernel()


NAMES = """
import sys
from loka.kernels.triton import block_kernels, cast_kernels, gemm_kernels, launch
if "named" in sys.argv:
    launch.name_kernels()
kernels = [cast_kernels.amax_kernel, cast_kernels.cast_kernel, gemm_kernels.gemm_kernel, block_kernels.norm_forward_kernel]
order = range(len(kernels))
names = {index: kernels[index].cache_key for index in (reversed(order) if "reversed" in sys.argv else order)}
print(*(names[index] for index in order))
"""


def names(*how: str) -> list[str]:
    """What Triton keeps kernels by, in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    return subprocess.check_output([sys.executable, "-c", NAMES, *how], env=environment, text=True).split()


def test_kernels_have_the_same_names_in_all_processes_whatever_was_compiled_first() -> None:
    assert names("named") == names("named", "reversed")
    assert names() != names("reversed"), "Triton has come to do it by itself: name_kernels has no use any more"


class TestLaunch:
    x = torch.zeros(64)

    def start(self, kernel: Kernel, *args: object, grid: int = 3, **options: int | bool) -> None:
        launch(kernel, (grid, 1, 1), *(args or (self.x, 48, 0.5)), **({"NORM": True, "LENGTH": 16, "num_warps": 4} | options))

    def test_the_second_time_by_the_compiled_kernel_s_own_handle(self, kernel: Kernel) -> None:
        self.start(kernel)
        self.start(kernel, grid=5)
        (compiled,) = kernel.compiled
        assert compiled.launches == [((5, 1, 1), self.x, 48, 0.5, 16, True)]  # in the order of the kernel's parameters

    @pytest.mark.parametrize(
        "other",
        [
            {"args": (x.bfloat16(), 48, 0.5)},
            {"args": (x[1:], 48, 0.5)},  # no longer at a multiple of 16 bytes
            {"args": (x, 1, 0.5)},
            {"args": (x, 47, 0.5)},
            {"args": (None, 48, 0.5)},
            {"LENGTH": 32},
            {"NORM": False},
            {"num_warps": 8},
            {"num_stages": 2},
        ],
        ids=str,
    )
    def test_what_triton_compiles_for_is_told_apart(self, kernel: Kernel, other: dict) -> None:  # type: ignore[type-arg]
        self.start(kernel)
        self.start(kernel, *other.get("args", ()), **{name: value for name, value in other.items() if name != "args"})
        assert len(kernel.compiled) == 2

    def test_all_kernels_are_named_before_one_is_compiled(self, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        compiled_when_named: list[int] = []
        monkeypatch.setattr(launch_module, "name_kernels", lambda: compiled_when_named.append(len(kernel.compiled)))
        self.start(kernel)
        self.start(kernel)
        assert compiled_when_named == [0]

    def test_another_gpu_has_a_handle_of_its_own(self, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.start(kernel)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        self.start(kernel)
        assert len(kernel.compiled) == 2

    def test_sizes_without_end_do_not_fill_the_memory(self, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch_module, "MOST_KNOWN", 10)
        for size in range(100):
            self.start(kernel, self.x, size, 0.5)
        assert len(launch_module._compiled) <= 10

    def test_recorded_ones_are_made_again_and_only_they(self, kernel: Kernel) -> None:
        def work() -> None:
            self.start(kernel, grid=1)
            self.start(kernel, grid=2)

        launches = recorded(work)
        self.start(kernel, grid=9)
        (compiled,) = kernel.compiled
        compiled.launches.clear()
        for again in launches:
            again()
        assert [grid for (grid, *_) in compiled.launches] == [(1, 1, 1), (2, 1, 1)]


@pytest.mark.gpu
def test_kernels_run_on_a_gpu_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU here")
    from loka.nn.fused_steps import cast_weight

    weight_NK = torch.randn(256, 512, device="cuda:1")
    codes = cast_weight(weight_NK)
    torch.testing.assert_close(codes.codes_NK.float() * codes.scale_N.view(-1, 1), weight_NK, rtol=0.07, atol=1e-3)
