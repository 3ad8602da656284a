"""Trials shared out among several children: each problem once, a kernel that takes its child down never again."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier

import msgspec
import pytest
import torch
from emulated_block import emulate
from stand_in_records import record_of, site_record
from triton import knobs

from loka.core.errors import KernelUnavailable
from loka.core.gemm import Device, Role, SiteShape, TensorName
from loka.core.recipe import Format, Transform
from loka.core.site_record import SiteRecord
from loka.kernels.contract import KERNELS, add_kernel
from loka.kernels.operand import Form
from loka.kernels.providers import triton as triton_provider
from loka.kernels.triton import adam, adam_kernels, casts, gemm, recasts
from loka.measure import site_survey
from loka.measure import trial as module
from loka.measure.block import Blocks
from loka.measure.block_parts import BlockShape
from loka.measure.error import OptionError, draw_tensors
from loka.measure.parts import Option, SiteParts
from loka.measure.site_survey import Bench, survey_site
from loka.measure.speed import Speeds, TimedShape
from loka.measure.survey import _kernel_trials, measure
from loka.measure.trial import Answer, AnyTrial, BlockTrial, Trial, one_triton_cache, try_kernels
from loka.measure.trial_child import run
from loka.numerics.metrics import measure_error


def problem(kernel: str, m: int = 32) -> Trial:
    shape = SiteShape(m, 64, 48)
    return Trial(kernel, "loka.kernels.providers.reference", Role.FPROP, shape, Format.FP32, Format.FP32, "cpu")


def test_casts_that_two_kernels_share_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a survey's own process would compile them one after another, for minutes. A failure there is not the kernel's."""
    made = []

    def cast(self: SiteParts, name: TensorName, forms: tuple[Form, ...], turn: int) -> None:
        made.append((name, *(str(form.spec.scaling) for form in forms)))
        if len({form.spec.scaling for form in forms}) > 1:
            raise RuntimeError("no such pair")

    monkeypatch.setattr(SiteParts, "cast", cast)
    beside = ("reference.rowwise", "reference.tensorwise", "reference.blockwise", "of another process")
    trial = msgspec.structs.replace(problem("reference.rowwise"), beside=beside)
    assert run(trial) == Answer()
    both = [("rowwise",), ("rowwise", "rowwise"), ("rowwise", "tensorwise")]  # and none with tiles: those go by themselves
    assert set(made) == {(name, *pair) for name in (TensorName.X, TensorName.W) for pair in both}

    monkeypatch.setattr(SiteParts, "cast", lambda *_: 1 / 0)
    assert "division" in (run(problem("reference.rowwise")).why_not or "")


