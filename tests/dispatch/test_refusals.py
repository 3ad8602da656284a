"""What apply_plan refuses: each difference named, and the model untouched."""

import contextlib
import functools
import json
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import MIXED, ROWWISE, Tower, batch, plan_for, tower
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import loka
from loka.core.errors import InvalidFile, InvalidInput, KernelUnavailable, LokaError
from loka.core.plan import SCHEMA, BlockPlan, Goal, Plan
from loka.dispatch.swap import applied_to
from loka.kernels.executor import SiteKernels
from loka.nn.fused_block import FusedBlock


def changed(plan: Plan, **fields: object) -> Plan:
    return Plan(msgspec.structs.replace(plan.document, **fields), plan.vectors)


def elsewhere(plan: Plan, **fields: object) -> Plan:
    return changed(plan, environment=msgspec.structs.replace(plan.document.environment, **fields))


def assert_untouched(model: nn.Module) -> None:
    assert applied_to(model) is None
    assert [type(module) for module in model.modules()] == [type(module) for module in tower().modules()]
    assert torch.equal(model(batch()), tower()(batch()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "NVIDIA H200 (sm_90)"}, "device: measured on NVIDIA H200 .*, this is"),
        ({"cuda": "13.0"}, "CUDA: measured with 13.0, this is None"),
        ({"loka": "0.0.1"}, "loka: measured with 0.0.1, here is"),
        ({"libraries": {"torch": "2.0.1"}}, "torch: measured with 2.0.1, here is 2"),
        ({"libraries": {"torchao": "9.9"}}, "torchao: measured with 9.9, here is "),
    ],
)
def test_a_plan_measured_elsewhere_names_what_differs(fields: dict, message: str) -> None:
    model = tower()
    plan = elsewhere(plan_for(model, MIXED), **fields)
    with pytest.raises(KernelUnavailable, match=f"this plan was not measured here: .*{message}.*`loka measure RUN`"):
        loka.apply_plan(model, plan)
    assert_untouched(model)
    applied = loka.apply_plan(model, plan, on_missing="high_precision")
    assert applied.sites == tuple(MIXED)  # its kernels can run here
    assert len(applied.differences) == 1


def test_a_plan_for_fp32_names_weights_that_are_bf16_by_now() -> None:
    plan = plan_for(tower(), {"bottom": SiteKernels.same("reference.rowwise")})
    model = tower().bfloat16()
    with pytest.raises(KernelUnavailable, match=r"measured with GEMMs in fp32, the weights here are torch\.bfloat16"):
        loka.apply_plan(model, plan)
    assert applied_to(model) is None
    assert loka.apply_plan(model, plan, on_missing="high_precision").sites == ("bottom",)


def test_a_layer_in_bf16_that_a_plan_for_fp32_leaves_alone_is_no_difference() -> None:
    class Mixed(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.top.bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.top(self.bottom(x).relu().bfloat16()).float())

    torch.manual_seed(0)
    model, x = Mixed(), batch()
    y_high = model(x)
    loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE}))
    y = model(x)
    assert not torch.equal(y, y_high)
    torch.testing.assert_close(y, y_high, rtol=0.1, atol=0.05)


def test_kernels_that_are_missing_fall_back_only_when_asked() -> None:
    model = tower()
    plan = plan_for(model, {**MIXED, "bottom": SiteKernels.same("fbgemm.rowwise"), "top.0": SiteKernels.same("acme.fp8")})
    with pytest.raises(
        KernelUnavailable, match=r"bottom fprop is planned on fbgemm.rowwise, which cannot run on .*acme.fp8, which"
    ) as e:
        loka.apply_plan(model, plan)
    assert "loka measure RUN" in str(e.value)
    assert_untouched(model)
    applied = loka.apply_plan(model, plan, on_missing="high_precision")
    assert applied.sites == ("top.2",)
    assert applied.fell_back.keys() == {"bottom", "top.0"}
    assert applied.fell_back["top.0"] == "fprop is planned on acme.fp8, which this LoKA does not have"
    assert "fell back to high precision: top.0: fprop is planned on acme.fp8" in str(applied)
    assert type(model.bottom) is nn.Linear
    # The plan that runs says the same.
    runs = {site.site: site.kernels["fprop"].kernel for site in applied.plan.sites}  # type: ignore[index]
    assert runs == {"bottom": "torch.fp32", "top.0": "torch.fp32", "top.2": "reference.int8_rowwise", "head": "torch.fp32"}


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        ("triton.block", r"0 triton\.block cannot run here: "),
        ("another.block", "0 is planned on another.block, and the one fused"),
    ],
)
def test_a_fused_block_needs_its_kernels(kernel: str, why: str) -> None:
    model = nn.Sequential(nn.Linear(24, 32), loka.BlockNorm(32), nn.Hardswish(), nn.Linear(32, 1))
    plan = plan_for(model, {"0": BlockPlan(kernel, "1", "2")})
    with pytest.raises(KernelUnavailable, match=why):
        loka.apply_plan(model, plan)
    assert type(model[1]) is loka.BlockNorm


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Sequential(nn.Linear(24, 32)), "bottom is not in this model; .*, and 2 more"),
        (nn.ModuleDict({**dict(tower().named_children()), "side": nn.Linear(4, 4)}), "side is not in the plan"),
    ],
)
def test_another_models_plan_is_never_applied(other: nn.Module, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"this plan is of another model .*{message}.*Probe this model"):
        loka.apply_plan(other, plan_for(tower(), MIXED), on_missing="high_precision")


