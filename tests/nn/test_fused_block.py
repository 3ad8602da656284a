"""Fused blocks against float64 of the same mathematics: no more error than casting each GEMM's operands separately has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_block import emulate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import loka
from loka.core.recipe import Format, Scaling
from loka.kernels.triton.block import Wanted
from loka.nn import fused_block, fused_function, fused_steps
from loka.nn.block_reference import block_reference
from loka.nn.fused_block import FusedBlock, FusedChain
from loka.nn.weight_casts import held
from loka.numerics.metrics import relative_rms
from loka.numerics.scaling import dequantize, quantize

ACTIVATIONS = {"hard_swish": nn.Hardswish, "relu": nn.ReLU, "none": nn.Identity}
MOST = 1.2  # times the error of casting separately
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2e-3}  # of outputs, beside FP8's 0.03


def make_block(k: int, n: int, *, bias: bool = True, activation: str = "hard_swish", block: int | None = 256) -> FusedBlock:
    """``block`` is the norm's; None for a block without a norm."""
    norm = None if block is None else loka.BlockNorm(n, block)
    return FusedBlock.from_modules(nn.Linear(k, n, bias), norm, ACTIVATIONS[activation]())


def cast_apart(x: Tensor) -> Tensor:
    """The oracle's e4m3 with a scale a row, as values."""
    return dequantize(quantize(x.float(), Format.E4M3, Scaling.ROWWISE), torch.float64)


class SeparateLinear(torch.autograd.Function):
    """All three GEMMs of a linear layer at float64, each with its own operands cast: all the error is that of the casts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return cast_apart(x) @ cast_apart(w).t()

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return cast_apart(dz) @ cast_apart(w.t()).t(), cast_apart(dz.t()) @ cast_apart(x.t()).t()


def separate_block(x: Tensor, w: Tensor, b: Tensor | None, norm: nn.Module | None, activation: nn.Module) -> Tensor:
    z = SeparateLinear.apply(x, w)
    z = z if b is None else z + b
    return activation(z if norm is None else norm(z))


def run_by_hand(how: Callable[..., Tensor], chain: FusedChain, x: Tensor, dys: list[Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients of the chain's mathematics at float64, each block computed by ``how``."""
    x = x.detach().double().requires_grad_()
    parameters = {name: p.detach().double().requires_grad_() for name, p in chain.named_parameters()}
    y = x if chain.entry is None else chain.entry(x)
    ys = []
    for index, block in enumerate(chain.blocks):
        weight, bias = parameters[f"blocks.{index}.weight"], parameters.get(f"blocks.{index}.bias")
        y = how(y, weight, bias, block.norm, block.activation)
        ys.append(y)
    ys = [ys[index] for index in chain.outputs]
    grads = torch.autograd.grad(ys, [x, *parameters.values()], [dy.double() for dy in dys])
    return {**_named_outputs(ys), **dict(zip(["x", *parameters], grads, strict=True))}


def run_fused(chain: FusedChain, x: Tensor, dys: list[Tensor]) -> dict[str, Tensor]:
    assert chain.why_reference is None
    x = x.detach().requires_grad_()
    out = chain(x)
    ys = list(out) if isinstance(out, tuple) else [out]
    parameters = dict(chain.named_parameters())
    grads = torch.autograd.grad(ys, [x, *parameters.values()], dys)
    return {**_named_outputs(ys), **dict(zip(["x", *parameters], grads, strict=True))}


def _named_outputs(ys: list[Tensor]) -> dict[str, Tensor]:
    return {f"outputs.{index}.y": y.detach() for index, y in enumerate(ys)}


def check(chain: FusedChain, m: int, device: torch.device, dtype: torch.dtype = torch.float32, slack: float = 0.0) -> None:
    """Every output and gradient: error at most MOST times that of casting separately, and ``slack`` where samples are few."""
    chain = chain.to(device, dtype)
    k = chain.blocks[0].in_features
    x = torch.randn(m, k, device=device).to(dtype)
    dys = [1e-3 * torch.randn(m, chain.blocks[index].out_features, device=device).to(dtype) for index in chain.outputs]
    exact = run_by_hand(block_reference, chain, x, dys)
    separate = run_by_hand(separate_block, chain, x, dys)
    fused = run_fused(chain, x, dys)
    assert {name: value.dtype for name, value in fused.items()} == dict.fromkeys(exact, dtype)
    for name, value in fused.items():
        error, apart = (float(relative_rms(got, exact[name])) for got in (value, separate[name]))
        most = MOST * apart + slack + ROUNDING[dtype]
        assert error <= most, f"{name}: error {error:.4f}, and {apart:.4f} if cast separately"


