import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn
from torch.autograd import DeviceType

import loka.kernels
from loka.data.dataset import open_dataset
from loka.kernels.casting import CASTERS
from loka.kernels.executor import SiteKernels
from loka.models.registry import build_model
from loka.nn.linear import LokaLinear
from loka.train.config import TrainConfig
from loka.train.step_profile import (
    Kind,
    StepProfile,
    TimedKernel,
    _cpu_operators,
    kernels_on_device,
    kind_of,
    profile_calls,
    profile_kernels,
    profile_step,
    shares_of,
)
from loka.train.trainer import Trainer

BACKWARD = "autograd::engine::evaluate_function: "
COMPILED = ("## Call CompiledFxGraph f3 ##", "CompiledFunction")
AFTER_A_STEP = ("Optimizer.step#AdamW.step",)


@pytest.mark.parametrize(
    ("name", "ops", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", ("aten::mm", "Torch-Compiled Region: 0/0"), Kind.GEMM),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", ("aten::bmm", "CompiledFunctionBackward"), Kind.GEMM),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", ("aten::addmm",), Kind.GEMM),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", ("aten::mm", "CompiledFunctionBackward"), Kind.GEMM),
        ("triton_tem_fused_mm_3", ("triton_tem_fused_mm_3", "CompiledFunction"), Kind.GEMM),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", ("aten::_efficient_attention_forward",), Kind.ATTENTION),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", ("CompiledFunctionBackward",), Kind.ATTENTION),
        ("triton_per_fused_native_layer_norm_silu_4", ("CompiledFunction",), Kind.ELEMENTWISE),
        ("void at::native::vectorized_elementwise_kernel", ("aten::copy_", "## Call CompiledFxGraph f3 ##"), Kind.ELEMENTWISE),
        ("void at::native::vectorized_gather_kernel", ("aten::embedding", "loka.embeddings", "loka.model"), Kind.EMBEDDING),
        ("void at::native::elementwise_kernel", ("MulBackward0", BACKWARD + "MulBackward0"), Kind.EMBEDDING),
        ("void at::native::elementwise_kernel", ("EmbeddingBackward0", BACKWARD + "EmbeddingBackward0"), Kind.EMBEDDING),
        ("at_cuda_detail::cub::DeviceRadixSort", ("aten::unique", "Optimizer.step#RowWiseAdagrad.step"), Kind.EMBEDDING),
        ("void at::native::multi_tensor_apply_kernel", ("aten::_fused_adamw_", "Optimizer.step#AdamW.step"), Kind.OPTIMIZER),
        ("sm80_xmma_gemm_f32f32_f32f32", ("aten::mm", "loka.input"), Kind.INPUT),
        ("void at::native::elementwise_kernel", (BACKWARD + "BinaryCrossEntropyWithLogitsBackward0",), Kind.REST),
        ("void at::native::reduce_kernel", ("aten::sum",), Kind.REST),
    ],
)
def test_kernels_of_a_compiled_step_are_sorted_by_name_and_by_who_launched_them(name, ops, kind):
    assert kind_of(TimedKernel(name, ops, 1.0), compiled=True) is kind


