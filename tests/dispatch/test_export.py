"""Frozen models exported: served by another process, and with any number of rows."""

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from int8_here import is_missing, where_they_run
from plans import batch, plan_for, tower
from torch import nn

import loka
from loka.core.gemm import Role
from loka.core.plan import Goal
from loka.core.recipe import Format, Scaling
from loka.kernels.contract import KERNELS
from loka.kernels.executor import SiteKernels
from loka.kernels.operand import OperandSpec
from loka.kernels.providers.reference import Reference

SITES = ("bottom", "top.0", "top.2")  # of the tower


@torch.no_grad()
def test_it_is_exported_and_served_by_another_process(tmp_path: Path) -> None:
    names = ("onednn.int8", "onednn.int8_tensorwise", "onednn.int8_dynamic", "reference.rowwise")
    here = [name for name in names if not is_missing(name)]
    for kernel, drop in product(here, (False, True)):
        model = tower()
        loka.apply_plan(model, plan_for(model, dict.fromkeys(SITES, SiteKernels.same(kernel)), goal=Goal.SERVING))
        loka.freeze(model, drop_high_precision=drop)
        program = torch.export.export(model, (batch(17),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        torch.export.save(program, tmp_path / f"{kernel}-{drop}.pt2")
        expected = {rows: (batch(rows), model(batch(rows))) for rows in (0, 1, 2, 17, 100)}
        torch.save(expected, tmp_path / f"{kernel}-{drop}.expected")
    serve = """if True:
        import loka, sys, torch
        from pathlib import Path
        loka.load_ops()
        programs = list(Path(sys.argv[1]).glob("*.pt2"))
        for path in programs:
            serve = torch.export.load(path).module()
            assert all(torch.equal(serve(x), y) for x, y in torch.load(path.with_suffix(".expected")).values()), path
        assert not any(name.startswith("loka.dispatch") for name in sys.modules)
        print(len(programs))
    """
    done = subprocess.run([sys.executable, "-c", serve, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{2 * len(here)}\n"), done.stderr


@dataclass(frozen=True)
class Padded(Reference):
    """A kernel that wants rows in multiples of 16."""

    def operands(self, role: Role) -> tuple[OperandSpec, OperandSpec]:
        a, b = super().operands(role)
        return replace(a, outer_multiple=16), b


@pytest.mark.parametrize("drop", [False, True])
@torch.no_grad()
def test_what_is_exported_pads_as_many_rows_as_come(drop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the weight was kept an eager call runs too few rows in high precision, and a program cannot choose."""
    padded = Padded("padded.int8", Format.INT8, Scaling.ROWWISE, Scaling.ROWWISE, Format.INT8)
    monkeypatch.setitem(KERNELS._entries, padded.name, padded)
    model, as_is = tower(), tower()
    loka.apply_plan(model, plan_for(model, dict.fromkeys(SITES, SiteKernels.same(padded.name)), goal=Goal.SERVING))
    loka.apply_plan(as_is, plan_for(as_is, dict.fromkeys(SITES, SiteKernels.same("reference.int8_rowwise")), goal=Goal.SERVING))
    loka.freeze(model, drop_high_precision=drop)
    for traced in (64, 5):
        program = torch.export.export(model, (batch(traced),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        for rows in (64, 33, 5, 1):
            torch.testing.assert_close(program.module()(batch(rows)), as_is(batch(rows)), rtol=1e-5, atol=1e-6)


class Routed(nn.Module):
    """Rows go to an expert by what they hold, so that nobody knows beforehand how many do."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.expert, self.head = nn.Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.front(x)
        mine = (x[:, 0] > 0).nonzero().squeeze(-1)
        return self.head(hidden.index_add(0, mine, self.expert(hidden[mine])))


@pytest.mark.parametrize("kernel", where_they_run("onednn.int8", "onednn.int8_tensorwise", "onednn.int8_dynamic"))
@torch.no_grad()
def test_a_model_that_routes_rows_is_exported_and_compiled(kernel: str, fresh_compiler: None) -> None:
    torch.manual_seed(0)
    model = Routed()
    sites = dict.fromkeys(("front", "expert"), SiteKernels(kernel, "torch.fp32", "torch.fp32"))
    loka.apply_plan(model, plan_for(model, sites, goal=Goal.SERVING))
    loka.freeze(model, drop_high_precision=True)
    serve = torch.export.export(model, (batch(17),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    in_one_piece = kernel != "onednn.int8_tensorwise"
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=in_one_piece):
        compiled = torch.compile(model, fullgraph=in_one_piece, backend="eager")
        for x in (batch(17), batch(3), batch(100), batch(17).abs(), -batch(17).abs()):  # some, all and none
            assert torch.equal(serve(x), model(x))
            assert torch.equal(compiled(x), model(x))


def test_every_op_is_among_those_that_a_server_loads() -> None:
    sources = Path(loka.__file__).parent.rglob("*.py")
    ops = {name for source in sources for name in re.findall(r'^@op\("(\w+)"', source.read_text(), re.MULTILINE)}
    command = f"import loka, torch; loka.load_ops(); [getattr(torch.ops.loka, name) for name in {sorted(ops)}]"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(ops) > 8
