"""What a dispatched call costs the host beyond the provider's own calls, its cast and its GEMM with nothing around them.

    python benchmarks/host_cost.py

The layer is so small that its arithmetic takes next to no time. What is left is Python: finding casts, autograd, checks. For a
compiled graph all of that is done while tracing, so there both should take the same time.
"""

import argparse
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from loka.core.environment import current_command, current_environment
from loka.core.gemm import Role, TensorName
from loka.core.results import markdown_table, write_results
from loka.dispatch.frozen import FrozenLinear
from loka.dispatch.planned import PlannedLinear
from loka.kernels.casting import CASTERS, CastProblem, cast_high_precision, choose_caster
from loka.kernels.contract import KERNELS
from loka.kernels.device import device_named, device_of, model_dtype
from loka.kernels.executor import SiteExecutor, SiteKernels
from loka.numerics.formats import format_of

ROWS, WIDTH = 32, 32
CALLS = 50  # in a round
WITHOUT_WORK = ("reshape", "detach", "enter_autocast", "exit_autocast", "getitem")  # views, and switches for tracing


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--kernels", nargs="*", default=["onednn.int8", "onednn.int8_tensorwise", "onednn.int8_dynamic"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=60, help=f"of {CALLS} calls")
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    device = device_named(arguments.device)
    rows = [measure_kernel(name, device, arguments.rounds) for name in arguments.kernels]
    environment = current_environment(device_of(device))
    print(tables(rows))
    for path in write_results(arguments.out, "host-cost", environment, current_command(), rows, tables(rows)):
        print(f"wrote {path}")


@torch.no_grad()
def measure_kernel(name: str, device: torch.device, rounds: int) -> dict[str, object]:
    """µs of a call: the planned module, the provider's own calls and ``nn.Linear``, eager and compiled, taken in turns."""
    torch.manual_seed(0)
    dtype = model_dtype(device)
    linear = nn.Linear(WIDTH, WIDTH, bias=False, device=device, dtype=dtype)
    planned = PlannedLinear.from_linear(linear, SiteKernels(name, f"torch.{format_of(dtype)}", f"torch.{format_of(dtype)}"))
    x_MK = torch.randn(ROWS, WIDTH, device=device, dtype=dtype)
    own = providers_own_call(planned.executor, linear.weight)
    torch.testing.assert_close(own(x_MK), planned(x_MK))
    frozen = FrozenLinear(planned, keep_weight=True)
    functions: Mapping[str, Callable[[Tensor], Tensor]] = {"planned": planned, "frozen": frozen, "own": own, "linear": linear}
    compiled = {f"compiled_{key}": torch.compile(function, fullgraph=True) for key, function in functions.items()}
    times = time_in_turns({**functions, **compiled}, x_MK, rounds)
    return {
        "kernel": name,
        **{f"{key}_us": us for key, us in times.items()},
        "added_us": times["planned"] - times["own"],
        "frozen_added_us": times["frozen"] - times["own"],
        "own_ops": operations(own, x_MK),
        "planned_ops": operations(planned, x_MK),
        "compiled_added_us": times["compiled_planned"] - times["compiled_own"],
    }


def providers_own_call(executor: SiteExecutor, weight_NK: Tensor) -> Callable[[Tensor], Tensor]:
    """Cast and multiply as a user of the provider would write it: the weight is cast already, and x's caster is known."""
    kernel = executor.kernels[Role.FPROP]
    x_form, w_form = executor.operand_forms(Role.FPROP)
    problem = CastProblem(TensorName.X, ROWS, WIDTH, format_of(weight_NK.dtype), device_of(weight_NK.device))
    weight = executor.cast(TensorName.W, weight_NK, (Role.FPROP,))[w_form]
    if not x_form.spec.format.is_8bit:
        return lambda x_MK: kernel.multiply(cast_high_precision(x_MK, x_form), weight, x_MK.dtype, None)
    caster = CASTERS.get(choose_caster(x_form, problem))
    forms = (x_form,)
    return lambda x_MK: kernel.multiply(caster.cast(x_MK, forms)[0], weight, x_MK.dtype, None)


def time_in_turns(functions: Mapping[str, Callable[[Tensor], Tensor]], x_MK: Tensor, rounds: int) -> dict[str, float]:
    """µs of a call in the best round, since other work on the machine only adds to it. On a GPU only the host is timed."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 3):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                function(x_MK)
            elapsed = time.perf_counter() - start
            if x_MK.device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 3:  # the first turns compile and warm up
                times[name].append(1e6 * elapsed / CALLS)
    return {name: min(values) for name, values in times.items()}


def operations(function: Callable[[Tensor], Tensor], x_MK: Tensor) -> int:
    """Operations of the traced graph that compute something."""
    counted: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        targets = [str(node.target) for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
        counted.append(sum(not any(word in target for word in WITHOUT_WORK) for target in targets))
        return graph.forward

    torch.compile(function, fullgraph=True, backend=count)(x_MK)
    (operations,) = counted
    return operations


def tables(rows: list[dict[str, object]]) -> str:
    columns = {
        "provider's own": "own_us",
        "dispatched adds": "added_us",
        "frozen adds": "frozen_added_us",
        "nn.Linear": "linear_us",
        "compiled: own": "compiled_own_us",
        "compiled: dispatched adds": "compiled_added_us",
    }
    table = [
        [str(row["kernel"]), *(f"{row[key]:.1f}" for key in columns.values()), f"{row['own_ops']} and {row['planned_ops']}"]
        for row in rows
    ]
    note = (
        f"\nA layer of {WIDTH}×{WIDTH} with {ROWS} rows, forward without gradients; best rounds. What compiling leaves is "
        "torch's guards in front of the graph; the operations are the provider's own and the dispatched call's.\n"
    )
    return markdown_table(["µs a call", *columns, "operations in the graph"], table) + note


if __name__ == "__main__":
    assert KERNELS.names()  # so that providers are registered before anything is traced
    main()