@pytest.mark.parametrize(
    ("name", "ops", "kind"),
    [
        ("cast_kernel", ("loka::cast_e4m3", *COMPILED), Kind.CAST),
        ("cast_kernel", AFTER_A_STEP, Kind.CAST),  # weights, as the optimizer left them
        ("amax_kernel", AFTER_A_STEP, Kind.CAST),
        ("remember_kernel", AFTER_A_STEP, Kind.CAST),
        ("adam_cast_kernel", (), Kind.OPTIMIZER),
        ("adam_by_rows_kernel", AFTER_A_STEP, Kind.OPTIMIZER),
        ("rowwise_kernel", ("loka::cast_e4m3", "CompiledFunctionBackward"), Kind.CAST),
        ("rowwise_kernel", ("loka::cast_int8_rows", *COMPILED), Kind.CAST),
        ("Memset (Device)", ("aten::zero_", "aten::new_zeros", "loka::cast_e4m3", *COMPILED), Kind.CAST),  # room for amaxes
        ("Memset (Device)", ("aten::zero_", "loka::cast_int8_rows", *COMPILED), Kind.CAST),
        ("_kernel_quantize_fp8_row", ("fbgemm::quantize_fp8_per_row", *COMPILED), Kind.CAST),
        ("void fbgemm_gpu::quantize_fp8_per_row_kernel<true>", AFTER_A_STEP, Kind.CAST),
        ("gemm_kernel", ("loka::scaled_gemm", *COMPILED), Kind.GEMM),
        ("add_splits_kernel", ("loka::scaled_gemm", "CompiledFunctionBackward"), Kind.GEMM),
        ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_ovscale_TNT", ("aten::_scaled_mm", *COMPILED), Kind.GEMM),
        ("block_forward_kernel", ("loka::block_forward", *COMPILED), Kind.GEMM),
        ("norm_forward_kernel", ("loka::norm_forward", *COMPILED), Kind.ELEMENTWISE),
        ("gradient_kernel", ("loka::block_gradient", "CompiledFunctionBackward"), Kind.ELEMENTWISE),
        ("gradient_kernel", ("loka::norm_gradient", "CompiledFunctionBackward"), Kind.ELEMENTWISE),
        ("share_scales_kernel", ("loka::block_gradient", "CompiledFunctionBackward"), Kind.CAST),
        ("amax_kernel", ("loka::block_forward", *COMPILED), Kind.CAST),  # the kernel's own name says more than who launched it
    ],
)
def test_kernels_of_a_planned_step_are_sorted(name, ops, kind):
    assert kind_of(TimedKernel(name, ops, 1.0), compiled=True) is kind


@pytest.mark.parametrize(
    "name",
    [
        "triton_per_fused__to_copy_add_cast_e4m3_div_expand_hardswish_hardswish_backward_mul_11",
        "triton_poi_fused__to_copy_cast_e4m3_hardswish_mul_view_12",
        "triton_poi_fused_bmm_clone_3",
        "triton_red_fused_quantize_fp8_per_row_2",
        "triton_poi_fused__scaled_dot_product_flash_attention_backward_view_8",
    ],
)
def test_a_fused_kernel_is_not_what_it_is_named_after(name):
    """torch.compile names it after what lies around it, too; so are the ranges that tell of it."""
    assert kind_of(TimedKernel(name, (name, *COMPILED), 1.0), compiled=True) is Kind.ELEMENTWISE


def test_every_kernel_and_operator_of_ours_has_a_kind():
    """By the sources: Triton need not be there."""
    sources = [path.read_text() for path in Path(loka.kernels.__file__).parent.rglob("*.py")]
    kernels = {name for source in sources for name in re.findall(r"@triton\.jit\b.*\ndef ([a-z]\w*_kernel)\(", source)}
    operators = {f"loka::{name}" for source in sources for name in re.findall(r'@op\("(\w+)"', source)}
    ours = kernels | operators
    assert {"cast_kernel", "gemm_kernel", "block_forward_kernel", "loka::cast_e4m3"} <= ours
    # One that is not known by its name is sorted by who launched it, and one that nobody did is none's.
    steps = {name for name in ours if kind_of(TimedKernel(name, AFTER_A_STEP, 1.0), compiled=True) is Kind.OPTIMIZER}
    assert steps == {"adam_cast_kernel", "adam_by_rows_kernel"}
    assert {name for name in ours if kind_of(TimedKernel(name, (), 1.0), compiled=True) is Kind.REST} == set()


