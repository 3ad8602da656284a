"""A frozen model whose weights or codes are written, loaded or moved in unusual ways serves what it holds, or says why not."""

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from int8_here import where_they_run
from plans import batch, plan_for, tower
from torch import nn

import loka
from loka.core.errors import InvalidInput
from loka.core.plan import Goal
from loka.kernels.executor import SiteKernels

KERNELS = where_they_run("onednn.int8", "onednn.int8_dynamic")
SITES = ("bottom", "top.0", "top.2")


def frozen(model: nn.Module, kernel: str, *, drop: bool) -> nn.Module:
    loka.apply_plan(model, plan_for(model, dict.fromkeys(SITES, SiteKernels.same(kernel)), goal=Goal.SERVING))
    loka.freeze(model, drop_high_precision=drop)
    return model


def loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("again", [loaded, copy.deepcopy])
def test_one_that_was_copied_in_inference_mode_serves_what_is_loaded_into_it(
    again: Callable[[nn.Module], nn.Module], kernel: str, drop: bool
) -> None:
    newer, x = frozen(tower(1), kernel, drop=drop), batch(17)
    expected = newer(x)
    with torch.inference_mode():
        copied = again(frozen(tower(), kernel, drop=drop))
        assert not torch.equal(copied(x), expected)
        copied.load_state_dict(newer.state_dict())
        assert torch.equal(copied(x), expected)
    assert torch.equal(copied(x), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_codes_of_no_version_are_packed_anew(kernel: str) -> None:
    """As in an exported program that was loaded in inference mode: nobody can tell whether they were written."""
    model, newer, x = frozen(tower(), kernel, drop=True), frozen(tower(1), kernel, drop=True), batch(17)
    with torch.inference_mode():
        for name, buffer in list(model.named_buffers()):
            model.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer.clone()
        assert not torch.equal(model(x), newer(x))
        model.load_state_dict(newer.state_dict())
        assert torch.equal(model(x), newer(x))


def test_weights_that_were_kept_are_refreshed_beside_those_that_were_dropped() -> None:
    class ReadsOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.second(self.first(x).relu()).relu()) + 1e-6 * self.second.weight.square().sum()

    model = ReadsOne()
    plan = plan_for(model, dict.fromkeys(("first", "second"), SiteKernels.same("onednn.int8")), goal=Goal.SERVING)
    negative = copy.deepcopy(model)
    with torch.no_grad():
        negative.second.weight.neg_()
    for one in (model, negative):
        loka.apply_plan(one, plan)
        loka.freeze(one, drop_high_precision=True)
    x = batch(17)
    model.second.weight.data.neg_()
    assert not torch.equal(model(x), negative(x))
    loka.refresh(model)
    assert torch.equal(model(x), negative(x))


