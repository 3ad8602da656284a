"""INT8 on the CPU through oneDNN: torch's own build of it, so nothing else to install.

On x86 torch multiplies codes as they lie into int32 sums, by oneDNN's plain GEMM. Scales are applied by operations that
torch.compile sees, and puts into the norm and activation behind them.

On Arm torch has a plain loop for that. There oneDNN's fast int8 is that of the Arm Compute Library, behind torch's quantized
linear layer. It wants b in blocks of its own. Packing costs more than a small GEMM, so it is done with the cast of b and kept
for as long as the codes live. A packed b is found by the identity of its codes and their version, which moves whenever a weight
cast is refreshed in place. It takes one scale for all of b, so b's own scales are applied in a pass over the output. Given b's
scales, oneDNN falls back on code that took 214 ms for 2048×1024×1024, where fp32 took 68 and one scale 20 (Neoverse-N1, 2
threads, torch 2.13).
"""

import platform
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from loka.core.gemm import Device, GemmProblem, Role
from loka.core.recipe import Format, Recipe, Scaling
from loka.kernels.casting import CASTERS, CastProblem
from loka.kernels.contract import add_kernel
from loka.kernels.device import constant_when_traced
from loka.kernels.operand import Form, Layout, Operand, OperandSpec
from loka.kernels.ops import fake_of, op
from loka.kernels.written import written
from loka.numerics.scaling import scale_from_amax

SHORTEST_CONTRACTION = 17  # up to 16 oneDNN runs its reference code: 330 ms where fp32 takes 0.2 (Xeon with AMX, 2048×13×512)
LONGEST_CONTRACTION = 2**31 // 127**2  # past it the int32 sum of products can overflow

# The largest b that torch's own loop over int8 may multiply with: 256 rows of a take 2 ms (Xeon without VNNI, torch 2.13).
MOST_LOOPED = 128**2

IS_ARM = platform.machine() in ("aarch64", "arm64")
ROW_COUNTS_KEPT = 4  # of a weight that is packed for each, on Arm: a server whose batches all differ must not fill the memory

B_SPEC = OperandSpec(Format.INT8, Scaling.ROWWISE)


def _missing(device: Device, overflows: Callable[[], bool]) -> str | None:
    if device.type != "cpu":
        return "runs on the CPU alone"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if overflows():
        return "needs a CPU with VNNI or AMX: without, oneDNN adds products of int8 up in 16 bits, which overflow"
    return None


@cache
def _overflows() -> bool:
    """Whether products of the largest codes come out wrong: with AVX2 or AVX-512 alone, sums of oneDNN's stop at 32,767. Where
    torch sees that the CPU has no more, it multiplies by a loop of its own: right, and slow."""
    k = 64
    codes_1K = torch.full((1, k), 127, dtype=torch.int8, device="cpu")
    if not IS_ARM:
        return torch._int_mm(codes_1K, codes_1K.t()).item() != k * 127**2
    scale = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    return onednn_int8_mm(codes_1K, scale, codes_1K, scale, None, torch.float32, True).item() != k * 127**2


@cache
def _dynamic_overflows() -> bool:
    """The same of torch's dynamically quantized linear layer, which has no loop of its own."""
    k = 64
    codes_1K = torch.full((1, k), 127, dtype=torch.int8, device="cpu")
    scale, ones_1K = (torch.ones(1, n, dtype=torch.float32, device="cpu") for n in (1, k))
    return onednn_int8_dynamic_mm(ones_1K, codes_1K, scale).item() < 0.9 * k * 127


@constant_when_traced
def _is_looped() -> bool:
    """Whether torch multiplies plain int8 matrices by a loop of its own, which takes 23 to 43 times as long as fp32: on x86 it
    goes by the instructions of the CPU."""
    return not IS_ARM and not torch.cpu._is_vnni_supported()  # AVX-512's alone


def _why_not(problem: GemmProblem, *, by_linear: bool) -> str | None:
    if by_linear and problem.k < SHORTEST_CONTRACTION:
        return f"oneDNN has no fast code for contractions under {SHORTEST_CONTRACTION}, got k={problem.k}"
    if problem.k > LONGEST_CONTRACTION:
        return f"int32 sums can overflow past k={LONGEST_CONTRACTION}, got k={problem.k}"
    return None


