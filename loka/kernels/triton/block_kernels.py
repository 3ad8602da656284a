"""A linear layer with the norm and the activation behind it as one kernel.

Axes:  M rows of the batch,  N features, of which a program holds one whole norm block,  K contracted.

    z = x·wᵀ + b        y = activation(u),  u = z·rstd,  rstd = (mean z² + ε)^−½  over the block

Without a norm u = z, and a block is as many features as a tile has columns.
"""

import triton
import triton.language as tl

from loka.kernels.triton.codes import let_next_kernel_start, saturated_fma, to_e4m3, wait_for_kernels_before
from loka.kernels.triton.gemm_kernels import contract, tile_of


@triton.jit
def columns_of(block, n, offset_N, NORM: tl.constexpr, WIDTH: tl.constexpr, WIDER: tl.constexpr):
    """A block's first feature, its features at ``offset_N``, which of them are there, and how many it has.

    The first WIDER blocks have one feature more than WIDTH. Both are compile-time constants, so that the compiler knows how far
    addresses are aligned. Norm blocks cover the features exactly; without a norm the last block may reach past them.
    """
    if not NORM:
        return block * WIDTH, block * WIDTH + offset_N, (offset_N < WIDTH) & (block * WIDTH + offset_N < n), WIDTH
    elif WIDER == 0:
        return block * WIDTH, block * WIDTH + offset_N, offset_N < WIDTH, WIDTH
    else:
        size = WIDTH + (block < WIDER).to(tl.int32)
        first = block * WIDTH + tl.minimum(block, WIDER)
        return first, first + offset_N, offset_N < size, size