@pytest.mark.parametrize(
    ("name", "ops", "kind"),
    [
        ("aten::addmm", ("aten::linear", "loka.model"), Kind.GEMM),
        ("aten::native_layer_norm", ("aten::layer_norm", "loka.model"), Kind.ELEMENTWISE),
        ("aten::silu_backward", ("SiluBackward0", BACKWARD + "SiluBackward0"), Kind.ELEMENTWISE),
        ("aten::index_select", ("aten::embedding", "loka.embeddings", "loka.model"), Kind.EMBEDDING),
        ("aten::amax", ("loka.cast", "_Site", "loka.model"), Kind.CAST),
        ("aten::div", ("loka.cast", *AFTER_A_STEP), Kind.CAST),
        ("onednn::qlinear_prepack", ("loka::onednn_int8_mm", "_Site", "loka.model"), Kind.CAST),
        ("aten::select", ("quantized::linear_prepack", "loka::onednn_int8_dynamic_mm", "loka.model"), Kind.CAST),
        ("onednn::qlinear_pointwise", ("loka::onednn_int8_mm", "_Site", "loka.model"), Kind.GEMM),
        ("quantized::linear_dynamic", ("loka::onednn_int8_dynamic_mm", "loka.model"), Kind.GEMM),
        ("aten::mul_", ("loka::onednn_int8_mm", "_SiteBackward", BACKWARD + "_SiteBackward"), Kind.GEMM),  # by row scales
        ("aten::sum", ("_SiteBackward", BACKWARD + "_SiteBackward"), Kind.ELEMENTWISE),  # the gradient of a bias
    ],
)
def test_operators_of_an_eager_step_are_sorted(name, ops, kind):
    assert kind_of(TimedKernel(name, ops, 1.0), compiled=False) is kind


def test_shares_are_by_time_and_add_up():
    kernels = [TimedKernel("nvjet", (), 30.0), TimedKernel("nvjet", (), 30.0), TimedKernel("memset", (), 40.0)]
    shares = shares_of(kernels, compiled=True)
    assert shares[Kind.GEMM] == pytest.approx(0.6)
    assert shares[Kind.REST] == pytest.approx(0.4)
    assert sum(shares.values()) == pytest.approx(1)


class DeviceEvent:
    """As the profiler's: methods, not attributes."""

    def __init__(self, name, start, duration, launcher=0, device=DeviceType.CUDA):
        self.name, self.start_ns, self.duration_ns = (lambda: name), (lambda: start), (lambda: duration)
        self.linked_correlation_id, self.device_type = (lambda: launcher), (lambda: device)


def test_a_kernel_counts_once_and_knows_who_launched_it():
    step = SimpleNamespace(id=1, name="Optimizer.step#AdamW.step", cpu_parent=None, is_user_annotation=True)
    adam = SimpleNamespace(id=2, name="aten::_fused_adamw_", cpu_parent=step, is_user_annotation=False)
    launch = SimpleNamespace(id=2, name="cudaLaunchKernel", cpu_parent=adam, is_user_annotation=False)  # the same number
    first, second = DeviceEvent("multi_tensor", 0, 5000, 2), DeviceEvent("multi_tensor", 6000, 7000, 2)
    others = [
        DeviceEvent("Optimizer.step#AdamW.step", 0, 13000, 1),  # the range, mirrored onto the device
        DeviceEvent("aten::_fused_adamw_", 0, 9000, device=DeviceType.CPU),
        DeviceEvent("memset", 20000, 1000, 77),
    ]
    kernels = list(kernels_on_device([step, adam, launch], [first, second, first, *others]))
    ops = ("aten::_fused_adamw_", "Optimizer.step#AdamW.step")
    assert kernels == [
        TimedKernel("multi_tensor", ops, 5.0),
        TimedKernel("multi_tensor", ops, 7.0),
        TimedKernel("memset", (), 1.0),
    ]
    assert kind_of(kernels[0], compiled=True) is Kind.OPTIMIZER


def test_a_profile_with_more_kernel_time_than_step_is_not_believed():
    assert StepProfile(1.0, 1.0, busy=1.0, shares={}).is_sound
    assert not StepProfile(1.0, 1.0, busy=18.2, shares={}).is_sound