@dataclass(frozen=True)
class OnednnInt8:
    """int8 codes of both operands, multiplied exactly, scales applied to the int32 sums."""

    variant: str
    a_scaling: Scaling

    @property
    def name(self) -> str:
        return f"onednn.{self.variant}"

    def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
        return OperandSpec(Format.INT8, self.a_scaling), replace(B_SPEC, layout=Layout.ONEDNN) if IS_ARM else B_SPEC

    def recipe(self, role: Role) -> Recipe:
        return Recipe(Format.INT8, self.a_scaling, Format.INT8, Scaling.ROWWISE)

    def missing(self, device: Device) -> str | None:
        return _missing(device, _overflows)

    def why_not(self, problem: GemmProblem) -> str | None:
        """Refuses what takes long where it is slow, as ``torch.bf16`` does: a measurement makes dozens of them."""
        if _is_looped() and problem.n * problem.k > MOST_LOOPED:
            return (
                "takes weights of up to 128×128 alone: on a CPU without AVX512-VNNI torch multiplies int8 by a plain loop, "
                "which took a Xeon 23 to 43 times as long as fp32"
            )
        return _why_not(problem, by_linear=IS_ARM)

    def multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        assert a.scale is not None
        assert b.scale is not None
        multiply = torch.ops.loka.onednn_int8_mm if IS_ARM else _multiply_as_they_lie
        return multiply(a.codes, a.scale, b.codes, b.scale, bias, out_dtype, self.a_scaling is Scaling.TENSORWISE)


def _multiply_as_they_lie(
    a_MK: Tensor,
    a_scale: Tensor,
    b_NK: Tensor,
    b_scale_N1: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    one_scale: bool,
) -> Tensor:
    """(a·bᵀ)·scales + bias, on x86. ``one_scale`` says whether a has one for all its values; its size does not, since a single
    row has one too."""
    sums_MN, b_scale_1N = _int_sums(a_MK, b_NK), b_scale_N1.t()
    # Eager, each operation is a pass over the product: one where there is one scale, two otherwise.
    scaled_MN, scale = (sums_MN, a_scale * b_scale_1N) if one_scale else (sums_MN * a_scale, b_scale_1N)
    out_MN = scaled_MN * scale if bias_N is None else torch.addcmul(bias_N, scaled_MN, scale)
    return out_MN.to(out_dtype)


