"""Our kernels as they are compiled for Hopper: arguments, constants and tiles of every case."""

from typing import Any

from loka.kernels.triton.adam import ADAM_TILE, AMAXES_OF_ROW, RESCALED
from loka.kernels.triton.casts import AMAXES_AT_ONCE, LARGEST_AT_ONCE, STRIPS_AT_ONCE, amax_tile, cast_tile
from loka.kernels.triton.recasts import SEEN_PLACES
from loka.kernels.triton.tiles import (
    GEMM_TILES,
    GRADIENT_ROWS,
    INT8_TILES,
    NORM_ROWS,
    PROMOTED_TILES,
    SHARED_TILE,
    Columns,
    NormBlocks,
    Tiles,
    choose_block_tiles,
    gradient_cols,
    gradient_steps,
    grid,
    is_promoted,
    power_of_two,
)
from loka.train.optim import IDS_OF_PART, PARTS_AT_ONCE, WIDEST_ROW

INT, FP32, FP8, BF16, INT32, INT8 = "i32", "*fp32", "*fp8e4nv", "*bf16", "*i32", "*i8"


def tiles_of(rows: int, depth: int = 128, codes: str = FP8) -> str:
    return f"tensordesc<{codes[1:]}[{rows},{depth}]>"


def integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, INT)


def cast_case(
    plain: str,
    trans: str,
    *,
    seen: bool = False,
    sums: bool = False,
    if_outgrown: bool = False,
    early: bool = False,
    more: bool = False,
    small: bool = False,
) -> dict[str, Any]:
    tile = cast_tile(plain, trans, small=small)
    arguments = {
        "x_ptr": BF16, "plain_ptr": FP8, "plain_scale_ptr": FP32, "trans_words_ptr": INT32, "trans_scale_ptr": FP32,
        "row_amax_ptr": INT32, "col_amax_ptr": INT32, "all_amax_ptr": INT32,
        "seen_rows_ptr": INT32, "seen_cols_ptr": INT32, "seen_all_ptr": INT32, "sums_ptr": FP32, "outgrown_ptr": INT32,
        "plain_static": "fp32", "trans_static": "fp32", **integers("flags", "amaxes", "tiles", "tiles_across"),
        **integers("rows", "cols", "row_stride", "plain_rows", "plain_cols", "trans_rows", "trans_cols"),
    }  # fmt: skip
    constants = {
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "PLAIN": plain,
        "TRANS": trans,
        "SAME": plain == trans != "rowwise",
        "ALL_AT_ONCE": SEEN_PLACES if seen else AMAXES_AT_ONCE,
        "ALIGNED": True,
        "SEEN": SEEN_PLACES * seen,
        "SUMS": tile.warps * sums,
        "IF_OUTGROWN": if_outgrown,
        "EARLY": early,
        "MORE": more,
    }
    return {"module": "cast_kernels", "kernel": "cast_kernel", "arguments": arguments, "constants": constants,
            "warps": tile.warps, "stages": 3}  # fmt: skip


def rowwise_case(
    rows: int, cols: int, codes: str = FP8, *, power: bool = False, x: str = BF16, more: bool = False
) -> dict[str, Any]:
    sizes = integers("rows", "cols", "row_stride", "padded_rows", "padded_cols")
    return {"module": "cast_kernels", "kernel": "rowwise_kernel", "stages": 3, "warps": 8 if cols > 1024 else 4,
            "arguments": {"x_ptr": x, "codes_ptr": codes, "scale_ptr": FP32, "amax_ptr": INT32, **sizes},
            "constants": {"ROWS": rows, "COLS": cols, "NOTED": not power, "POWER": power, "MORE": more}}  # fmt: skip


def adam_case(kernel: str, rows: int, cols: int, warps: int, *, found_inf: bool = True, **constants: Any) -> dict[str, Any]:
    adam = ("weight_ptr", "gradient_ptr", "average_ptr", "square_ptr", "step_ptr", "settings_ptr", "found_inf_ptr")
    return {"module": "adam_kernels", "kernel": kernel, "stages": 3, "warps": warps,
            "arguments": {**dict.fromkeys(adam, FP32), **constants.pop("arguments")},
            "constants": {"ROWS": rows, "COLS": cols, "FOUND_INF": found_inf, "FOURS": True, **constants}}  # fmt: skip