def test_of_a_model_inside_of_another_the_module_to_apply_to_is_named() -> None:
    plan = plan_for(tower(), {"bottom": ROWWISE})
    outer = nn.ModuleDict({"ranker": tower(), "other": nn.Linear(2, 2)})
    with pytest.raises(InvalidInput, match="All of its sites are inside ranker: apply it to that module"):
        loka.apply_plan(outer, plan)
    loka.apply_plan(outer["ranker"], plan)
    compiled = tower()
    compiled.top = torch.compile(compiled.top)
    with pytest.raises(InvalidInput, match="A part of the model was compiled since: apply the plan first, then compile it"):
        loka.apply_plan(compiled, plan)


def test_another_shape_and_another_bias_are_told() -> None:
    wider, without = tower(), tower()
    wider.top[2] = nn.Linear(48, 40)
    without.top[2] = nn.Linear(48, 32, bias=False)
    with pytest.raises(InvalidInput, match=r"top\.2 is 48×40 here and 48×32 in the plan"):
        loka.apply_plan(wider, plan_for(tower(), MIXED))
    with pytest.raises(InvalidInput, match="not the same biases"):
        loka.apply_plan(without, plan_for(tower(), MIXED))


class Scaled(nn.Linear):
    pass


def test_layers_that_are_more_than_a_linear_layer_are_left_alone() -> None:
    model = tower()
    plan = plan_for(model, dict.fromkeys(MIXED, ROWWISE))
    scaled = Scaled(24, 32)
    model.bottom = scaled
    nn.utils.parametrizations.weight_norm(model.top[0])
    handle = model.top[2].register_forward_hook(lambda *_: None)
    applied = loka.apply_plan(model, plan, on_missing="high_precision")
    assert applied.sites == ()
    assert applied.fell_back["bottom"] == "is a Scaled, and only torch.nn.Linear is swapped"
    assert "ParametrizedLinear" in applied.fell_back["top.0"]
    assert "has hooks" in applied.fell_back["top.2"]
    loka.restore(model)
    handle.remove()
    assert loka.apply_plan(model, plan, on_missing="high_precision").sites == ("top.2",)


