import pytest
import torch

from loka.core.errors import InvalidInput
from loka.train.config import Precision, TrainConfig
from loka.train.precision import autocast, matmul_precision, resolve_device

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def restore_precision():
    yield
    torch.set_float32_matmul_precision("highest")


def test_matmul_precision_is_set_within_the_block_and_given_back():
    for inside, expected in [(Precision.TF32, "tf32"), (Precision.FP32, "ieee"), (Precision.BF16, "ieee")]:
        for before in ("medium", "high", "highest"):
            torch.set_float32_matmul_precision(before)
            with matmul_precision(inside):
                assert torch.backends.cuda.matmul.fp32_precision == expected
                assert torch.backends.cuda.matmul.allow_tf32 == (expected == "tf32")  # raises where torch's two settings differ
            assert torch.get_float32_matmul_precision() == before


def test_a_caller_of_torchs_newer_interface_alone_gets_tf32_back():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with matmul_precision(Precision.FP32):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_a_precision_given_as_text_is_the_same():
    assert TrainConfig("dlrm", precision="bf16").precision is Precision.BF16
    with autocast("bf16", CPU):
        assert torch.is_autocast_enabled("cpu")


def test_autocast_changes_linears_and_leaves_look_ups():
    linear, table = torch.nn.Linear(4, 4), torch.nn.Embedding(3, 4)
    for precision, dtype in [(Precision.BF16, torch.bfloat16), (Precision.FP32, torch.float32)]:
        with autocast(precision, CPU):
            rows = table(torch.tensor([0, 1]))
            assert rows.dtype == torch.float32
            assert linear(rows).dtype == dtype


def test_devices_are_checked():
    assert resolve_device("cpu", Precision.BF16) == CPU
    with pytest.raises(InvalidInput, match="no device is called 'tpu': use auto, cpu"):
        resolve_device("tpu", Precision.FP32)
    with pytest.raises(InvalidInput, match="tensor cores"):
        resolve_device("cpu", Precision.TF32)
    if not torch.cuda.is_available():
        assert resolve_device("auto", Precision.FP32) == CPU
        with pytest.raises(InvalidInput, match="sees no GPU"):
            resolve_device("cuda", Precision.FP32)