def test_the_device_is_busy_by_the_kernels_of_one_step(monkeypatch):
    """Three steps of 2 ms are profiled, with kernels of 1.5 ms in each."""
    clock = {"ms": 0}
    kernels = [TimedKernel("gemm", (), 3000.0), TimedKernel("gemm", (), 1500.0)]
    monkeypatch.setattr("loka.train.step_profile.time.perf_counter", lambda: clock["ms"] / 1e3)
    monkeypatch.setattr("loka.train.step_profile.profile_kernels", lambda run, model, compiled: run() and kernels)
    found = profile_calls(
        lambda: clock.update(ms=clock["ms"] + 2), nn.Linear(1, 1), 64, compiled=False, warmup=1, timed=5, profiled=3
    )
    assert (found.step_ms, found.busy) == (pytest.approx(2), pytest.approx(0.75))
    assert found.samples_per_s == pytest.approx(64 / 2e-3)


def test_an_operator_takes_its_own_time_without_those_inside_it():
    def event(name, own_us, total_us, parent=None, is_range=False):
        times = {"self_cpu_time_total": own_us, "cpu_time_total": total_us}
        return SimpleNamespace(name=name, cpu_parent=parent, is_user_annotation=is_range, **times)

    around = event("loka.model", 5.0, 15.0, is_range=True)
    outer = event("aten::linear", 2.0, 10.0)
    inner = event("aten::addmm", 8.0, 8.0, parent=outer)
    found = list(_cpu_operators(SimpleNamespace(events=lambda: [around, outer, inner])))
    assert found == [TimedKernel("aten::linear", (), 2.0), TimedKernel("aten::addmm", ("aten::linear",), 8.0)]


def test_a_step_on_the_cpu_has_a_share_of_every_kind_it_does():
    config = TrainConfig("wukong", "tiny", batch_size=64, device="cpu", out=None)
    data = open_dataset("synthetic", onehot_sizes=[9, 99])
    trainer = Trainer(build_model("wukong", "tiny", data.schema), config)
    profile = profile_step(trainer, data.train(64), warmup=1, timed=2, profiled=1)
    assert trainer.steps_done == 4
    assert profile.samples_per_s == pytest.approx(64 / (profile.step_ms / 1e3))
    for kind in (Kind.GEMM, Kind.ELEMENTWISE, Kind.EMBEDDING, Kind.OPTIMIZER, Kind.INPUT, Kind.REST):
        assert profile.shares[kind] > 0, kind
    assert "forward" not in vars(trainer.model)


def test_casts_of_a_planned_step_on_the_cpu_are_seen_wherever_they_are_made():
    """Of activations, of gradients, and of weights after the optimizer's step; by operators that others use too."""
    config = TrainConfig("wukong", "tiny", batch_size=64, device="cpu", out=None)
    data = open_dataset("synthetic", onehot_sizes=[9, 99])
    model = build_model("wukong", "tiny", data.schema)
    parent, name = next(
        (module, name)
        for module in model.dense_part.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.Linear) and min(child.in_features, child.out_features) >= 32
    )
    batch, kernels = next(data.train(64)), SiteKernels.same("onednn.int8")
    high = Trainer(model, config)
    high.step(batch)
    assert shares_of(profile_kernels(lambda: high.step(batch), model, compiled=False), compiled=False)[Kind.CAST] == 0
    setattr(parent, name, LokaLinear.from_linear(getattr(parent, name), kernels))
    planned = Trainer(model, config)
    planned.step(batch)
    casts = [
        kernel
        for kernel in profile_kernels(lambda: planned.step(batch), model, compiled=False)
        if kind_of(kernel, compiled=False) is Kind.CAST and kernel.name == "aten::amax"
    ]
    # x by rows for fprop and by columns for wgrad; dy for dgrad and for wgrad; w for fprop and for dgrad.
    assert ["_SiteBackward" in kernel.ops for kernel in casts].count(True) == 2
    assert [AFTER_A_STEP[0] in kernel.ops for kernel in casts].count(True) == 2
    assert len(casts) == 6
    assert all("cast" not in vars(caster) for _, caster in CASTERS.items())