@pytest.mark.parametrize(
    ("options", "is_served_past"),
    [({"batch_first": True}, True), ({}, False), ({"batch_first": True, "activation": F.silu}, False)],
)
def test_a_site_that_torch_serves_past_is_no_part_of_a_serving_plan(options: dict, is_served_past: bool) -> None:
    """In eval mode an encoder layer may read the weights of its parts itself: the stand-in would never run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 2, 64, **options), nn.Linear(32, 1)).eval()
    plan = plan_for(model, {"0.linear1": SiteKernels.same("reference.rowwise")}, goal=Goal.SERVING)
    x = torch.randn(3, 5, 32)
    with torch.no_grad():
        plain = model(x)
        if is_served_past:
            with pytest.raises(KernelUnavailable, match=r"0.linear1 is inside 0, a Trans.*fast path.*keep=…"):
                loka.apply_plan(model, plan)
            assert loka.apply_plan(model, plan, on_missing="high_precision").sites == ()
        else:
            loka.apply_plan(model, plan)
            assert not torch.allclose(model(x), plain, rtol=0, atol=1e-4)  # it runs on its kernel
    training = plan_for(model, {"0.linear1": SiteKernels.same("reference.rowwise")})
    loka.restore(model)
    assert loka.apply_plan(model, training).sites == ("0.linear1",)


def test_sharded_models_are_refused() -> None:
    class FSDPLinear(nn.Linear):
        __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"

    class ShardedEmbeddings(nn.Module):
        __module__ = "torchrec.distributed.embeddingbag"

    for name, module, what in [
        ("top", FSDPLinear(32, 32), "sharded by FSDP"),
        ("tables", ShardedEmbeddings(), "TorchRec-sharded"),
    ]:
        model = tower()
        plan = plan_for(model, MIXED)
        setattr(model, name, module)
        with pytest.raises(InvalidInput, match=f"{name} is .*{what}.*LoKA does not run sharded models yet"):
            loka.apply_plan(model, plan)


def test_replicas_of_data_parallel_are_refused() -> None:
    """They would read the casts of another device. Made as torch makes them, for it does so with two GPUs alone."""
    model = tower()
    plan = plan_for(model, MIXED)
    loka.apply_plan(model, plan)
    planned = [model.get_submodule(site.site) for site in plan.sites if site.is_low_precision]
    assert planned
    block = FusedBlock.from_modules(nn.Linear(64, 64, bias=False), loka.BlockNorm(64), nn.Hardswish())
    for module in (*planned, block):
        with pytest.raises(InvalidInput, match="use DistributedDataParallel"):
            module._replicate_for_data_parallel()


def test_on_missing_is_one_of_two() -> None:
    with pytest.raises(InvalidInput, match="on_missing must be 'error' or 'high_precision', got 'ignore'"):
        loka.apply_plan(tower(), plan_for(tower(), MIXED), on_missing="ignore")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_for(tower(), MIXED, vectors={"bottom/center": torch.zeros(24)}).save(tmp_path_factory.mktemp("plan"))


@settings(max_examples=60)
@given(data=st.data())
def test_a_mutated_plan_is_an_error_or_a_plan(saved: Path, data: st.DataObject) -> None:
    """Bytes flipped, cut out or put in: reading raises LokaError, or the plan that comes out is applied or refused whole."""
    text = saved.read_bytes()
    start = data.draw(st.integers(0, len(text) - 1))
    end = start + data.draw(st.integers(0, 12))
    mutated = text[:start] + data.draw(st.binary(max_size=8)) + text[end:]
    path = saved.with_name("mutated.json")
    path.write_bytes(mutated)
    path.with_suffix(".safetensors").write_bytes(saved.with_suffix(".safetensors").read_bytes())
    model = tower()
    with contextlib.suppress(LokaError):
        loka.apply_plan(model, Plan.load(path))
        loka.restore(model)
    assert_untouched(model)


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Where a JSON document holds something."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from places(entry, (*path, key))


def test_a_site_without_a_kernel_is_told(saved: Path) -> None:
    document = json.loads(saved.read_text())
    document["sites"][1]["kernels"] = {}
    path = saved.with_name("without.json")
    path.write_text(json.dumps(document))
    path.with_suffix(".safetensors").write_bytes(saved.with_suffix(".safetensors").read_bytes())
    with pytest.raises(InvalidFile, match=f"names no kernel for fprop of {document['sites'][1]['site']}.*loka plan"):
        Plan.load(path)


@settings(max_examples=60)
@given(data=st.data())
def test_a_plan_with_another_value_anywhere_is_an_error_or_a_plan(saved: Path, data: st.DataObject) -> None:
    document = msgspec.json.decode(saved.read_bytes())
    *parents, key = data.draw(st.sampled_from([path for path in places(document) if path]))
    inside = functools.reduce(operator.getitem, parents, document)
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
    inside[key] = data.draw(scalars | st.just([]) | st.just({}) | st.just("bottom") | st.just("reference.static"))
    path = saved.with_name("changed.json")
    path.write_bytes(msgspec.json.encode(document))
    path.with_suffix(".safetensors").write_bytes(saved.with_suffix(".safetensors").read_bytes())
    model = tower()
    with contextlib.suppress(LokaError):
        loka.apply_plan(model, Plan.load(path))
        loka.restore(model)
    assert_untouched(model)


@settings(max_examples=40)
@given(keep=st.floats(0, 1, exclude_max=True))
def test_a_truncated_plan_is_an_error(saved: Path, keep: float) -> None:
    text = saved.read_bytes().rstrip()
    path = saved.with_name("truncated.json")
    path.write_bytes(text[: int(keep * len(text))])
    with pytest.raises(LokaError, match=r"truncated.json .*make (it again|one) with `loka plan"):
        Plan.load(path)


@given(keep=st.floats(0, 1, exclude_max=True))
def test_truncated_vectors_are_an_error(saved: Path, keep: float) -> None:
    path = saved.with_name("half.json")
    path.write_bytes(saved.read_bytes())
    vectors = saved.with_suffix(".safetensors").read_bytes()
    path.with_suffix(".safetensors").write_bytes(vectors[: int(keep * len(vectors))])
    with pytest.raises(LokaError, match=r"half\.(safetensors cannot be read|json: the vector bottom/center)"):
        Plan.load(path)


def test_vectors_must_be_there_and_fit(tmp_path: Path) -> None:
    plan = plan_for(tower(), MIXED, vectors={"bottom/center": torch.zeros(24)})
    path = plan.save(tmp_path)
    Plan(plan.document, {"bottom/center": torch.zeros(7)}).save(tmp_path)
    with pytest.raises(LokaError, match=r"the vector bottom/center should have 24 values, it is \(7,\)"):
        Plan.load(path)
    path.with_suffix(".safetensors").unlink()
    with pytest.raises(LokaError, match="the vector bottom/center should have 24 values, it is missing"):
        Plan.load(path)


def test_what_a_schema_cannot_say_is_checked(tmp_path: Path) -> None:
    model = tower()
    plan = plan_for(model, MIXED)
    twice = changed(plan, sites=(*plan.sites, plan.sites[0]))
    twice.save(tmp_path)
    with pytest.raises(LokaError, match="it names the site bottom twice"):
        Plan.load(tmp_path)
    chained = plan_for(model, {"top.0": BlockPlan("triton.block", "top.1", None, fp8_input=True, producer="bottom")})
    chained.save(tmp_path)
    with pytest.raises(LokaError, match=r"top\.0 takes FP8 from bottom, which is no block of the plan"):
        Plan.load(tmp_path)
    both = BlockPlan("triton.block", None, "top.1", fp8_input=True, producer="bottom", entry="norm")
    plan_for(model, {"bottom": BlockPlan("triton.block", None, None), "top.0": both}).save(tmp_path)
    with pytest.raises(LokaError, match=r"top\.0 takes FP8 from bottom and from the norm norm: it can be one alone"):
        Plan.load(tmp_path)


def test_a_finer_forward_that_lacks_a_role_is_refused(saved: Path) -> None:
    """Or giving a site back would find no kernel for it, in the middle of a check."""
    document = msgspec.json.decode(saved.read_bytes())
    site = document["sites"][0]
    kernels = {role: choice for role, choice in site["kernels"].items() if role != "fprop"}
    site["finer"] = [{"kernels": kernels, "baseline_us": 100.0, "time_us": 70.0}]
    lacking = saved.with_name("lacking.json")
    lacking.write_bytes(msgspec.json.encode(document))
    lacking.with_suffix(".safetensors").write_bytes(saved.with_suffix(".safetensors").read_bytes())
    with pytest.raises(LokaError, match=f"a finer forward of {site['site']} names other roles"):
        Plan.load(lacking)


def test_a_plan_from_before_finer_formats_is_read(saved: Path) -> None:
    document = msgspec.json.decode(saved.read_bytes())
    exact = {"kernels": document["sites"][0]["kernels"], "baseline_us": 100.0, "time_us": 70.0}
    for site in document["sites"]:
        site.pop("finer", None)
    document["sites"][0]["exact_forward"] = exact
    document["sites"][1]["exact_forward"] = None
    older = saved.with_name("older.json")
    older.write_bytes(msgspec.json.encode(document | {"schema": "loka.plan/2"}))
    older.with_suffix(".safetensors").write_bytes(saved.with_suffix(".safetensors").read_bytes())
    first, *others = Plan.load(older).sites
    assert [(one.baseline_us, one.time_us, one.kernels) for one in first.finer] == [(100.0, 70.0, first.kernels)]
    assert all(site.finer == () for site in others)
    older.write_bytes(msgspec.json.encode(document | {"schema": "loka.plan/2", "sites": "none"}))
    with pytest.raises(LokaError, match=r"older\.json"):
        Plan.load(older)


def test_a_plan_from_before_exact_forwards_is_read(saved: Path) -> None:
    document = msgspec.json.decode(saved.read_bytes())
    assert document["schema"] == SCHEMA
    for site in document["sites"]:
        site.pop("finer", None)
    older = saved.with_name("older.json")
    older.write_bytes(msgspec.json.encode(document | {"schema": "loka.plan/1"}))
    older.with_suffix(".safetensors").write_bytes(saved.with_suffix(".safetensors").read_bytes())
    assert Plan.load(older).sites == Plan.load(saved).sites


def test_a_layer_that_is_the_model_is_told() -> None:
    model = nn.Linear(24, 32)
    with pytest.raises(KernelUnavailable, match="is the model itself, in whose place nothing can be put"):
        loka.apply_plan(model, plan_for(model, {"": ROWWISE}))
    assert type(model) is nn.Linear


class Listed(nn.Module):
    """Forward goes by a list, beside which the modules have names too."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.lower, self.norm, self.upper = nn.Linear(24, 32), nn.LayerNorm(32), nn.Linear(32, 1)
        parts = (self.lower, self.norm, self.upper)
        self.order = dict(enumerate(parts)) if kind is dict else kind(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.order.values() if isinstance(self.order, dict) else self.order:
            x = part(x)
        return x


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_module_that_a_plain_list_holds_too_is_not_replaced_in_vain(kind: type) -> None:
    model = Listed(kind)
    before = dict(model.named_modules())
    with pytest.raises(InvalidInput, match=f"lower is to be replaced, and order, a plain {kind.__name__}, holds it too"):
        loka.apply_plan(model, plan_for(model, {"lower": ROWWISE}))
    with pytest.raises(InvalidInput, match=f"norm is to be replaced, and order, a plain {kind.__name__}, holds it too"):
        loka.apply_mods(model)
    assert dict(model.named_modules()) == before
    assert model.lower.bias is not None
    del model.order
    loka.apply_plan(model, plan_for(model, {"lower": ROWWISE}))


def calls(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        return layer(x).relu() if later else x

    if layer is None:
        later = True  # a cell that is empty
    return call


@pytest.mark.parametrize(
    ("hidden", "how"),
    [
        (lambda model: [(model.lower, model.norm), (model.upper,)], "a plain list"),
        (lambda model: OrderedDict(first={"layer": model.lower}), "a plain OrderedDict"),
        (lambda model: deque([[model.lower]]), "a plain deque"),
        (lambda model: functools.partial(checkpoint, model.lower, use_reentrant=False), "a plain partial"),
        (lambda model: functools.partial(map, layer=model.lower), "a plain partial"),
        (lambda model: model.lower.forward, "a plain method"),
        (lambda model: calls(model.lower), "a plain function"),
        (lambda model: lambda x, layer=model.lower: layer(x).relu(), "a plain function"),
        (lambda model: [lambda x, *, layer=model.lower: layer(x).relu()], "a plain list"),
        (lambda model: model.lower, "put there past nn.Module"),
    ],
)
def test_nor_one_that_is_hidden_deeper(hidden: Callable[[Listed], object], how: str) -> None:
    model = Listed(list)
    del model.order
    model.__dict__["hidden"] = hidden(model)
    with pytest.raises(InvalidInput, match=f"lower is to be replaced, and hidden, {how}, holds it too"):
        loka.apply_plan(model, plan_for(model, {"lower": ROWWISE}))


def test_a_layer_that_is_compiled_by_itself_is_refused() -> None:
    """torch.compile calls the layer that it was given, whatever stands in its place."""
    model = tower()
    model.bottom = torch.compile(model.bottom, backend="eager")  # type: ignore[assignment]
    plan = plan_for(model, {"bottom._orig_mod": ROWWISE})
    with pytest.raises(KernelUnavailable, match="compile the module around it"):
        loka.apply_plan(model, plan)
    assert loka.apply_plan(model, plan, on_missing="high_precision").sites == ()


@pytest.mark.parametrize(
    "put",
    [
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: layer.register_forward_pre_hook(lambda *_: None),
        lambda layer: layer.register_full_backward_hook(lambda *_: None),
        lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
        lambda layer: layer.register_state_dict_pre_hook(lambda *_: None),
        lambda layer: layer.register_load_state_dict_post_hook(lambda *_: None),
    ],
)
def test_a_layer_with_hooks_of_any_kind_keeps_them_and_its_place(put: Callable[[nn.Linear], object]) -> None:
    model = tower()
    put(model.bottom)
    applied = loka.apply_plan(model, plan_for(model, {"bottom": ROWWISE}), on_missing="high_precision")
    assert applied.sites == ()
    assert "has hooks" in applied.fell_back["bottom"]