@pytest.mark.parametrize(("has_bias", "cast_in_step"), [(False, True), (True, False)])
def test_all_kernels_that_a_survey_launches_are_compiled_by_its_children(
    has_bias: bool, cast_in_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what Triton compiles for. What a child leaves out the survey's own process compiles, while nothing else is done."""
    launched: set[object] = set()

    def specialized(arg: object) -> object:
        if isinstance(arg, torch.Tensor):
            return arg.dtype, arg.data_ptr() % 16 == 0
        if isinstance(arg, int):
            return arg == 1, arg % 16 == 0
        return arg.base.dtype if hasattr(arg, "base") else type(arg)  # pyrefly: ignore[missing-attribute]

    def launch(kernel: object, grid: object, *args: object, **constants: object) -> None:
        launched.add((str(kernel), *map(specialized, args), *constants.items()))

    def measure_errors(site: SiteRecord, options: Iterable[Option], dtype: Format, *_: object) -> dict[Option, OptionError]:
        samples = draw_tensors(site, 1, dtype, cpu, list(Transform))
        errors = {}
        for option in options:
            SiteParts(next(samples)).multiply(option)
            errors[option] = OptionError()
            errors[option].samples.add(measure_error(torch.ones(4, 4), 1.01 * torch.ones(4, 4), option.role))
        return errors

    def time_together(self: Speeds, calls: dict[object, Callable[[int], object]], shape: TimedShape) -> dict[object, float]:
        for call in calls.values():
            call(0)
        return dict.fromkeys(calls, 1.0)

    for where in (adam, casts, gemm, recasts):
        monkeypatch.setattr(where, "launch", launch)
    monkeypatch.setattr(triton_provider, "missing_triton", lambda device: None)
    monkeypatch.setattr(site_survey, "measure_errors", measure_errors)
    monkeypatch.setattr(site_survey, "suggested_transforms", lambda *_: [Transform.CENTER, Transform.RESCALE])
    monkeypatch.setattr(Speeds, "_time_together", time_together)
    cpu, site = (
        torch.device("cpu"),
        site_record("layer", torch.randn(32, 64), calls={48: 1.0}, has_bias=has_bias, cast_in_step=cast_in_step),
    )
    names = ("torch.fp32", *(name for name in KERNELS.names() if name.startswith("triton.")))
    for trial in _kernel_trials(site, TimedShape.of(site, 48, Format.FP32), names, torch.device("cuda"), Speeds(cpu)):
        assert run(msgspec.structs.replace(trial, device="cpu")) == Answer()
    compiled = set(launched)
    assert (str(adam_kernels.adam_cast_kernel) in {kernel for kernel, *_ in compiled}) == cast_in_step
    launched.clear()
    surveyed = survey_site(site, Bench(names, Format.FP32, cpu, Speeds(cpu), Blocks(Format.FP32, cpu, "left out", {})))
    assert (str(adam_kernels.adam_cast_kernel) in {kernel for kernel, *_ in launched}) == cast_in_step
    assert launched <= compiled
    in_step = {(cast.tensor, "tensorwise" in form) for cast in surveyed.casts if cast.in_step_us for form in cast.forms}
    assert in_step == ({(TensorName.W, True)} if cast_in_step else set())


class _Children:
    """Stands in for child processes: kernels answer by their name, and all children must be at work at once to begin."""

    def __init__(self, n: int) -> None:
        self.barrier, self.asked, self.closed = Barrier(n), [], 0

    def __call__(self) -> "_Children":
        self.barrier.wait(timeout=10)
        self.barrier = Barrier(1)
        return self

    def ask(self, trial: Trial) -> Answer:
        self.asked.append(trial)
        if trial.kernel == "dies":
            raise module._Gone("ended its process with exit code 3")
        if trial.kernel == "interrupted":
            raise KeyboardInterrupt
        if trial.kernel == "crowded" and self.asked.count(trial) == 1:
            return Answer("failed: out of memory", crowded=True)
        return Answer("failed: no such tile" if trial.kernel == "raises" and trial.shape.m == 64 else None)

    def close(self) -> None:
        self.closed += 1


def test_shared_out_each_once_and_a_fatal_kernel_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    children = _Children(3)
    monkeypatch.setattr(module, "_Child", children)
    trials = [problem(kernel, m) for m in (32, 64, 128) for kernel in ("fine", "raises")]
    failures = try_kernels(trials, children=3)
    assert failures == {problem("raises", 64): "failed: no such tile"}
    assert sorted(children.asked, key=repr) == sorted(trials, key=repr)
    assert children.closed == 3

    children = _Children(1)
    monkeypatch.setattr(module, "_Child", children)
    failures = try_kernels([problem("dies"), problem("dies", 64), problem("fine")])
    told = "ended its process with exit code 3 at fprop of 32x64x48, tried in a process of its own"
    assert failures == {problem("dies"): told, problem("dies", 64): told}
    assert children.asked == [problem("dies"), problem("fine")]


def test_what_failed_for_want_of_memory_is_tried_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    children = _Children(2)
    monkeypatch.setattr(module, "_Child", children)
    assert try_kernels([problem("crowded"), problem("raises", 64)], children=2) == {
        problem("raises", 64): "failed: no such tile"
    }
    assert children.asked.count(problem("crowded")) == 2
    assert children.asked.count(problem("raises", 64)) == 1


@pytest.mark.parametrize(
    ("dies", "why", "tries"),
    [
        ("exec sleep 60", "hung for 1 s", 2),
        ("echo CUDA error: out of memory >&2; exit 3", "ended its process with exit code 3 (CUDA error: out of memory)", 2),
        ("echo no such tile >&2; exit 3", "ended its process with exit code 3 (no such tile)", 1),
        ("""echo '{"why_not": "a text that says out of memory", "broken": true}'""", "a text that says out of memory", 1),
    ],
    ids=["hung", "ended for memory", "ended", "answered"],
)
def test_a_child_that_was_short_of_memory_or_time_is_followed_by_one_alone(
    dies: str, why: str, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, log = tmp_path / "child", tmp_path / "log"
    child.write_text(f"#!/bin/sh\necho begun >> {log}\necho '{{}}'\nread problem\n{dies}\n")
    child.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(child))
    monkeypatch.setattr(module, "LIMIT_S", 1.0)
    (told,) = try_kernels([problem("one")], children=2).values()
    assert told.startswith(why)
    assert len(log.read_text().split()) == tries


def test_memory_that_a_kernel_lacks_is_told_as_crowding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(SiteParts, "multiply", fail)
    assert run(problem("reference.rowwise")) == Answer("failed: out of memory: CUDA out of memory", crowded=True)


def test_more_blocks_than_torch_s_limit_on_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape compiles one function twice, and torch refuses to compile a function more than eight times."""
    torch.compiler.reset()
    emulate(monkeypatch)
    monkeypatch.setattr("loka.measure.block_parts.torch.compile", partial(torch.compile, backend="eager"))
    for n in range(16, 112, 16):
        shape = BlockShape(SiteShape(8, 32, n), Format.FP32, Format.FP32, False, None, "ReLU")
        assert run(BlockTrial(shape, "cpu", 16)) == Answer()


def test_an_interrupt_leaves_the_rest_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    children = _Children(1)
    monkeypatch.setattr(module, "_Child", children)
    with pytest.raises(KeyboardInterrupt):
        try_kernels([problem("interrupted"), problem("fine")])
    assert children.asked == [problem("interrupted")]
    assert children.closed == 1


def test_the_child_runs_products_and_blocks() -> None:
    assert run(problem("reference.rowwise")) == Answer()
    assert run(problem("nobody.knows")) == Answer()
    shape = BlockShape(SiteShape(32, 64, 48), Format.FP32, Format.FP32, False, None, "NoSuchActivation")
    assert "NoSuchActivation" in (run(BlockTrial(shape, "cpu", 16)).why_not or "")


def test_a_block_that_fails_its_trial_is_refused_and_the_rest_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_blocks(trials: dict, children: int) -> dict:
        return {trial: "hung for 60 s" for trial in trials if isinstance(trial, BlockTrial)}

    monkeypatch.setattr("loka.measure.survey.try_kernels", fail_blocks)
    monkeypatch.setattr("loka.measure.survey.is_fused", lambda *_: True)
    site = site_record("a", torch.eye(32), trains=False, activation="act", activation_kind="ReLU")
    (surveyed,) = measure(record_of(site), kernels=["reference.rowwise"]).sites
    assert [block.why_not for block in surveyed.blocks] == ["hung for 60 s"]
    assert all(candidate.error for candidate in surveyed.candidates)


def test_a_process_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(KernelUnavailable, match="did not start: it ended its process with exit code 1"):
        try_kernels([problem("fine")])


def test_what_errors_are_taken_from_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may be compiled for the number of rows: what a child has not compiled, the survey compiles one by one."""
    tried: list[AnyTrial] = []
    monkeypatch.setattr("loka.measure.survey.try_kernels", lambda trials, children: tried.extend(trials) or {})
    monkeypatch.setattr("loka.measure.survey.is_fused", lambda *_: True)
    monkeypatch.setattr("loka.measure.survey.needs_trial", lambda kernel: kernel.startswith("reference."))
    monkeypatch.setattr("loka.measure.survey._error_rows", lambda *_: 16)
    site = site_record("a", torch.eye(32), trains=False, activation="act", activation_kind="ReLU")
    add_kernel(replace(KERNELS.get("reference.rowwise"), variant="alike"))  # type: ignore[type-var]
    try:
        measure(record_of(site), kernels=["reference.rowwise", "reference.tensorwise", "reference.alike"])
    finally:
        KERNELS.remove("reference.alike")
    (usual,) = site.calls
    assert [trial.error_rows for trial in tried[:1] if isinstance(trial, BlockTrial)] == [16], "and blocks come first"
    kernels = [trial for trial in tried if isinstance(trial, Trial)]
    assert {trial.shape.m for trial in kernels} == {16, usual}
    assert len(kernels) == 6
    beside = {trial.kernel: trial.beside for trial in kernels}
    both = ("reference.rowwise", "reference.tensorwise")
    assert beside == {"reference.rowwise": both, "reference.tensorwise": both, "reference.alike": ()}


@pytest.mark.parametrize("set_to", [None, "another"])
@pytest.mark.parametrize("named", ["own", "another"])
def test_children_compile_as_their_parent_does_whatever_torch_sets(
    set_to: str | None, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile sets what is not set, in every process by itself; Triton asks for an assembler's version once."""
    names = ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    own, another = knobs.nvidia.ptxas.path, tmp_path / "ptxas"
    another.write_text("#!/bin/sh\necho release 99.0,\n")
    another.chmod(0o755)
    before: list[str | None] = [None, None] if set_to is None else ["/somewhere", str(another)]
    for name, value in zip(names, before, strict=True):
        if value is not None:
            monkeypatch.setenv(name, value)
    version = subprocess.check_output([own if named == "own" else another, "--version"], text=True)
    monkeypatch.setattr("triton.backends.nvidia.compiler.get_ptxas_version", lambda arch: {90: version}[arch])
    monkeypatch.setattr(module, "device_of", lambda device: Device("cuda", "a GPU", (9, 0)))
    seen: list[list[str | None]] = []
    monkeypatch.setattr(
        module, "_try_all", lambda trials, children: seen.append([os.environ.get(name) for name in names]) or {}
    )
    expected = [knobs.cache.dir, str(another) if (set_to, named) == ("another", "another") else own]
    with one_triton_cache("cuda"):
        try_kernels([msgspec.structs.replace(problem("reference.rowwise"), device="cuda:0")])
        os.environ.pop(names[0])  # whatever becomes of it
    assert seen == [expected, expected]  # once in company, once alone
    assert [os.environ.get(name) for name in names] == before


@pytest.mark.parametrize("without", ["a GPU", "Triton"])
def test_nothing_is_held_without(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if without == "Triton":
        monkeypatch.setitem(sys.modules, "triton", None)
    with one_triton_cache("cpu" if without == "a GPU" else "cuda"):
        assert "TRITON_CACHE_DIR" not in os.environ


def test_a_kernel_that_a_child_cannot_import_is_left_to_its_parent() -> None:
    """A user's own, of a notebook or a script: the child has nothing against it."""
    trial = Trial("mine.own", "no_such_module", Role.FPROP, SiteShape(8, 16, 16), Format.FP32, Format.FP32, "cpu")
    assert run(trial) == Answer()
