"""What ``loka bench quality`` compares: settings (data, model, schedule) and, within each, arms. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Any

from loka.train.config import Precision, TrainConfig

MODS = ("no_bias", "block_norm", "hard_swish")


@dataclass(frozen=True)
class Arm:
    """What is done to a model before it is trained: Mods, then a kernel everywhere or a plan, if any.

    ``precision`` is that of all that stays in high precision.
    """

    name: str
    precision: Precision = Precision.FP32
    mods: tuple[str, ...] = ()
    kernel: str | None = None  # at every linear layer but the heads
    is_planned: bool = False
    is_checked: bool = False  # the plan as a whole, by check_plan
    roles: tuple[str, ...] = ()  # the only roles that the plan may have in 8 bits; empty for all


def arms_on(device_type: str) -> dict[str, Arm]:
    """All arms. What surrounds 8-bit sites is bf16 on a GPU; on the CPU it is fp32, and the 8 bits are emulated."""
    on_cuda = device_type == "cuda"
    high = Precision.BF16 if on_cuda else Precision.FP32
    provider = "torch" if on_cuda else "reference"
    arms = [
        Arm("fp32"),
        Arm("bf16", Precision.BF16),
        Arm("naive", high, kernel=f"{provider}.tensorwise"),
        Arm("naive-rowwise", high, kernel=f"{provider}.rowwise"),
        Arm("mods", high, MODS),
        Arm("loka", high, MODS, is_planned=True, is_checked=True),
        Arm("loka-without-mods", high, is_planned=True, is_checked=True),
        Arm("loka-without-check", high, MODS, is_planned=True),
        Arm("loka-without-no-bias", high, ("block_norm", "hard_swish"), is_planned=True),
        Arm("loka-without-block-norm", high, ("no_bias", "hard_swish"), is_planned=True),
        Arm("loka-without-hard-swish", high, ("no_bias", "block_norm"), is_planned=True),
        Arm("loka-fprop-alone", high, MODS, is_planned=True, roles=("fprop",)),
        Arm("loka-dgrad-alone", high, MODS, is_planned=True, roles=("dgrad",)),
        Arm("loka-wgrad-alone", high, MODS, is_planned=True, roles=("wgrad",)),
        Arm("loka-without-selection", high, MODS, kernel=f"{provider}.tensorwise"),
    ]
    return {arm.name: arm for arm in arms}


def _stream(model_options: dict[str, Any] | None = None, *, lr: float = 1e-3, **data_options: Any) -> TrainConfig:
    """The synthetic stream in one pass of 20 M examples."""
    return TrainConfig(
        "wukong",
        model_options=model_options or {},
        data="synthetic",
        data_options={"test_examples": 524_288, **data_options},
        steps=10_000,
        lr=lr,
        out=None,
    )


def easy_stream() -> dict[str, Any]:
    """Options for a synthetic stream with few ids and many clicks. A small model comes near the best possible in 2 M examples,
    so that what it cannot learn shows."""
    no_bags = {"multihot_sizes": (), "bag_length": 0, "sequence_size": 0, "sequence_length": 0}
    return {"onehot_sizes": (100,) * 8, **no_bags, "n_dense": 4, "base_rate": 0.25}


def _easy(model_options: dict[str, Any] | None = None, *, lr: float = 1e-3, **data_options: Any) -> TrainConfig:
    """The easy stream, with a learning rate that falls at the end, so that runs converge."""
    return replace(_stream(model_options, lr=lr, **{**easy_stream(), **data_options}), decay_steps=400)


def _pairs() -> TrainConfig:
    """The easy stream with fewer ids and without effects of third order, which some seeds find and others do not. So runs end
    so near the best possible, and each other, that differences of some thousandths of a percent show."""
    return _easy(onehot_sizes=(20,) * 8, third_order=0.0)


def _criteo(dense: str) -> TrainConfig:
    """64,000 rows are few for a deep model. So it is a narrow one, and every category seen in training has an id of its own."""
    return TrainConfig(
        "wukong",
        model_options={"n_layers": 4, "fmb_widths": (64,), "top_widths": (64,)},
        data="criteo",
        data_options={"ids": "counted", "min_count": 1, "dense": dense, "train_fraction": 0.8},
        batch_size=128,
        warmup_steps=20,
        out=None,
    )


SETTINGS: dict[str, TrainConfig] = {
    "synthetic": _stream(),
    "synthetic-easy": _easy(),
    "synthetic-pairs": _pairs(),
    "synthetic-easy-raw": _easy(dense="raw"),
    "synthetic-easy-deep": _easy({"n_layers": 8}),
    "synthetic-easy-high-lr": _easy(lr=1e-2),
    "synthetic-drift": _stream(dense="raw", drift={"scale_at": 5_000, "scale_features": [0, 1, 2, 3]}),
    "movielens": TrainConfig("wukong", data="movielens", warmup_steps=20, out=None),
    "criteo-log": _criteo("log"),
    "criteo-raw": _criteo("raw"),
}