def adam_cast_case(*, found_inf: bool = True) -> dict[str, Any]:
    arguments = {
        "plain_ptr": FP8, "plain_scale_ptr": FP32, "trans_words_ptr": INT32, "trans_scale_ptr": FP32, "all_amax_ptr": INT32,
        "seen_all_ptr": INT32, **integers("amaxes", "tiles_across"),
        **integers("rows", "cols", "plain_rows", "plain_cols", "trans_rows", "trans_cols"),
    }  # fmt: skip
    constants = {"PLAIN": "tensorwise", "TRANS": "tensorwise", "SAME": True, "ALL_AT_ONCE": SEEN_PLACES, "ALIGNED": True,
                 "SEEN": SEEN_PLACES}  # fmt: skip
    return adam_case("adam_cast_kernel", *ADAM_TILE, found_inf=found_inf, arguments=arguments, **constants)


def row_case(kernel: str, width: int, *pointers: str, **constants: Any) -> dict[str, Any]:
    """Of row-wise Adagrad, whose ids are 64 bits wide."""
    room = power_of_two(width)
    return {"module": "train.row_kernels", "kernel": kernel, "stages": 3, "warps": constants.pop("warps", max(1, room // 128)),
            "arguments": {"rows_ptr": "*i64", **dict.fromkeys(pointers, FP32), **integers("width"), **constants.pop("others")},
            "constants": {"S": IDS_OF_PART, "E": room, **constants}}  # fmt: skip


def sum_parts_case(width: int) -> dict[str, Any]:
    others = {"order_ptr": "*i64", **integers("count")}
    return row_case("sum_parts_kernel", width, "gradient_ptr", "part_ptr", others=others, warps=1)


def sum_blocks_case(width: int) -> dict[str, Any]:
    return row_case("sum_blocks_kernel", width, "part_ptr", others={}, AT_ONCE=PARTS_AT_ONCE)


def step_rows_case(width: int) -> dict[str, Any]:
    pointers = ("part_ptr", "table_ptr", "sum_ptr", "found_inf_ptr")
    others = {"lr": "fp32", "eps": "fp32", **integers("count")}
    return row_case("step_rows_kernel", width, *pointers, others=others, AT_ONCE=PARTS_AT_ONCE, FOUND_INF=True)


def bag_case(kernel: str, width: int, **pointers: str) -> dict[str, Any]:
    return {"module": "models.bag_kernels", "kernel": kernel, "stages": 3, "warps": 1,
            "arguments": {"weight_ptr": FP32, "first_ptr": "*i64", **pointers, **integers("n_ids", "n_bags", "width")},
            "constants": {"E": power_of_two(width)}}  # fmt: skip


def sum_bags_case(width: int) -> dict[str, Any]:
    return bag_case("sum_bags_kernel", width, table_ptr=FP32, rows_ptr="*i64", sum_ptr=FP32)


def bag_gradient_case(width: int) -> dict[str, Any]:
    return bag_case("bag_gradient_kernel", width, gradient_ptr=FP32, row_gradient_ptr=FP32)


BY_ROWS = {"codes_ptr": FP8, "scale_ptr": FP32}


def adam_by_rows_case(*, found_inf: bool = True) -> dict[str, Any]:
    arguments = {
        **BY_ROWS, "words_ptr": INT32, "one_scale_ptr": FP32, "amax_ptr": INT32, "used_ptr": INT32,
        **integers("rows", "cols", "padded_rows", "padded_cols", "tiles_across"),
    }  # fmt: skip
    return adam_case("adam_by_rows_kernel", *ADAM_TILE, found_inf=found_inf, arguments=arguments)


def rescale_rows_case() -> dict[str, Any]:
    sizes = integers("rows", "cols", "padded_cols", "parts")
    return {"module": "adam_kernels", "kernel": "rescale_rows_kernel", "stages": 3, "warps": RESCALED.warps,
            "arguments": {**BY_ROWS, "weight_ptr": FP32, "amax_ptr": INT32, "largest_ptr": INT32, **sizes},
            "constants": {"ROWS": RESCALED.rows, "COLS": RESCALED.cols, "PARTS": AMAXES_OF_ROW}}  # fmt: skip


def retranspose_case() -> dict[str, Any]:
    pointers = {"weight_ptr": FP32, "words_ptr": INT32, "one_scale_ptr": FP32, "used_ptr": INT32, "largest_ptr": INT32}
    sizes = integers("largests", "rows", "cols", "padded_rows", "tiles", "tiles_across")
    return {"module": "adam_kernels", "kernel": "retranspose_kernel", "stages": 3, "warps": ADAM_TILE.warps,
            "arguments": {**pointers, **sizes},
            "constants": {"ROWS": ADAM_TILE.rows, "COLS": ADAM_TILE.cols, "AT_ONCE": 512}}  # fmt: skip


def amax_case(cols: int, *, one_tile: bool, x: str = BF16, of_cols: bool = True) -> dict[str, Any]:
    sizes, tile = (
        integers("rows", "cols", "row_stride", "tiles_down"),
        amax_tile(1024 if one_tile else 12288, cols, of_cols=of_cols),
    )
    amaxes = dict.fromkeys(("row_amax_ptr", "col_amax_ptr", "all_amax_ptr"), INT32)
    return {"module": "cast_kernels", "kernel": "amax_kernel", "arguments": {"x_ptr": x, **amaxes, **sizes},
            "constants": {"ROWS": tile.rows, "COLS": tile.cols, "OF_ROWS": False, "OF_COLS": of_cols, "OF_ALL": not of_cols,
                          "ONE_TILE": one_tile, "MORE": True}, "warps": tile.warps, "stages": 3}  # fmt: skip


def largest_case() -> dict[str, Any]:
    return {"module": "cast_kernels", "kernel": "largest_kernel", "stages": 3, "warps": 8,
            "arguments": {"bits_ptr": INT32, "largest_ptr": INT32, "count": INT},
            "constants": {"AT_ONCE": LARGEST_AT_ONCE}}  # fmt: skip


def over_strips_case(kind: str, *, add: bool) -> dict[str, Any]:
    return {"module": "cast_kernels", "kernel": "over_strips_kernel", "stages": 3, "warps": 8,
            "arguments": {"strips_ptr": kind, "result_ptr": kind, **integers("strips", "size")},
            "constants": {**dict(zip(("STRIPS", "LENGTH"), STRIPS_AT_ONCE, strict=True)), "SUM": add}}  # fmt: skip


def gemm_case(tiles: Tiles, *, promoted: bool, out: str = BF16, codes: str = FP8, persistent: bool = True) -> dict[str, Any]:
    operands = {"a_desc": tiles_of(tiles.rows, codes=codes), "b_desc": tiles_of(tiles.cols, codes=codes)}
    arguments = {**operands, "a_scale_ptr": FP32, "b_scale_ptr": FP32,
                 "bias_ptr": BF16, "out_ptr": out, "b_factor": "fp32", **integers("m", "n", "k", "k_of_split")}  # fmt: skip
    constants = {"ROWS": tiles.rows, "COLS": tiles.cols, "DEPTH": 128, "A_SCALES": "rows", "B_SCALES": "rows",
                 "HAS_BIAS": True, "PROMOTED": promoted, "INT8": codes == INT8, "PERSISTENT": persistent}  # fmt: skip
    return {"module": "gemm_kernels", "kernel": "gemm_kernel", "arguments": arguments, "constants": constants,
            "warps": tiles.warps, "stages": tiles.stages}  # fmt: skip


OUTPUTS = {"y_ptr": BF16, "codes_ptr": FP8, "codes_t_ptr": FP8, "u_ptr": FP8, "rstd_ptr": FP32}


FORMS = {"HIGH": True, "CODES": True, "CODES_T": True, "SAVED": True}


SERVING = {"HIGH": False, "CODES_T": False, "SAVED": False}


SERVING_BF16 = {"CODES": False, "CODES_T": False, "SAVED": False}


def forward_case(
    m: int,
    n: int,
    k: int,
    *,
    bias: bool = False,
    norm: bool = True,
    u: str = FP8,
    activation: str = "hard_swish",
    **forms: bool,
) -> dict[str, Any]:
    blocks, written = NormBlocks(n, 256) if norm else None, {**FORMS, **forms}
    only_codes = not written["HIGH"] and (u == FP8 or not written["SAVED"])
    tiles = choose_block_tiles(m, n, k, blocks, 132, forms=sum(written.values()), only_codes=only_codes)
    columns = Columns.of(n, blocks, tiles.cols)
    arguments = {
        "x_desc": tiles_of(tiles.rows), "w_desc": tiles_of(tiles.cols), "x_scale_ptr": FP32, "w_scale_ptr": FP32,
        "bias_ptr": BF16, **OUTPUTS, "u_ptr": u, "eps": "fp32", "x_factor": "fp32",
        "codes_per_unit": "fp32", **integers("m", "n", "k", "blocks", "codes_stride", "codes_t_stride"),
    }  # fmt: skip
    constants = {
        "NORM": norm, "ROWS": tiles.rows, "COLS": tiles.cols, "WIDTH": columns.width, "WIDER": columns.wider, "DEPTH": 128,
        "PROMOTED": is_promoted(k), "X_ROWWISE": True, "HAS_BIAS": bias, "ACTIVATION": activation, **written,
        "PERSISTENT": grid(-(-m // tiles.rows) * columns.count, tiles, 132)[1],
    }  # fmt: skip
    return {"module": "block_kernels", "kernel": "block_forward_kernel", "arguments": arguments, "constants": constants,
            "warps": tiles.warps, "stages": tiles.stages}  # fmt: skip


def plain_case(m: int, n: int, k: int, **forms: bool) -> dict[str, Any]:
    """Without a norm, in training: bf16, and u for backward, which relu has in y."""
    return forward_case(m, n, k, bias=True, norm=False, u=BF16, CODES=False, CODES_T=False, **forms)


def gradient_case(m: int, n: int, *, norm: bool = True, u: str = FP8, high: bool = False) -> dict[str, Any]:
    blocks = NormBlocks(n, 256) if norm else None
    cols = gradient_cols(n, blocks)
    columns = Columns.of(n, blocks, cols)
    arguments = {
        "dy_ptr": BF16, "u_ptr": u, "rstd_ptr": FP32, "dz_ptr": BF16, "codes_ptr": FP8, "scale_ptr": INT32,
        "largest_ptr": INT32, "bias_sums_ptr": FP32, "unit": "fp32",
        **integers("m", "n", "dy_stride", "u_stride", "codes_stride", "blocks"),
    }  # fmt: skip
    constants = {"NORM": norm, "ROWS": GRADIENT_ROWS, "STEPS": gradient_steps(m, columns), "COLS": cols,
                 "WIDTH": columns.width, "WIDER": columns.wider, "ACTIVATION": "hard_swish", "HIGH": high, "BIAS": not high,
                 "EIGHTS": True}  # fmt: skip
    return {"module": "gradient_kernels", "kernel": "gradient_kernel", "arguments": arguments, "constants": constants,
            "warps": 4, "stages": 3}  # fmt: skip


def shared_case(n: int, *, norm: bool = True, plain: bool = True) -> dict[str, Any]:
    blocks = NormBlocks(n, 256) if norm else None
    cols = gradient_cols(n, blocks) if plain else SHARED_TILE[1]
    columns, (tile_rows, tile_cols) = Columns.of(n, blocks, cols), SHARED_TILE
    arguments = {
        "codes_ptr": FP8, "trans_words_ptr": INT32, "scale_ptr": INT32, "largest_ptr": INT32, "row_scale_ptr": FP32,
        "trans_scale_ptr": FP32, "factor": "fp32",
        **integers("m", "n", "codes_stride", "trans_stride", "scale_step", "one_step", "blocks", "largests"),
    }  # fmt: skip
    constants = {"NORM": norm, "WIDTH": columns.width, "WIDER": columns.wider, "ROWS": tile_rows, "COLS": min(tile_cols, cols),
                 "PARTS": -(-cols // tile_cols), "BLOCKS": power_of_two(columns.count), "AT_ONCE": AMAXES_AT_ONCE,
                 "PLAIN": plain, "TRANS": True}  # fmt: skip
    return {"module": "share_kernels", "kernel": "share_scales_kernel", "arguments": arguments, "constants": constants,
            "warps": 4, "stages": 3}  # fmt: skip


def norm_case(n: int) -> dict[str, Any]:
    blocks = NormBlocks(n, 256)
    arguments = {"z_ptr": BF16, **OUTPUTS, "eps": "fp32", "codes_per_unit": "fp32",
                 **integers("m", "n", "z_stride", "blocks", "codes_stride", "codes_t_stride")}  # fmt: skip
    constants = {"ROWS": NORM_ROWS, "COLS": blocks.room, "WIDTH": blocks.width, "WIDER": blocks.wider,
                 "ACTIVATION": "none", **FORMS}  # fmt: skip
    return {"module": "block_kernels", "kernel": "norm_forward_kernel", "arguments": arguments, "constants": constants,
            "warps": 4, "stages": 3}  # fmt: skip


def name_of(tiles: Tiles) -> str:
    return f"{tiles.rows}x{tiles.cols}" + (f" by {tiles.per_sm}" if tiles.per_sm > 1 else "")


CASES = {
    "cast rowwise both": cast_case("rowwise", "rowwise"),
    "cast rowwise both, amaxes remembered": cast_case("rowwise", "rowwise", seen=True),
    "cast rowwise both, once more if outgrown": cast_case("rowwise", "rowwise", if_outgrown=True),
    "cast tensorwise both": cast_case("tensorwise", "tensorwise"),
    "cast tensorwise both, columns summed": cast_case("tensorwise", "tensorwise", sums=True),
    "cast tensorwise both, amaxes remembered": cast_case("tensorwise", "tensorwise", seen=True),
    "cast tensorwise both, early": cast_case("tensorwise", "tensorwise", early=True),
    "cast tensorwise both, small, early": cast_case("tensorwise", "tensorwise", early=True, small=True),
    "cast tensorwise, transposed, small, early": cast_case("none", "tensorwise", early=True, small=True),
    "cast tensorwise, transposed": cast_case("none", "tensorwise"),
    "cast rowwise and 1x128": cast_case("rowwise", "1x128"),
    "cast tiles both": cast_case("128x128", "128x128"),
    "cast 1x128": cast_case("1x128", "none"),
    "cast 1x128, transposed": cast_case("none", "1x128"),
    "cast 1x128, more follows": cast_case("1x128", "none", more=True),
    "cast 1x128, transposed, early": cast_case("none", "1x128", early=True),
    "cast rowwise, transposed, early": cast_case("none", "rowwise", early=True),
    "cast 1x128, transposed, columns summed": cast_case("none", "1x128", sums=True),
    "cast rowwise, transposed": cast_case("none", "rowwise"),
    "cast rowwise, transposed, columns summed": cast_case("none", "rowwise", sums=True),
    "cast static both": cast_case("static", "static"),
    "cast wide rows": rowwise_case(1, 16384),
    "cast narrow rows": rowwise_case(16, 256),
    "cast wide rows by powers of two": rowwise_case(1, 16384, power=True, x=FP32),
    "cast narrow rows by powers of two, more follows": rowwise_case(8, 512, power=True, more=True),
    "step of Adam, cast tensorwise both": adam_cast_case(),
    "step of Adam, cast tensorwise both, no infinity looked for": adam_cast_case(found_inf=False),
    "step of Adam, cast tensorwise both, a multiple of four columns": {**adam_cast_case(), "unaligned": "cols"},
    "step of Adam, cast by rows": adam_by_rows_case(),
    "step of Adam, cast by rows, a multiple of four columns": {**adam_by_rows_case(), "unaligned": "cols"},
    "step of Adam, cast by rows, no infinity looked for": adam_by_rows_case(found_inf=False),
    "rows given other powers": rescale_rows_case(),
    "transposed by another power": retranspose_case(),
    "embedding gradients summed": sum_parts_case(128),
    "embedding gradients summed, wide": sum_parts_case(WIDEST_ROW),
    "embedding gradients summed by blocks": sum_blocks_case(128),
    "embedding gradients summed by blocks, wide": sum_blocks_case(WIDEST_ROW),
    **{f"embeddings of bags, {width} wide": sum_bags_case(width) for width in (128, WIDEST_ROW)},
    **{f"embeddings' gradients, {width} wide": bag_gradient_case(width) for width in (128, WIDEST_ROW)},
    "embedding rows stepped": step_rows_case(128),
    "embedding rows stepped, wide": step_rows_case(WIDEST_ROW),
    "cast wide rows to int8": rowwise_case(1, 16384, INT8),
    "cast narrow rows to int8": rowwise_case(16, 256, INT8),
    **{f"int8 gemm {name_of(t)}": gemm_case(t, promoted=False, codes=INT8) for t in INT8_TILES},
    **{f"int8 gemm {name_of(t)} to fp32": gemm_case(t, promoted=False, out=FP32, codes=INT8) for t in INT8_TILES},
    **{f"gemm {name_of(t)}": gemm_case(t, promoted=False) for t in GEMM_TILES},
    **{f"gemm {name_of(t)}, one tile": gemm_case(t, promoted=False, persistent=False) for t in GEMM_TILES},
    **{f"gemm {name_of(t)} to fp32": gemm_case(t, promoted=False, out=FP32) for t in GEMM_TILES},
    **{f"gemm {name_of(t)}, a part": gemm_case(t, promoted=False, out=FP32, persistent=False) for t in GEMM_TILES},
    **{
        f"int8 gemm {name_of(t)}, a part": gemm_case(t, promoted=False, out=FP32, codes=INT8, persistent=False)
        for t in INT8_TILES
    },
    **{f"gemm {name_of(t)}, promoted": gemm_case(t, promoted=True) for t in PROMOTED_TILES},
    **{f"gemm {name_of(t)}, promoted, a part": gemm_case(t, promoted=True, out=FP32, persistent=False) for t in PROMOTED_TILES},
    "block forward, small": forward_case(2048, 768, 256, HIGH=False),
    "block forward, small, serving": forward_case(2048, 768, 256, bias=True, **SERVING),
    "block forward, several small waves, serving": forward_case(6144, 768, 256, bias=True, **SERVING),
    "block forward, several small waves, serving bf16": forward_case(6144, 768, 256, bias=True, **SERVING_BF16),
    "block forward, a long wave, serving": forward_case(2048, 1024, 4096, bias=True, **SERVING),
    "block forward, large": forward_case(12288, 4096, 4096, HIGH=False),
    "block forward, large, codes and a bias": forward_case(12288, 4096, 4096, HIGH=False, bias=True),
    "block forward, large, no activation": forward_case(12288, 4096, 4096, activation="none", HIGH=False, CODES=False),
    "block forward, large, nothing behind learns": forward_case(12288, 4096, 4096, HIGH=False, CODES_T=False),
    "block forward, large, one wave": forward_case(2048, 2048, 4096, HIGH=False, bias=True),
    "block forward, large, serving": forward_case(12288, 4096, 4096, bias=True, **SERVING),
    "block forward, large, serving bf16": forward_case(12288, 4096, 4096, bias=True, **SERVING_BF16),
    "block forward, large, bias": forward_case(12288, 4096, 4096, bias=True),
    "block forward, promoted": forward_case(12288, 4096, 32768),
    "block forward, narrow": forward_case(2048, 64, 256),
    "block forward, large, a bias that learns": forward_case(12288, 4096, 4096, bias=True, u=BF16),
    "block forward, no norm, small": plain_case(2048, 768, 256),
    "block forward, no norm, large": plain_case(12288, 4096, 4096),
    "block forward, no norm, promoted": plain_case(12288, 4096, 32768),
    "block forward, no norm, relu": plain_case(2048, 2048, 2048, SAVED=False),
    "block forward, no norm, large, relu": plain_case(12288, 4096, 4096, SAVED=False),
    "norm to fp8": norm_case(1024),
    "gradient, small": gradient_case(2048, 768),
    "gradient, large": gradient_case(12288, 4096),
    "gradient, large, a bias that learns": gradient_case(12288, 4096, u=BF16),
    "gradient, no norm": gradient_case(12288, 4096, norm=False, u=BF16),
    "gradient, in high precision": gradient_case(12288, 4096, high=True),
    "scales shared, small": shared_case(768),
    "scales shared, large": shared_case(4096),
    "scales shared, no norm": shared_case(4096, norm=False),
    "scales shared, transposed alone": shared_case(4096, norm=False, plain=False),
    "amaxes": amax_case(4096, one_tile=False),
    "amaxes of one tile": amax_case(4096, one_tile=True),
    "amaxes of one tile, narrow": amax_case(256, one_tile=True),
    "amaxes of one tile, fp32": amax_case(4096, one_tile=True, x=FP32),
    "amax of all": amax_case(4096, one_tile=False, of_cols=False),
    "amax of all, one tile": amax_case(4096, one_tile=True, of_cols=False),
    "the largest": largest_case(),
    "the largest of strips": over_strips_case(INT32, add=False),
    "the sums of strips": over_strips_case(FP32, add=True),
    # What choose_tiles must not choose: its sums do not fit twice.
    "promoted 128x256": gemm_case(GEMM_TILES[0], promoted=True),
}