@triton.jit
def _activate(scaled, z, rstd, ACTIVATION: tl.constexpr):
    """The activation of u = z·rstd. ``scaled`` is u in any unit, and the result has the same one: only hard-swish's gate needs
    u itself."""
    if ACTIVATION == "hard_swish":
        return scaled * saturated_fma(z, rstd * (1.0 / 6.0), 0.5)
    elif ACTIVATION == "relu":
        return tl.maximum(scaled, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(ACTIVATION == "none")
        return scaled


@triton.jit
def _finish_and_store(
    z_MN, index_M, index_N, inside_N, size, block, m, n, eps, codes_per_unit,
    y_ptr, codes_ptr, codes_stride, codes_t_ptr, codes_t_stride, u_ptr, rstd_ptr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    HIGH: tl.constexpr, CODES: tl.constexpr, CODES_T: tl.constexpr, SAVED: tl.constexpr,
):  # fmt: skip
    """Norm and activation of z (0 outside the block), written in every form asked for.

    HIGH is y in high precision; CODES are its e4m3 codes and CODES_T their transpose; SAVED is what backward needs: u, as codes
    or wider, and rstd (blocks × M). All codes have one constant scale, 1/``codes_per_unit``, which only a norm's bound makes
    possible; with a norm everything is computed in units of that scale.
    """
    row = index_M.to(tl.int64)
    stored = (index_M < m)[:, None] & inside_N[None, :]
    if NORM:
        rstd_M = 1.0 / tl.sqrt(tl.sum(z_MN * z_MN, axis=1) / size + eps)
        u_MN = z_MN * (rstd_M * codes_per_unit)[:, None]
        y_MN = _activate(u_MN, z_MN, rstd_M[:, None], ACTIVATION)
        unit = 1.0 / codes_per_unit
        if SAVED:
            tl.store(rstd_ptr + block * m + index_M, rstd_M, mask=index_M < m)
    else:
        u_MN, unit = z_MN, 1.0
        y_MN = _activate(z_MN, z_MN, 1.0, ACTIVATION)
    if SAVED:
        saved_MN = to_e4m3(u_MN) if u_ptr.dtype.element_ty == tl.float8e4nv else (u_MN * unit).to(u_ptr.dtype.element_ty)
        tl.store(u_ptr + row[:, None] * codes_stride + index_N[None, :], saved_MN, mask=stored)
    if HIGH:
        tl.store(y_ptr + row[:, None] * n + index_N[None, :], (y_MN * unit).to(y_ptr.dtype.element_ty), mask=stored)
    if CODES or CODES_T:
        codes_MN = to_e4m3(y_MN)
        if CODES:
            tl.store(codes_ptr + row[:, None] * codes_stride + index_N[None, :], codes_MN, mask=stored)
        if CODES_T:  # up to the stride, so that whole vectors are stored; nobody reads past the batch
            stored_t = inside_N[:, None] & (index_M < codes_t_stride)[None, :]
            place = codes_t_ptr + index_N.to(tl.int64)[:, None] * codes_t_stride + index_M[None, :]
            tl.store(place, tl.trans(codes_MN), mask=stored_t)


@triton.jit
def _vector(ptr, index, inside):
    return tl.load(ptr + index, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _product(
    tile, x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, m, n, k, blocks, x_factor,
    NORM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, WIDER: tl.constexpr, DEPTH: tl.constexpr,
    PROMOTED: tl.constexpr, X_ROWWISE: tl.constexpr, HAS_BIAS: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """z of one tile (0 outside its block), and where it lies. x's scale is ``x_factor``, times one a row if X_ROWWISE.

    ONE_TILE: the program has no other. Then scales and bias are loaded before the contraction and arrive while it runs. Where
    several tiles share one loop with their contractions, that would take the loop's registers.
    """
    tile_m, block = tile_of(tile, tl.cdiv(m, ROWS), blocks)
    first_n, index_N, inside_N, size = columns_of(block, n, tl.arange(0, COLS), NORM, WIDTH, WIDER)
    index_M = tile_m * ROWS + tl.arange(0, ROWS)
    w_scale_N = _vector(w_scale_ptr, index_N, inside_N) if ONE_TILE else 0.0
    x_scale_M = _vector(x_scale_ptr, index_M, index_M < m) if ONE_TILE and X_ROWWISE else 0.0
    bias_N = _vector(bias_ptr, index_N, inside_N) if ONE_TILE and HAS_BIAS else 0.0
    sum_MN = contract(x_desc, w_desc, tile_m * ROWS, first_n, 0, k, ROWS, COLS, DEPTH, PROMOTED, INT8=False)
    if ONE_TILE:
        let_next_kernel_start()
    else:
        w_scale_N = _vector(w_scale_ptr, index_N, inside_N)
    z_MN = tl.where(inside_N[None, :], sum_MN * (w_scale_N * x_factor)[None, :], 0.0)
    if X_ROWWISE:
        x_scale_M = x_scale_M if ONE_TILE else _vector(x_scale_ptr, index_M, index_M < m)
        z_MN *= x_scale_M[:, None]  # pyrefly: ignore[bad-index]
    if HAS_BIAS:
        bias_N = bias_N if ONE_TILE else _vector(bias_ptr, index_N, inside_N)
        z_MN += bias_N[None, :]  # pyrefly: ignore[bad-index]
    return z_MN, index_M, index_N, inside_N, size, block


@triton.jit
def block_forward_kernel(
    x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr,
    y_ptr, codes_ptr, codes_t_ptr, u_ptr, rstd_ptr,
    m, n, k, blocks, eps, x_factor, codes_per_unit, codes_stride, codes_t_stride,
    NORM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, WIDER: tl.constexpr,
    DEPTH: tl.constexpr, PROMOTED: tl.constexpr, X_ROWWISE: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    HIGH: tl.constexpr, CODES: tl.constexpr, CODES_T: tl.constexpr, SAVED: tl.constexpr,
    PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Product, norm and activation of one block for ROWS rows.

    PERSISTENT: a program takes one tile after another, in one loop with the contraction, so that the next tile's loads run
    during the epilogue of this one. Otherwise it has one tile, and lets the next kernel start during its epilogue.
    """
    wait_for_kernels_before()
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tl.cdiv(m, ROWS) * blocks, tl.num_programs(0), flatten=True):
            z_MN, index_M, index_N, inside_N, size, block = _product(
                tile, x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, m, n, k, blocks, x_factor,
                NORM, ROWS, COLS, WIDTH, WIDER, DEPTH, PROMOTED, X_ROWWISE, HAS_BIAS, False,
            )  # fmt: skip
            _finish_and_store(
                z_MN, index_M, index_N, inside_N, size, block, m, n, eps, codes_per_unit,
                y_ptr, codes_ptr, codes_stride, codes_t_ptr, codes_t_stride, u_ptr, rstd_ptr,
                NORM, ACTIVATION, HIGH, CODES, CODES_T, SAVED,
            )  # fmt: skip
    else:
        z_MN, index_M, index_N, inside_N, size, block = _product(
            tl.program_id(0), x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, m, n, k, blocks, x_factor,
            NORM, ROWS, COLS, WIDTH, WIDER, DEPTH, PROMOTED, X_ROWWISE, HAS_BIAS, True,
        )  # fmt: skip
        _finish_and_store(
            z_MN, index_M, index_N, inside_N, size, block, m, n, eps, codes_per_unit,
            y_ptr, codes_ptr, codes_stride, codes_t_ptr, codes_t_stride, u_ptr, rstd_ptr,
            NORM, ACTIVATION, HIGH, CODES, CODES_T, SAVED,
        )  # fmt: skip


@triton.jit
def norm_forward_kernel(
    z_ptr, y_ptr, codes_ptr, codes_t_ptr, u_ptr, rstd_ptr,
    m, n, z_stride, blocks, eps, codes_per_unit, codes_stride, codes_t_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, WIDER: tl.constexpr, ACTIVATION: tl.constexpr,
    HIGH: tl.constexpr, CODES: tl.constexpr, CODES_T: tl.constexpr, SAVED: tl.constexpr,
):  # fmt: skip
    """Norm and activation of one block of a z that something else has written, for ROWS rows."""
    wait_for_kernels_before()
    tile_m, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    _, index_N, inside_N, size = columns_of(block, n, tl.arange(0, COLS), True, WIDTH, WIDER)
    index_M = tile_m * ROWS + tl.arange(0, ROWS)
    loaded = (index_M < m)[:, None] & inside_N[None, :]
    z_MN = tl.load(z_ptr + index_M.to(tl.int64)[:, None] * z_stride + index_N[None, :], mask=loaded, other=0.0).to(tl.float32)
    _finish_and_store(
        z_MN, index_M, index_N, inside_N, size, block, m, n, eps, codes_per_unit,
        y_ptr, codes_ptr, codes_stride, codes_t_ptr, codes_t_stride, u_ptr, rstd_ptr,
        True, ACTIVATION, HIGH, CODES, CODES_T, SAVED,
    )  # fmt: skip