def _int_sums(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """a·bᵀ in int32. ``torch._int_mm`` leaves its result unwritten where strides do not tell how a matrix lies: those of one
    column, and unusual ones of one row, which torch.compile may choose for b."""
    if a_MK.shape[1] == 1:
        return a_MK.int() * b_NK.t().int()
    if b_NK.shape[0] == 1:
        return (a_MK.int() * b_NK.int()).sum(1, keepdim=True, dtype=torch.int32)
    return torch._int_mm(a_MK.reshape(a_MK.shape), b_NK.t())


@dataclass(frozen=True)
class OnednnInt8Dynamic:
    """torch's dynamically quantized linear. It casts a itself, to unsigned int8 with one scale and zero point, and packs b in
    its own way."""

    name: str = "onednn.int8_dynamic"

    def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
        return OperandSpec(Format.FP32), B_SPEC

    def recipe(self, role: Role) -> Recipe:
        return Recipe(Format.INT8, Scaling.TENSORWISE, Format.INT8, Scaling.ROWWISE)

    def missing(self, device: Device) -> str | None:
        if "onednn" not in torch.backends.quantized.supported_engines:
            return "this build of torch has no quantized engine onednn"
        return _missing(device, _dynamic_overflows)

    def why_not(self, problem: GemmProblem) -> str | None:
        if problem.role is not Role.FPROP:
            return "its cast of a floors the scale at 6e-5, which flushes small gradients to zero"
        return _why_not(problem, by_linear=True)

    def multiply(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        out = torch.ops.loka.onednn_int8_dynamic_mm(a.codes, b.codes, b.scale).to(out_dtype)
        return out if bias is None else out + bias.to(out_dtype)


@CASTERS.register("onednn")
class OnednnCaster:
    """int8 with row or tensor scales on the CPU, in a third of the oracle's passes; it packs b too."""

    def why_not(self, form: Form, problem: CastProblem) -> str | None:
        if problem.device.type != "cpu" or form.spec.format is not Format.INT8:
            return "writes int8 on the CPU alone"
        if form.spec.scaling not in (Scaling.ROWWISE, Scaling.TENSORWISE):
            return f"writes row and tensor scales, not {form.spec.scaling}"
        return None

    def cast(self, tensor: Tensor, forms: Sequence[Form]) -> list[Operand]:
        return [_cast(tensor.t() if form.transposed else tensor, form.spec) for form in forms]


def _cast(x: Tensor, spec: OperandSpec) -> Operand:
    rowwise = spec.scaling is Scaling.ROWWISE
    extremes = _extremes_of_rows(x) if rowwise else _extremes(x)
    if extremes is None:
        scale = x.new_ones(x.shape[0] if rowwise else 1, 1, dtype=torch.float32)
    else:  # half the time of abs().amax()
        lowest, highest = extremes
        # Written, or it would be made anew for each value that it scales: a layer between a norm and an activation then takes
        # 1.1 to 1.2 times as long (Xeon with VNNI, 2026-11-19).
        scale = written(scale_from_amax(torch.maximum(highest, -lowest).float().view(-1, 1), Format.INT8))
    # No clamp: |x| is at most 127 scales. Under a NaN scale codes are undefined, but times the scale they are NaN all the same.
    codes = torch.div(x, scale).round_().to(torch.int8).contiguous()
    if spec.layout is Layout.ONEDNN and not _is_packed_late(codes):
        _PACKED_FOR_INT8.get(codes)
    return Operand(codes, scale, x.shape[0], x.shape[1], spec)


def _is_packed_late(codes: Tensor) -> bool:
    """Whether codes are packed where they are multiplied, not here: in a traced graph, for each of the models that vmap goes
    over, and in inference mode, where nothing packed is kept."""
    return torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(codes) or codes.is_inference()


def _extremes_of_rows(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The lowest and the highest value of each row, of which there may be none; None where rows have no values."""
    return (x.amin(1), x.amax(1)) if x.shape[1] else None


def _extremes(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The lowest and the highest of all values. aminmax reads them once; by rows it would take five times as long."""
    if not (isinstance(x.shape[0], torch.SymInt) or torch.compiler.is_exporting()):
        return None if x.numel() == 0 else torch.aminmax(x)
    zero = x.new_zeros(1)  # changes no scale, and is there when an exported program is given no rows
    return (torch.cat([x.amin(1), zero]).amin(), torch.cat([x.amax(1), zero]).amax()) if x.shape[1] else None


Packed = TypeVar("Packed")
_choosing_the_engine = threading.Lock()  # it is torch's, for all threads


class _PackedCache(Generic[Packed]):
    """What ``pack`` made of a tensor, kept until the tensor is gone or its version moves."""

    def __init__(self, pack: Callable[..., Packed]) -> None:
        self._pack = pack
        self._entries = WeakTensorKeyDictionary()

    def get(self, codes: Tensor, *details: Tensor) -> Packed:
        if codes.is_inference():  # without a version nobody can tell whether it was written since
            return self._pack(codes, *details)
        version = codes._version
        entry = self._entries.get(codes)
        if entry is None or entry[0] != version:
            entry = (version, self._pack(codes, *details))
            self._entries[codes] = entry
        return entry[1]


def _pack_for_int8(codes_NK: Tensor) -> Tensor:
    return torch.ops.onednn.qlinear_prepack(codes_NK, None)


class _Dynamic(NamedTuple):
    packed: Callable[[int], object]  # the packed weight for a number of rows of a
    alone: AbstractContextManager[object]  # held during the product


def _pack_for_dynamic(codes_NK: Tensor, scale_N1: Tensor) -> _Dynamic:
    weight_NK = _quantized(codes_NK, scale_N1)
    if IS_ARM:
        # A packed weight is right for the number of rows of its first call alone: with another, torch takes a for unsigned, by
        # a zero point for signed values (https://github.com/pytorch/pytorch/issues/145216). And two threads that multiply by it
        # at once crash the process.
        return _Dynamic(lru_cache(ROW_COUNTS_KEPT)(lambda rows: _pack_quantized(weight_NK)), threading.Lock())
    packed = _pack_quantized(weight_NK)
    return _Dynamic(lambda rows: packed, nullcontext())


def _quantized(codes_NK: Tensor, scale_N1: Tensor) -> Tensor:
    """A copy of the codes as a quantized tensor of torch's, with their scales where oneDNN is to apply them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized dtypes are deprecated, but on Arm nothing else casts a as fast yet
        if IS_ARM:
            return torch._make_per_tensor_quantized_tensor(codes_NK, 1.0, 0)
        zeros_N = torch.zeros(codes_NK.shape[0], dtype=torch.long)
        return torch._make_per_channel_quantized_tensor(codes_NK, scale_N1.flatten().double(), zeros_N, 0)


def _pack_quantized(weight_NK: Tensor) -> object:
    engines = torch.backends.quantized
    with _choosing_the_engine:
        before, engines.engine = engines.engine, "onednn"  # packing remembers the engine; multiplying does not ask again
        try:
            return torch.ops.quantized.linear_prepack(weight_NK, None)
        finally:
            engines.engine = before


_PACKED_FOR_INT8 = _PackedCache(_pack_for_int8)
_PACKED_FOR_DYNAMIC = _PackedCache(_pack_for_dynamic)


@cache
def _zero() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cpu")


@op("onednn_int8_mm", "CPU")
def onednn_int8_mm(
    a_MK: Tensor,
    a_scale: Tensor,
    b_NK: Tensor,
    b_scale_N1: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    one_scale: bool,
) -> Tensor:
    """The same on Arm. oneDNN applies a tensor scale of a. Row scales of a, and those of b, are applied in passes over the
    sums."""
    if not a_MK.shape[0]:  # as an exported program may be given
        return a_MK.new_empty((0, b_NK.shape[0]), dtype=out_dtype)
    if not IS_ARM:  # such a program was exported on Arm; by the quantized linear layer it would take a thousand times as long
        return _multiply_as_they_lie(a_MK, a_scale, b_NK, b_scale_N1, bias_N, out_dtype, one_scale)
    rowwise = not one_scale
    out_MN = torch.ops.onednn.qlinear_pointwise.tensor(
        a_MK,
        a_scale.new_ones(1) if rowwise else a_scale.flatten(),
        _zero(),
        _PACKED_FOR_INT8.get(b_NK),
        b_scale_N1.new_ones(1),
        _zero(),
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
    if rowwise:
        out_MN.mul_(a_scale)
    out_MN.mul_(b_scale_N1.flatten())
    if bias_N is not None:
        out_MN.add_(bias_N)
    return out_MN.to(out_dtype)


@fake_of("onednn_int8_mm")
def _(
    a_MK: Tensor,
    a_scale: Tensor,
    b_NK: Tensor,
    b_scale_N1: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    one_scale: bool,
) -> Tensor:
    return a_MK.new_empty((a_MK.shape[0], b_NK.shape[0]), dtype=out_dtype)


@op("onednn_int8_dynamic_mm", "CPU")
def onednn_int8_dynamic_mm(a_MK: Tensor, b_NK: Tensor, b_scale_N1: Tensor) -> Tensor:
    if not a_MK.shape[0]:
        return a_MK.new_empty((0, b_NK.shape[0]))
    dynamic = _PACKED_FOR_DYNAMIC.get(b_NK, b_scale_N1.nan_to_num(nan=1.0))
    # torch's cast of a either raises on NaN or takes it for a number. Both extremes are finite only where all values are.
    is_finite_M1 = a_MK.amax(1, keepdim=True).isfinite() & a_MK.amin(1, keepdim=True).isfinite()
    is_nan_N = b_scale_N1.flatten().isnan()
    is_whole = is_finite_M1.all() and not is_nan_N.any()
    finite_MK = a_MK if is_whole else a_MK.masked_fill(~is_finite_M1, 0.0)
    with dynamic.alone:
        out_MN = torch.ops.quantized.linear_dynamic(finite_MK, dynamic.packed(a_MK.shape[0]), False)
    if IS_ARM:
        out_MN.mul_(b_scale_N1.flatten())
    return out_MN if is_whole else out_MN.masked_fill_(~is_finite_M1 | is_nan_N, torch.nan)


@fake_of("onednn_int8_dynamic_mm")
def _(a_MK: Tensor, b_NK: Tensor, b_scale_N1: Tensor) -> Tensor:
    return a_MK.new_empty((a_MK.shape[0], b_NK.shape[0]))


add_kernel(OnednnInt8("int8", Scaling.ROWWISE))
add_kernel(OnednnInt8("int8_tensorwise", Scaling.TENSORWISE))
add_kernel(OnednnInt8Dynamic())