@pytest.mark.parametrize("block", [256, None], ids=["norm", "no norm"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("m", "k", "n"), [(150, 100, 257), (128, 64, 512)])
def test_error_is_that_of_casting_separately(
    fused_on: torch.device, m: int, k: int, n: int, activation: str, block: int | None
) -> None:
    torch.manual_seed(m)
    check(FusedChain([make_block(k, n, activation=activation, block=block)]), m, fused_on)


def test_gradients_of_weights_are_summed_in_full(emulated: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows there are; the other products are short."""
    summed: dict[int, bool] = {}  # by the rows of the output

    def noted(
        a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, m: int, *sizes: int, promoted: bool, **options: Any
    ) -> Tensor:
        summed[m] = promoted
        return gemm(a, b, a_scale, b_scale, m, *sizes, promoted=promoted, **options)

    gemm = fused_steps.gemm
    monkeypatch.setattr(fused_steps, "gemm", noted)
    torch.manual_seed(0)
    check(FusedChain([make_block(64, 288)]), 128, emulated)
    assert summed == {288: True, 128: False}  # dw, dx


def _cpu_multiplies_with_row_scales() -> bool:
    codes, scale = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), scale, scale.t(), out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not _cpu_multiplies_with_row_scales(), reason="torch 2.11 has no row scales on the CPU")
@pytest.mark.parametrize("entry", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_long_contractions_go_through_cublas(
    emulated: torch.device, bias: bool, entry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if they began at 32: products of both directions, the norm's pass behind forward's, and none where there is a bias.
    wgrad reads all with one scale; all are summed in full."""
    monkeypatch.setattr("loka.nn.fused_steps.is_promoted", lambda contraction: contraction >= 32)
    monkeypatch.setattr("loka.nn.fused_steps._has_cublas", lambda codes: True)
    multiply, shapes, scales = torch._scaled_mm, [], []

    def noted(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, use_fast_accum: bool, **options: Any) -> Tensor:
        assert not use_fast_accum
        shapes.append((*a.shape, b.shape[1]))
        scales.append((a_scale.numel(), b_scale.numel()))
        return multiply(a, b, a_scale, b_scale, use_fast_accum=use_fast_accum, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    torch.manual_seed(0)
    blocks = [make_block(64, 288, bias=bias), make_block(288, 96, bias=bias, activation="relu")]
    check(FusedChain(blocks, entry=loka.BlockNorm(64) if entry else None), 128, emulated)
    forward = [] if bias else [(128, 64, 288), (128, 288, 96)]
    assert shapes == [*forward, (96, 128, 288), (128, 96, 288), (288, 128, 64), (128, 288, 64)]
    assert scales[-4::2] == [(1, 1), (1, 1)]  # wgrad's


@pytest.mark.gpu
@pytest.mark.parametrize("block", [256, None], ids=["norm", "no norm"])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(2048, 256, 768), (6144, 1024, 1024), (2048, 4096, 1000), (2048, 8192, 512), (1024, 16384, 512), (1024, 32768, 512)],
)
def test_error_at_the_sizes_of_models(m: int, k: int, n: int, block: int | None) -> None:
    torch.manual_seed(0)
    check(FusedChain([make_block(k, n, block=block)]), m, torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("entry", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chains_hand_on_fp8(fused_on: torch.device, entry: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    blocks = [make_block(90, 300), make_block(300, 64, bias=False, activation="none"), make_block(64, 96)]
    chain = FusedChain(blocks, entry=loka.BlockNorm(90) if entry else None, outputs=(0, 2))
    check(chain, 100, fused_on, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norms", [(None, None, None), (256, None, 256), (None, 256, None)], ids=str)
def test_chains_go_on_where_a_norm_is_missing(
    fused_on: torch.device, norms: tuple[int | None, ...], dtype: torch.dtype
) -> None:
    """A block without a norm is handed codes of one constant scale, or hands on codes with a scale a row, or both."""
    torch.manual_seed(1)
    layers = ((90, 300, "relu"), (300, 64, "hard_swish"), (64, 96, "none"))
    blocks = [
        make_block(k, n, activation=activation, block=block) for (k, n, activation), block in zip(layers, norms, strict=True)
    ]
    check(FusedChain(blocks, outputs=(0, 2)), 300, fused_on, dtype, slack=0.01)  # 64 gradients of a bias are few


@settings(max_examples=40)
@given(
    m=st.integers(1, 140),
    k=st.integers(16, 150),
    n=st.integers(16, 300),
    block=st.sampled_from([None, 16, 100, 256]),
    activation=st.sampled_from(["hard_swish", "none"]),
    bias=st.booleans(),
    entry=st.booleans(),
)
def test_any_shape(
    emulated: torch.device, m: int, k: int, n: int, block: int | None, activation: str, bias: bool, entry: bool
) -> None:
    """Relu is left out: where its mask flips, a handful of rows differs by more than any number of them on average. Hard-swish
    has kinks too, which one row alone may show."""
    torch.manual_seed(m + k + n)
    norm = loka.BlockNorm(k, block or 256) if entry else None
    check(
        FusedChain([make_block(k, n, bias=bias, activation=activation, block=block)], entry=norm),
        m,
        emulated,
        slack=0.06 + 0.2 / m,
    )


@pytest.mark.parametrize("norms", [(32, 256), (None, None), (None, 32), (256, None)], ids=str)
def test_kernels_compute_what_their_emulation_does(
    kernels_on: torch.device, norms: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one small shape with tails everywhere; the kernels' own tests range over shapes."""
    torch.manual_seed(0)
    blocks = [make_block(20, 40, activation="relu", block=norms[0]), make_block(40, 17, block=norms[1])]
    chain = FusedChain(blocks, entry=loka.BlockNorm(20), outputs=(0, 1)).to(kernels_on)
    x, *dys = (torch.randn(21, size, device=kernels_on) for size in (20, 40, 17))
    by_kernels = run_fused(chain, x, dys)
    emulate(monkeypatch)
    loka.refresh(chain)
    for name, value in run_fused(chain, x, dys).items():
        # A sum that falls on the other side of a tie is rounded to the neighbouring code: tensor cores keep 14 bits of it, and
        # on a CPU Triton's interpreter cuts bf16 off instead of rounding it.
        assert relative_rms(by_kernels[name], value) < 0.03, name


@pytest.mark.parametrize("norm", [256, None], ids=["norm", "no norm"])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (3, 1, 33), (2, 17, 1)])
def test_tiny_shapes_give_what_the_reference_does(fused_on: torch.device, m: int, k: int, n: int, norm: int | None) -> None:
    torch.manual_seed(0)
    block = make_block(k, n, activation="none", block=norm).to(fused_on)
    x = torch.randn(m, k, device=fused_on, requires_grad=True)
    y = block(x)
    torch.testing.assert_close(y, block.reference(x), rtol=0.15, atol=0.05)
    y.sum().backward()
    for tensor in (x, *block.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


def test_gradients_of_the_reference_are_its_derivatives() -> None:
    """At float64 and away from the kinks, where differences of finite steps mean nothing."""
    torch.manual_seed(0)
    norm = loka.BlockNorm(20, block=8)
    w, b = torch.randn(20, 6, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    for activation, kinks in ((nn.Hardswish(), (-3.0, 3.0)), (nn.ReLU(), (0.0,)), (None, ())):
        x = torch.randn(5, 6, dtype=torch.float64)
        u = norm(x @ w.t() + b)
        assert all((u - kink).abs().min() > 1e-4 for kink in kinks)
        inputs = tuple(tensor.clone().requires_grad_() for tensor in (x, w, b))
        assert torch.autograd.gradcheck(lambda x, w, b, a=activation: block_reference(x, w, b, norm, a), inputs, eps=1e-7)


def _changed(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Break a function by changing some of its arguments, by name or position, or its ``result``."""

    def breaking(function: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*args: Any, **kwargs: Any) -> Any:
            arguments = [changes.get(f"arg{index}", lambda arg: arg)(arg) for index, arg in enumerate(args)]
            return changes.get("result", lambda result: result)(function(*arguments, **kwargs))

        return broken

    return breaking


def _rolled(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).roll(1, 0).view(codes.dtype)  # torch rolls no FP8 on a GPU


BREAKS = {
    "norm": ("block_forward", _changed(arg9=lambda eps: eps + 0.5)),
    "norm's gradient": ("block_gradient", _changed(arg2=lambda rstd: rstd * 1.2)),
    "entry's norm": ("norm_forward", _changed(arg0=lambda x: x[:, :1] * x)),
    "entry's gradient": ("norm_input_backward", _changed(result=lambda dx: dx * 1.5)),
    "activation": ("block_forward", _changed(arg10=lambda activation: "relu")),
    "activation's gradient": ("block_gradient", _changed(arg4=lambda activation: "none")),
    "scale of the input": ("block_forward", _changed(arg2=lambda factor: factor * 1.5)),
    "scale of the weight": ("block_forward", _changed(arg4=lambda scale_N: scale_N.mean().expand_as(scale_N).contiguous())),
    "scale in wgrad": ("backward_block", _changed(arg3=lambda factor: factor * 1.2)),
    "scale of the transposed weight": ("backward_block", _changed(arg5=lambda scale: 1.2 * scale)),
    "transposed weight": ("backward_block", _changed(arg4=lambda codes_KN: _rolled(codes_KN))),
    "transposed input": ("_handed_on", _changed(result=lambda x: x._replace(codes_KM=_rolled(x.codes_KM)))),
    "rows of the batch": ("_handed_on", _changed(result=lambda x: x._replace(codes_MK=_rolled(x.codes_MK)))),
}


BREAKS_WITHOUT_NORM = {
    "activation": ("block_forward", _changed(arg10=lambda activation: "relu")),
    "activation's gradient": ("block_gradient", _changed(arg4=lambda activation: "relu")),
    "what backward reads": (
        "block_gradient",
        _changed(arg1=lambda u_MN: 1.5 * u_MN if u_MN.dtype is torch.bfloat16 else u_MN),
    ),
    "bias": ("block_forward", _changed(arg5=lambda bias_N: 1.1 * bias_N)),
    "codes handed on": ("cast_by_rows", _changed(result=lambda made: (_rolled(made[0]), *made[1:]))),
    "scales handed on": ("cast_by_rows", _changed(result=lambda made: (made[0], 1.2 * made[1], *made[2:]))),
    "transposed codes handed on": ("cast_by_rows", _changed(result=lambda made: (*made[:2], _rolled(made[2]), made[3]))),
    "their scale": ("cast_by_rows", _changed(result=lambda made: (*made[:3], 1.2 * made[3]))),
}


@pytest.mark.parametrize(
    ("stage", "norm"), [(stage, 256) for stage in BREAKS] + [(stage, None) for stage in BREAKS_WITHOUT_NORM]
)
def test_each_stage_is_missed(fused_on: torch.device, stage: str, norm: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above must fail when any one stage is wrong."""
    name, breaking = BREAKS[stage] if norm else BREAKS_WITHOUT_NORM[stage]
    torch.manual_seed(2)
    with torch.no_grad():
        blocks = [make_block(64, 300, block=norm), make_block(300, 64, block=norm)]
        for block in blocks:
            if norm:  # rows of unlike scale; without a norm many rows of the batch would fall on either side of a kink
                block.weight *= torch.randn(block.out_features, 1).exp()
            block.bias.normal_(std=1.0)
    chain = FusedChain(blocks, entry=loka.BlockNorm(64)).to(fused_on)
    check(chain, 64, fused_on)
    where = next(module for module in (fused_function, fused_block, fused_steps) if hasattr(module, name))  # who calls it
    monkeypatch.setattr(where, name, breaking(getattr(where, name)))
    with pytest.raises(AssertionError, match="if cast separately"):
        check(chain, 64, fused_on)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saves_less_than_half_of_what_the_block_in_bf16_does(fused_on: torch.device, dtype: torch.dtype) -> None:
    def saved_bytes(module: nn.Module, x: Tensor) -> int:
        casts = [tensor for part in module.modules() for tensor in held(part).values()]
        own = {tensor.data_ptr() for tensor in (*module.parameters(), *casts)}
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in own:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x.requires_grad_())
        return sum(storages.values())

    m, k, n = 256, 128, 512
    bf16 = nn.Sequential(nn.Linear(k, n, bias=False), nn.LayerNorm(n), nn.SiLU()).to(fused_on, torch.bfloat16)
    fused = make_block(k, n, bias=False).to(fused_on, dtype)
    high = saved_bytes(bf16, torch.randn(m, k, device=fused_on, dtype=torch.bfloat16))
    low = saved_bytes(fused, torch.randn(m, k, device=fused_on, dtype=dtype))
    assert low <= m * (k + n) + 4 * (k + 2 * m)  # codes of x and of the normed output; scales, and rstd of two blocks
    assert low <= high / 2


def test_serving_writes_nothing_for_backward(fused_on: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Wanted] = []
    original = fused_steps.block_forward

    def spy(*args: Any) -> Any:
        asked.append(args[-1])
        return original(*args)

    monkeypatch.setattr(fused_steps, "block_forward", spy)
    chain = FusedChain([make_block(32, 48), make_block(48, 32)]).to(fused_on)
    with torch.no_grad():
        chain(torch.randn(4, 32, device=fused_on))
    assert asked == [Wanted(codes=True), Wanted(high=torch.float32)]


@pytest.mark.parametrize(
    ("norm", "activation", "bias", "saved"),
    [
        (256, "hard_swish", False, torch.float8_e4m3fn),
        (256, "hard_swish", True, torch.bfloat16),  # the gradient of a bias needs more than codes
        (None, "hard_swish", True, torch.bfloat16),
        (None, "relu", True, None),  # y tells as much
        (None, "none", True, None),
    ],
)
def test_backward_is_left_no_more_than_it_needs(
    fused_on: torch.device, norm: int | None, activation: str, bias: bool, saved: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked: list[Wanted] = []
    original = fused_steps.block_forward
    monkeypatch.setattr(fused_steps, "block_forward", lambda *args: asked.append(args[-1]) or original(*args))
    block = make_block(32, 48, bias=bias, activation=activation, block=norm).to(fused_on)
    block(torch.randn(4, 32, device=fused_on))
    assert asked == [Wanted(torch.float32, saved=saved)]