@pytest.mark.parametrize("kernel", KERNELS)
def test_codes_written_past_autograd_are_packed_again_by_a_refresh(kernel: str) -> None:
    """As another process writes them, where they lie in shared memory: their versions do not move."""
    model, newer, x = frozen(tower(), kernel, drop=True), frozen(tower(1), kernel, drop=True), batch(17)
    with torch.no_grad():
        model(x)
        for mine, theirs in zip(model.state_dict().values(), newer.state_dict().values(), strict=True):
            mine.data.copy_(theirs)
        loka.refresh(model)
        assert torch.equal(model(x), newer(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_codes_are_made_of_the_weights_that_training_saved(kernel: str, assign: bool) -> None:
    model, newer, x = frozen(tower(), kernel, drop=True), frozen(tower(1), kernel, drop=True), batch(17)
    model.load_state_dict(tower(1).state_dict(), assign=assign)
    with torch.no_grad():
        assert torch.equal(model(x), newer(x))
    for mine, theirs in zip(model.state_dict().values(), newer.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    wider = tower(1).state_dict()
    wider["top.2.weight"] = torch.randn(32, 49)
    with pytest.raises(RuntimeError, match=r"top\.2\.weight is \(32, 49\), and this model's \(32, 48\)"):
        model.load_state_dict(wider)


def test_codes_made_of_weights_in_inference_mode_may_be_written_again() -> None:
    model, saved, x = frozen(tower(), "onednn.int8", drop=True), tower(1).state_dict(), batch(17)
    with torch.inference_mode():
        model.load_state_dict(saved, assign=True)
    model.load_state_dict(tower(2).state_dict())
    with torch.no_grad():
        assert torch.equal(model(x), frozen(tower(2), "onednn.int8", drop=True)(x))


def test_codes_are_made_of_weights_while_the_model_is_in_float64() -> None:
    model, x = frozen(tower(), "onednn.int8", drop=True).double(), batch(17)
    model.load_state_dict(tower(1).double().state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model.float()(x), frozen(tower(1), "onednn.int8", drop=True)(x))


@pytest.mark.parametrize("transform", ["center", "rescale"])
def test_a_transforms_vector_stays_where_weights_are_loaded(transform: str) -> None:
    vectors = {f"bottom/{transform}": torch.full((24,), 2.0)}
    kernels = {"bottom": SiteKernels.same("reference.int8_rowwise")}

    def served(seed: int) -> nn.Module:
        model = tower(seed)
        loka.apply_plan(model, plan_for(model, kernels, goal=Goal.SERVING, vectors=vectors))
        loka.freeze(model, drop_high_precision=True)
        return model

    model, x = served(0), batch(17)
    model.load_state_dict(tower(1).state_dict())
    with torch.no_grad():
        assert torch.equal(model(x), served(1)(x))
    emptied = served(0).to("meta").to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r'Missing key.*"bottom\.features"'):
        emptied.load_state_dict(tower(1).state_dict())
    emptied.load_state_dict(served(1).state_dict())
    with torch.no_grad():
        assert torch.equal(emptied(x), served(1)(x))
    emptied.load_state_dict(tower(2).state_dict())  # it has its vector again


def test_weights_loaded_in_float64_are_cast_when_they_have_a_format_again() -> None:
    plain, x = tower(1), batch(17)
    model, other = frozen(tower(), "onednn.int8", drop=False).double(), frozen(copy.deepcopy(plain), "onednn.int8", drop=False)
    model.load_state_dict(plain.double().state_dict())
    torch.testing.assert_close(model(x.double()), plain(x.double()))
    assert torch.equal(model.float()(x), other(x))


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("kernel", [*KERNELS, *where_they_run("onednn.int8_tensorwise")])
def test_it_is_exported_for_any_number_of_rows(kernel: str, drop: bool) -> None:
    model = frozen(tower(), kernel, drop=drop)
    exported = torch.export.export(model, (batch(17),), dynamic_shapes=({0: torch.export.Dim("rows")},)).module()
    for rows in (1, 2, 40):
        torch.testing.assert_close(exported(batch(rows)), model(batch(rows)))


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("assign", [False, True])
def test_it_loads_where_tensors_are_swapped(swapping: None, assign: bool) -> None:
    model, newer, x = frozen(tower(), "onednn.int8", drop=True), frozen(tower(1), "onednn.int8", drop=True), batch(17)
    assert not torch.equal(model(x), newer(x))
    model.load_state_dict(newer.state_dict(), assign=assign)
    assert torch.equal(model(x), newer(x))


def test_codes_are_no_inference_tensors_where_tensors_are_swapped_under_inference_mode(swapping: None) -> None:
    model, x = frozen(tower(), "onednn.int8", drop=False), batch(17)
    with torch.inference_mode():
        model.load_state_dict(tower(1).state_dict())
    model.load_state_dict(tower(2).state_dict())
    assert torch.equal(model(x), frozen(tower(2), "onednn.int8", drop=False)(x))


def test_weights_assigned_into_the_meta_device_are_cast_where_they_lie() -> None:
    model, x = frozen(tower(), "onednn.int8", drop=False).to("meta"), batch(17)
    model.load_state_dict(tower(1).state_dict(), assign=True)
    assert torch.equal(model(x), frozen(tower(1), "onednn.int8", drop=False)(x))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_transforms_vector_is_not_lost_on_the_meta_device(is_frozen: bool) -> None:
    """Which no checkpoint holds while the weight is there."""
    model = tower()
    site = {"bottom": SiteKernels.same("onednn.int8")}
    loka.apply_plan(model, plan_for(model, site, goal=Goal.SERVING, vectors={"bottom/center": torch.ones(24)}))
    if is_frozen:
        loka.freeze(model)
    with pytest.raises(InvalidInput, match="the vector of a transform would be lost on the meta device"):
        model.to("meta")


def test_it_comes_back_from_the_meta_device_and_is_filled() -> None:
    source, x = frozen(tower(), "onednn.int8", drop=True), batch(17)
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    expected = source(x)
    filled = source.to("meta").to_empty(device="cpu")
    filled.load_state_dict(state)
    assert torch.equal(filled(x), expected)
