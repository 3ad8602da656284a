"""FusedBlock and FusedChain as modules: all that a module lives through, and where they give way to the reference."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from cuda_graphs import captured
from torch import Tensor, nn
from torch.nn.utils import prune

import loka
from loka.core.errors import InvalidInput
from loka.nn.fused_block import FusedBlock, FusedChain, link_blocks
from loka.nn.weight_casts import held
from loka.numerics.metrics import relative_rms


def make_block(k: int = 48, n: int = 40, *, bias: bool = True) -> FusedBlock:
    return FusedBlock.from_modules(nn.Linear(k, n, bias), loka.BlockNorm(n), nn.Hardswish())


def without_norm(k: int, n: int, activation: nn.Module | None) -> FusedBlock:
    return FusedBlock.from_modules(nn.Linear(k, n), None, activation)


def make_model() -> nn.Sequential:
    """Three layers as a user writes them."""
    layers: list[nn.Module] = []
    for k, n in ((48, 40), (40, 64), (64, 32)):
        layers += [nn.Linear(k, n), loka.BlockNorm(n), nn.Hardswish()]
    return nn.Sequential(*layers)


def fuse(model: nn.Sequential) -> list[FusedBlock]:
    """Put a block in the place of each linear layer, and nothing in the places of what it absorbs."""
    blocks = []
    for index in range(0, len(model), 3):
        block = FusedBlock.from_modules(model[index], model[index + 1], model[index + 2])  # type: ignore[arg-type]
        model[index], model[index + 1], model[index + 2] = block, nn.Identity(), nn.Identity()
        blocks.append(block)
    return blocks


def run(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Output, and gradients of x and of the parameters."""
    x = x.detach().requires_grad_()
    y = module(x)
    return (y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy))


def assert_all_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], rtol: float = 1e-5) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=rtol * float(wanted.abs().max()))


