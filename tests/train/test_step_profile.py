from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from loka.data.dataset import open_dataset
from loka.models.registry import build_model
from loka.train.config import TrainConfig
from loka.train.step_profile import Kind, StepProfile, TimedKernel, kernels_on_device, kind_of, profile_step, shares_of
from loka.train.trainer import Trainer

BACKWARD = "autograd::engine::evaluate_function: "


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
        ("aten::addmm", ("aten::linear", "loka.model"), Kind.GEMM),
        ("aten::native_layer_norm", ("aten::layer_norm", "loka.model"), Kind.ELEMENTWISE),
        ("aten::silu_backward", ("SiluBackward0", BACKWARD + "SiluBackward0"), Kind.ELEMENTWISE),
        ("aten::index_select", ("aten::embedding", "loka.embeddings", "loka.model"), Kind.EMBEDDING),
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