class TestFaceOfTheLinear:
    def test_it_shares_parameters_and_state_dict(self, fused_on: torch.device) -> None:
        linear = nn.Linear(48, 40).to(fused_on)
        block = FusedBlock.from_modules(linear, loka.BlockNorm(40), nn.ReLU())
        assert [id(p) for p in block.parameters()] == [id(p) for p in linear.parameters()]
        assert list(block.state_dict()) == ["weight", "bias"]
        nn.Linear(48, 40).load_state_dict(block.state_dict())

    def test_a_fused_model_keeps_its_checkpoints(self, emulated: torch.device) -> None:
        model = make_model()
        names = list(model.state_dict())
        blocks = fuse(model)
        link_blocks(blocks)
        assert list(model.state_dict()) == names

    @pytest.mark.parametrize("training", [True, False])
    def test_it_is_in_the_mode_of_the_linear(self, training: bool) -> None:
        linear = nn.Linear(48, 40).train(training)
        assert FusedBlock.from_modules(linear, loka.BlockNorm(40), nn.ReLU()).training is training

    def test_leading_axes_are_kept(self, fused_on: torch.device) -> None:
        block = make_block().to(fused_on)
        x = torch.randn(3, 5, 48, device=fused_on)
        assert torch.equal(block(x), block(x.reshape(15, 48)).reshape(3, 5, 40))
        assert block(x[0, 0]).shape == (40,)

    def test_rows_with_gaps_between_them(self, fused_on: torch.device) -> None:
        block = make_block().to(fused_on)
        wide = torch.randn(20, 99, device=fused_on)
        dy = torch.randn(40, 20, device=fused_on).t()
        assert_all_close(run(block, wide[:, 7:55], dy), run(block, wide[:, 7:55].contiguous(), dy.contiguous()))

    def test_empty_batch_trains(self, fused_on: torch.device) -> None:
        chain = FusedChain([make_block(), make_block(40, 24)]).to(fused_on)
        y, dx, *of_parameters = run(chain, torch.empty(0, 48, device=fused_on), torch.empty(0, 24, device=fused_on))
        assert (y.shape, dx.shape) == ((0, 24), (0, 48))
        assert not any(grad.any() for grad in of_parameters)

    def test_repr_says_how_it_runs(self, emulated: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        block = make_block()
        assert "in_features=48, out_features=40, bias=True, fused" in repr(block)
        monkeypatch.undo()
        assert "in high precision: needs an NVIDIA GPU" in repr(block.to("cpu"))

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (torch.randn(4, 7), r"expected input of shape \(..., 48\), got \(4, 7\)"),
            (torch.randn(4, 48, dtype=torch.bfloat16), "input is torch.bfloat16, the weight torch.float32"),
        ],
    )
    def test_bad_input_says_what_is_expected(self, x: Tensor, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            make_block()(x)

    def test_modules_that_do_not_fit_are_refused(self) -> None:
        with pytest.raises(InvalidInput, match="gives 40 features, the norm behind it takes 41"):
            FusedBlock.from_modules(nn.Linear(48, 40), loka.BlockNorm(41), None)
        with pytest.raises(InvalidInput, match="remove its parametrization"):
            FusedBlock.from_modules(nn.utils.parametrizations.weight_norm(nn.Linear(48, 40)), loka.BlockNorm(40), None)
        with pytest.raises(InvalidInput, match="block 1 of the chain reads 48 features, but gets 40"):
            FusedChain([make_block(), make_block()])
        with pytest.raises(InvalidInput, match="block 0 of the chain reads 48 features, but gets 32"):
            FusedChain([make_block()], entry=loka.BlockNorm(32))
        with pytest.raises(InvalidInput, match="block 0 of the chain reads 48 features, but gets 32"):
            FusedBlock.from_modules(nn.Linear(48, 40), None, None, loka.BlockNorm(32))
        entered = FusedBlock.from_modules(nn.Linear(40, 40), None, None, loka.BlockNorm(40))
        with pytest.raises(InvalidInput, match="a norm of its own in front: give the chain that norm"):
            FusedChain([entered])
        with pytest.raises(InvalidInput, match="a norm of its own in front"):
            link_blocks([make_block(), entered])
        with pytest.raises(InvalidInput, match=r"outputs must name some of 1 blocks by their index, got \(1,\)"):
            FusedChain([make_block()], outputs=(1,))
        for outputs in ((0,), (1, 1), (-1, 1)):
            with pytest.raises(InvalidInput, match="each block once, and the last of 2 among them"):
                FusedChain([make_block(), make_block(40)], outputs=outputs)
        with pytest.raises(InvalidInput, match="at least one block"):
            FusedChain([])
        with pytest.raises(InvalidInput, match=r"block 1 of the chain must be a FusedBlock, got Linear: make it with"):
            FusedChain([make_block(), nn.Linear(40, 40)])
        with pytest.raises(InvalidInput, match="linear must be a Linear, got ReLU: norm and activation come behind it"):
            FusedBlock.from_modules(nn.ReLU(), None, None)


class TestReference:
    @pytest.mark.parametrize(
        ("norm", "activation", "reason"),
        [
            (None, nn.SiLU(), "the activation SiLU is not one the kernels know.*hard_swish"),
            (nn.LayerNorm(512), nn.Hardswish(), "LayerNorm is no BlockNorm.*apply the Mod block_norm"),
            (loka.BlockNorm(512, block=512), nn.Hardswish(), "blocks of 512 features, and a tile holds 256"),
            (loka.BlockNorm(512), nn.SiLU(), "the activation SiLU is not one the kernels know.*hard_swish"),
        ],
    )
    def test_what_no_kernel_computes_runs_in_high_precision(
        self, emulated: torch.device, norm: nn.Module | None, activation: nn.Module, reason: str
    ) -> None:
        linear = nn.Linear(48, 512)
        block = FusedBlock.from_modules(linear, norm, activation)
        assert block.why_reference is not None
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(block.why_reference)
        x, dy = torch.randn(6, 48), torch.randn(6, 512)
        by_modules = nn.Sequential(linear, *([norm] if norm else []), activation)
        assert_all_close(run(block, x, dy), run(by_modules, x, dy))
        assert not held(block)

    def test_on_a_cpu_a_chain_is_its_modules(self) -> None:
        model = make_model()
        x, dy = torch.randn(6, 48), torch.randn(6, 32)
        expected = run(model, x, dy)
        blocks = fuse(model)
        chain = FusedChain(blocks, outputs=(0, 2))
        assert chain.why_reference == "needs an NVIDIA GPU"
        assert torch.equal(chain(x)[1], expected[0])
        link_blocks(blocks)
        assert_all_close(run(model, x, dy), expected)

    def test_other_dtypes(self, emulated: torch.device) -> None:
        block = make_block().double()
        assert block.why_reference == "reads bf16, fp16, fp32, not torch.float64"
        assert block(torch.randn(3, 48, dtype=torch.float64)).dtype is torch.float64
        assert block.float().why_reference is None

    def test_a_weight_that_is_made_in_every_call_is_not_cast(self, emulated: torch.device) -> None:
        """It may draw: codes of one draw would learn by the gradient of another."""
        block, x = make_block(), torch.randn(8, 48)
        assert not torch.equal(block(x), block.reference(x))
        prune.random_unstructured(block, "weight", 0.5)
        assert torch.equal(block(x), block.reference(x))

    def test_what_it_holds_moves_along(self) -> None:
        block = FusedBlock.from_modules(nn.Linear(16, 16), None, nn.PReLU()).double()
        assert {parameter.dtype for parameter in block.parameters()} == {torch.float64}
        assert block(torch.randn(3, 16, dtype=torch.float64)).dtype is torch.float64

    def test_a_chain_runs_fused_what_it_can(self, emulated: torch.device) -> None:
        odd = FusedBlock.from_modules(nn.Linear(40, 24), nn.LayerNorm(24), nn.Hardswish())
        blocks = [make_block(), odd, make_block(24, 32)]
        chain = FusedChain(blocks)
        assert chain.why_reference is not None
        x = torch.randn(6, 48)
        assert torch.equal(chain(x), blocks[2](odd.reference(blocks[0](x))))
        assert not torch.equal(blocks[0](x), blocks[0].reference(x))


class TestWeightCasts:
    """The codes must follow the weight however it moves, or training runs on stale values in silence."""

    def is_current(self, block: FusedBlock) -> bool:
        """Both copies within the rounding of e4m3."""
        held, weight_NK = block.tensors(), block.weight.detach().float()

        def holds(codes: Tensor, scale: Tensor, weight: Tensor) -> bool:
            value = codes[:, : weight.shape[1]].float() * scale
            return bool(((value - weight).abs() <= weight.abs() / 15 + scale * 2.0**-9).all())

        return holds(held.codes_NK, held.scale_N, weight_NK) and holds(held.codes_KN, held.scale_KN, weight_NK.t())

    def test_optimizers_and_refresh(self, fused_on: torch.device) -> None:
        block = make_block().to(fused_on)
        before = {name: tensor.data_ptr() for name, tensor in held(block).items()}
        optimizer = torch.optim.AdamW(block.parameters(), lr=0.1, fused=True)
        block(torch.randn(8, 48, device=fused_on)).sum().backward()
        optimizer.step()
        assert self.is_current(block)
        block.weight.data.mul_(torch.rand(40, 1, device=fused_on))
        assert not self.is_current(block)
        loka.refresh(nn.Sequential(block))
        assert self.is_current(block)
        assert before == {name: tensor.data_ptr() for name, tensor in held(block).items()}
        assert len(before) == 4  # codes and scales of both orders

    def test_weights_loaded_in_their_place_run_where_they_lie(self, emulated: torch.device) -> None:
        """As a model is that was made without memory."""
        on_cpu = make_block()
        without_memory = nn.Linear(48, 40, device="meta", dtype=torch.float64)
        block = FusedBlock.from_modules(without_memory, loka.BlockNorm(40), nn.Hardswish())
        assert block.why_reference is not None
        block.load_state_dict(on_cpu.state_dict(), assign=True)
        assert block.why_reference is None
        x = torch.randn(3, 48)
        assert torch.equal(block(x), on_cpu(x))

    def test_load_state_dict(self, fused_on: torch.device) -> None:
        block = make_block().to(fused_on)
        block.load_state_dict(nn.Linear(48, 40).state_dict())
        assert self.is_current(block)

    @pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
    def test_copies_follow_their_own_weight(self, fused_on: torch.device, copier: Callable[[nn.Module], nn.Module]) -> None:
        model = make_model().to(fused_on)
        link_blocks(fuse(model))
        other = copier(model)
        assert isinstance(other, nn.Sequential)
        x = torch.randn(8, 48, device=fused_on)
        before = model(x)
        assert torch.equal(other(x), before)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        other(x).sum().backward()
        optimizer.step()
        assert all(self.is_current(block) for block in other if isinstance(block, FusedBlock))
        assert torch.equal(model(x), before)
        assert not torch.equal(other(x), before)

    def test_change_of_dtype_and_device(self, emulated: torch.device) -> None:
        block = make_block().to(torch.bfloat16)
        assert {tensor.dtype for tensor in held(block).values()} == {torch.float8_e4m3fn, torch.float32}
        assert block(torch.randn(4, 48, dtype=torch.bfloat16)).dtype is torch.bfloat16
        assert self.is_current(block)
        assert not held(block.to("meta").double())


def test_linked_blocks_are_one_chain(fused_on: torch.device) -> None:
    model = make_model().to(fused_on)
    blocks = fuse(model)
    chain = FusedChain(copy.deepcopy(blocks))
    x, dy = torch.randn(20, 48, device=fused_on), torch.randn(20, 32, device=fused_on)
    apart = model(x)
    link_blocks(blocks)
    assert_all_close(run(model, x, dy), run(chain, x, dy), rtol=0.0)
    assert not torch.equal(model(x), apart)  # codes of a constant scale went between them, not a dynamic cast's
    with pytest.raises(InvalidInput, match="linked already"):
        link_blocks(blocks[1:])


def test_a_norm_in_front_of_the_first_hands_it_fp8(fused_on: torch.device) -> None:
    model = make_model().to(fused_on)
    blocks, entry = fuse(model), loka.BlockNorm(48)
    first = FusedBlock(blocks[0].weight, blocks[0].bias, blocks[0].norm, blocks[0].activation, entry)
    x, dy = 3 * torch.randn(20, 48, device=fused_on), torch.randn(20, 32, device=fused_on)
    reference = block_reference_of(copy.deepcopy(blocks), entry)
    chain = FusedChain(copy.deepcopy(blocks), entry=entry)
    model[0] = first
    link_blocks([first, *blocks[1:]])
    assert_all_close(run(model, x, dy), run(chain, x, dy), rtol=0.0)
    assert "entry" not in "".join(model.state_dict())
    assert relative_rms(model(x), reference(x)) < 0.1
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def block_reference_of(blocks: list[FusedBlock], entry: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        x = entry(x)
        for block in blocks:
            x = block.reference(x)
        return x

    return run


def test_a_norm_in_front_that_no_kernel_computes(emulated: torch.device) -> None:
    block = FusedBlock.from_modules(nn.Linear(48, 40), loka.BlockNorm(40), nn.ReLU(), nn.LayerNorm(48))
    assert "LayerNorm is no BlockNorm" in str(block.why_reference)
    x = torch.randn(7, 48)
    torch.testing.assert_close(block(x), block.reference(nn.LayerNorm(48)(x)))


def test_autocast_gives_its_dtype_and_full_gradients(fused_on: torch.device) -> None:
    block = make_block().to(fused_on)
    x = torch.randn(8, 48, device=fused_on)
    with torch.autocast(fused_on.type, torch.bfloat16):
        y, *grads = run(block, x, torch.ones(8, 40, device=fused_on, dtype=torch.bfloat16))
    assert y.dtype is torch.bfloat16
    assert {grad.dtype for grad in grads} == {torch.float32}
    torch.testing.assert_close(y.float(), block(x.bfloat16().float()).detach(), rtol=0.01, atol=0.01)
    assert torch.equal(grads[0], grads[0].bfloat16().float())  # dgrad wrote what autocast asks for, and no more bytes


def test_autocast_leaves_what_a_norm_in_front_reads(fused_on: torch.device) -> None:
    """Rounded to fp16, large values would be infinite, and all others of their norm block 0 behind it."""
    block = FusedBlock.from_modules(nn.Linear(48, 40), loka.BlockNorm(40), nn.ReLU(), loka.BlockNorm(48)).to(fused_on)
    x = 1e5 * torch.randn(8, 48, device=fused_on)
    with torch.autocast(fused_on.type, torch.float16):
        y, dx, *_ = run(block, x, torch.ones(8, 40, device=fused_on, dtype=torch.float16))
    assert (y.dtype, dx.dtype) == (torch.float16, torch.float32)
    assert relative_rms(y.double(), block.chain_reference(x).double()) < 0.1


@pytest.mark.parametrize("frozen", ["x", "blocks.0.weight", "blocks.1.weight", "blocks.0.bias", "all of block 0 and x"])
def test_only_what_needs_a_gradient_gets_one(fused_on: torch.device, frozen: str) -> None:
    torch.manual_seed(0)  # of eight rows some draws round worse than the rest
    chain = FusedChain([make_block(), make_block(40, 24)]).to(fused_on)
    inputs = {"x": torch.randn(8, 48, device=fused_on, requires_grad=True), **dict(chain.named_parameters())}
    dy = torch.randn(8, 24, device=fused_on)
    expected = dict(zip(inputs, torch.autograd.grad(chain(inputs["x"]), list(inputs.values()), dy), strict=True))
    stopped = ("x", "blocks.0.weight", "blocks.0.bias") if frozen.startswith("all") else (frozen,)
    for name in stopped:
        inputs[name].requires_grad_(False)
    chain(inputs["x"]).backward(dy)
    for name, tensor in inputs.items():
        assert (tensor.grad is None) == (name in stopped)
        if tensor.grad is not None:  # what is saved of a block whose bias learns is less rounded
            assert relative_rms(tensor.grad, expected[name]) <= (0.1 if frozen == "blocks.0.bias" else 0.0)


def test_a_second_derivative_is_refused(fused_on: torch.device) -> None:
    x = torch.randn(8, 48, device=fused_on, requires_grad=True)
    (dx,) = torch.autograd.grad(make_block().to(fused_on)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_into_one_graph_and_changes_nothing(kernels_on: torch.device) -> None:
    blocks = [make_block(20, 40, bias=False), without_norm(40, 17, nn.ReLU()), without_norm(17, 20, nn.Hardswish())]
    chain = FusedChain(blocks, entry=loka.BlockNorm(20), outputs=(0, 1, 2)).to(kernels_on)
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager" if kernels_on.type == "cpu" else "inductor")
    x = torch.randn(5, 4, 20, device=kernels_on, requires_grad=True)
    results = []
    for module in (compiled, chain):
        ys = module(x)
        results.append((*(y.detach() for y in ys), *torch.autograd.grad([y.sin().sum() for y in ys], [x, *chain.parameters()])))
    assert_all_close(*results, rtol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
def test_linked_blocks_compile(emulated: torch.device) -> None:
    model = make_model()
    link_blocks(fuse(model))
    x, dy = torch.randn(20, 48), torch.randn(20, 32)
    assert_all_close(run(torch.compile(model, fullgraph=True, backend="aot_eager"), x, dy), run(model, x, dy), rtol=1e-4)


@pytest.mark.gpu
class TestOnTheGpu:
    device = torch.device("cuda")

    def big(self) -> tuple[FusedChain, Tensor, Tensor]:
        torch.manual_seed(0)
        blocks = [make_block(1024, 1024), without_norm(1024, 512, nn.ReLU()), make_block(512, 768)]
        chain = FusedChain(blocks).to(self.device, torch.bfloat16)
        x, dy = (torch.randn(2048, size, device=self.device, dtype=torch.bfloat16) for size in (1024, 768))
        return chain, x, dy

    def test_runs_are_equal_to_the_last_bit(self) -> None:
        chain, x, dy = self.big()
        first = run(chain, x, dy)
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(run(chain, x, dy), first, strict=True))

    def test_the_host_never_waits(self) -> None:
        chain, x, dy = self.big()
        run(chain, x, dy)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(chain, x, dy)
            loka.refresh(chain)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def test_graph_replay_of_a_whole_step_trains(self) -> None:
        """Forward, backward, fused AdamW and the refresh of the codes in one CUDA graph."""
        chain, x, dy = self.big()
        target = torch.randn_like(dy).clamp(min=0)
        optimizer = torch.optim.AdamW(chain.parameters(), lr=1e-3, fused=True, capturable=True)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = (chain(x) - target).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        graph, loss = captured(step)
        losses = []
        for _ in range(30):
            graph.replay()
            losses.append(loss.item())
        assert losses[-1] < 0.9 * losses[0]
        with torch.no_grad():
            torch.testing.assert_close((chain(x) - target).float().square().mean().item(), losses[-1], rtol=0.05, atol=0)
