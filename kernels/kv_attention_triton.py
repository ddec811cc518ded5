"""Attention over a quantized KV cache: the Triton kernels, which decode keys and values in registers.

Shapes (``kv_cache.py`` has the layout): R slots, D head_dim of keys, DV of values, N rows (queries of the heads that share keys).
A program attends N rows to every tile of BLOCK_T tokens in its part of the cache; keys and values are the *left* operands,

    S [tokens, N] = K [tokens, D] Q [D, N]          O [DV, N] += V [DV, tokens] P [tokens, N]

so that their 8-bit codes go from memory through shared memory into the registers from which a tensor core reads them, and no
decoded value is exchanged between threads: that is why values lie transposed. Codes come in words of four. The bytes 0 and 2 of
a word, masked, are the two halves of a register, and so are 1 and 3: *planes*, of every other channel (keys) or token (values).
Queries are split likewise, and even and odd tokens are two tiles of rows of S, so each plane multiplies what belongs to it.

Decode, without a conversion: ``0x6400 | code`` is the float16 1024 + code. From values, 1024 and the middle of the codes are then
subtracted in float16, which is exact; from keys through the sum of the queries, in float32, which is free: it is where sums
start. (Not so from values: over thousands of tokens 1152 would cost the average of codes near 0 its digits.) Zero points act on
sums too. The bits of an fp8 (e4m3) value, moved to the places of float16's, are the value times 2^-8: on every architecture
alike, and no code is NaN.

Range: each row of queries is divided by a power of two, and then float16: bfloat16 keeps all its bits down to 2^-17 of the row's
largest. Probabilities times the values' scales, P = 2^(s - m) scale, are float16 too: m is the running maximum not of s but of
s + log2(scale), so P is at most 1.1, and what float16 rounds to 0 is below 2^-24 of the largest share of the output, whatever
the scales. The denominator is the float32 sum of 2^(s - m): each thread adds its own tokens, and at the end threads' sums add up.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)
"""In place of -inf as the maximum of nothing: differences stay numbers."""


@triton.jit
def _halves(pair):
    """The two 16-bit numbers in each word."""
    return (pair & 0xFFFF).to(tl.int16), (pair >> 16).to(tl.int16)


@triton.jit
def _plane(pair, DTYPE: tl.constexpr):
    """Halves of registers, [rows, C] int32 -> [rows, 2 C] DTYPE."""
    low, high = _halves(pair)
    both = tl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True))
    return both.reshape(pair.shape[0], 2 * pair.shape[1])


@triton.jit
def _decode(words, PLANE: tl.constexpr, FORMAT: tl.constexpr, MIDDLE: tl.constexpr):
    """Plane 0 or 1 of words of 8-bit codes, 0 to 3 of 4-bit ones, as float16.

    That is fp8 times 2^-8, int8 plus 1152 - MIDDLE, and int4 plus 1024 - MIDDLE. Planes of 4 bits: low and high nibbles of bytes
    0 and 2, then of 1 and 3.
    """
    if FORMAT == "fp8":
        shifted = words if PLANE else words << 8
        return _plane((shifted & -0x7FFF8000) | ((shifted >> 1) & 0x3F803F80), tl.float16)
    elif FORMAT == "int8":
        shifted = words >> 8 if PLANE else words
        codes = _plane((shifted & 0xFF00FF) ^ 0x64806480, tl.float16)
        return (codes - MIDDLE).to(tl.float16) if MIDDLE else codes
    else:
        codes = _plane(((words >> (4 * PLANE)) & 0xF000F) | 0x64006400, tl.float16)
        return (codes - MIDDLE).to(tl.float16) if MIDDLE else codes


@triton.jit
def _load_words(ptrs, mask, index, stop, MASKED: tl.constexpr, ALIGNED: tl.constexpr):
    """Words at pointers to them; of codes that do not lie on words, at pointers to the first byte, whose index is below stop."""
    if ALIGNED and MASKED:
        return tl.load(ptrs, mask=mask, other=0, eviction_policy="evict_first")
    elif ALIGNED:
        return tl.load(ptrs, eviction_policy="evict_first")
    else:
        words = tl.load(ptrs, mask=mask, other=0).to(tl.int32)
        for byte in tl.static_range(1, 4):
            words |= tl.load(ptrs + byte, mask=mask & (index + byte < stop), other=0).to(tl.int32) << (8 * byte)
        return words


@triton.jit
def _load_scale(ptr, start, offsets, stride, live, MASKED: tl.constexpr):
    """One number for each token, float32."""
    ptr += start.to(tl.int64) * stride
    if MASKED:
        return tl.load(ptr + offsets * stride, mask=live, other=0.0).to(tl.float32)
    else:
        return tl.load(ptr + offsets * stride).to(tl.float32)


@triton.jit
def _log2(x):
    """About log2, at most 0.09 less: the exponent, and the mantissa as if it were linear; of 0, -127."""
    return x.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-23 - 127.0


@triton.jit
def _load_query(ptrs, mask_n, first, stride, STEP: tl.constexpr, COUNT: tl.constexpr, STOP: tl.constexpr):
    """Channels first, first + STEP, ... below STOP of the rows, [COUNT, N] float32."""
    channels = first + STEP * tl.arange(0, COUNT)
    mask = mask_n[None, :] & (channels < STOP)[:, None]
    return tl.load(ptrs[None, :] + channels[:, None] * stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _apart(query, GROUPS: tl.constexpr):
    """Every other channel of a half of the queries, [C, N] -> [C, GROUPS N]: a group's are in columns of its own, elsewhere 0."""
    mine = (tl.arange(0, query.shape[0]) // 16)[:, None] == tl.arange(0, GROUPS)[None, :]
    apart = tl.where(mine[:, :, None], query[:, None, :], 0.0)
    return apart.reshape(query.shape[0], GROUPS * query.shape[1])


@triton.jit
def _load_groups(ptr, tokens, stride_g, stride_t, live, first, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """Of groups first, ..., first + COUNT - 1 at tokens, [tokens, GROUPS] float32: 0 past COUNT, and where not live."""
    groups = tl.arange(0, GROUPS)
    mask = live[:, None] & (groups < COUNT)[None, :]
    ptr += first * stride_g
    return tl.load(ptr + groups[None, :] * stride_g + tokens.to(tl.int64)[:, None] * stride_t, mask=mask, other=0.0)


@triton.jit
def _score_groups(dots, sums, scale, zero, N: tl.constexpr):
    """Products [tokens, G N] of queries with 4-bit codes less 8 -> with keys, [tokens, N]."""
    parts = dots.reshape(dots.shape[0], scale.shape[1], N) - sums[None, :, :] * (zero * 0.0625 + 1024.0)[:, :, None]
    return tl.sum(parts * scale[:, :, None], 1)


@triton.jit
def _scores(
    k, q0, q1, q2, q3, sums0, sums1, scale_ptr, zero_ptr, start, offsets, live, stride_sg, stride_st, stride_zg, stride_zt,
    D: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Products of queries with the keys of tokens, [tokens, N] float32 (of fp8 times 2^-8)."""
    if KEYS == "16bit":
        return tl.dot(k, q0, input_precision="ieee")
    elif KEYS == "int4":
        COUNT: tl.constexpr = D // 64
        GROUPS: tl.constexpr = sums0.shape[0]
        tokens = start + offsets
        scale_low = _load_groups(scale_ptr, tokens, stride_sg, stride_st, live, 0, GROUPS, COUNT).to(tl.float32)
        scale_high = _load_groups(scale_ptr, tokens, stride_sg, stride_st, live, COUNT, GROUPS, COUNT).to(tl.float32)
        zero_low = _load_groups(zero_ptr, tokens, stride_zg, stride_zt, live, 0, GROUPS, COUNT).to(tl.float32)
        zero_high = _load_groups(zero_ptr, tokens, stride_zg, stride_zt, live, COUNT, GROUPS, COUNT).to(tl.float32)
        low = tl.dot(_decode(k, 2, KEYS, 0), q2, tl.dot(_decode(k, 0, KEYS, 0), q0))
        high = tl.dot(_decode(k, 3, KEYS, 0), q3, tl.dot(_decode(k, 1, KEYS, 0), q1))
        return _score_groups(low, sums0, scale_low, zero_low, N) + _score_groups(high, sums1, scale_high, zero_high, N)
    else:
        scale = _load_scale(scale_ptr, start, offsets, stride_st, live, MASKED)
        if KEYS == "int8":
            dots = tl.dot(_decode(k, 0, KEYS, 0), q0, tl.broadcast_to(sums0[None, :], (k.shape[0], N)))
        else:
            dots = tl.dot(_decode(k, 0, KEYS, 0), q0)
        return tl.dot(_decode(k, 1, KEYS, 0), q1, dots) * scale[:, None]


@triton.jit
def _finish_scores(
    s, factor, live, tokens, newest, R, query_age, window, softcap, mask_ptrs, column, L, stride_ml,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Products [tokens, N] -> scores in units of log2, after softcap and masks; -inf where not allowed.

    Without softcap and floating mask the factor [N] is left to the caller, who multiplies and adds at once. An age is how many
    tokens came later: of each slot, and of each row (-1 of rows that pad).
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    if SOFTCAP or MASK == "float":
        s *= factor[None, :]
    if SOFTCAP:  # tanh(x) = 1 - 2 / (e^2x + 1)
        s = softcap * LOG2E * (1.0 - 2.0 / (tl.exp2(s * (2.0 / softcap)) + 1.0))
    allowed = live[:, None]
    if CAUSAL or WINDOW or MASK != "none":
        age = newest - tokens
        age = tl.where(age < 0, age + R, age)
        if CAUSAL:
            allowed = allowed & (age[:, None] >= query_age[None, :])
        if WINDOW:
            allowed = allowed & (age[:, None] < query_age[None, :] + window)
        if MASK != "none":
            columns = column - age
            allowed = allowed & (query_age >= 0)[None, :] & ((columns >= 0) & (columns < L))[:, None]
            entries = tl.load(mask_ptrs[None, :] + columns[:, None] * stride_ml, mask=allowed, other=0)
            if MASK == "bool":
                allowed = allowed & (entries != 0)
            else:
                s += entries.to(tl.float32) * LOG2E
    return tl.where(allowed, s, float("-inf"))


@triton.jit
def _repeat(x, GROUPS: tl.constexpr):
    """[N] -> [GROUPS N]."""
    return tl.broadcast_to(x[None, :], (GROUPS, x.shape[0])).reshape(GROUPS * x.shape[0])


@triton.jit
def _spread(p, scale):
    """Probabilities [tokens, N] times the scales of groups [tokens, G] -> [tokens, G N] float16."""
    return (p[:, None, :] * scale[:, :, None]).reshape(p.shape[0], scale.shape[1] * p.shape[1]).to(tl.float16)


@triton.jit
def _zero_share(weight, zero, N: tl.constexpr):
    """Weights [tokens, G N] times the zero points, less 8, of their groups [tokens, G]."""
    zeros = (zero.to(tl.float32) * 0.0625 - 8.0)[:, :, None]
    return (weight.to(tl.float32).reshape(weight.shape[0], zero.shape[1], N) * zeros).reshape(weight.shape[0], weight.shape[1])


@triton.jit
def _gather_groups(acc, zeros, GROUPS: tl.constexpr, N: tl.constexpr):
    """Of accumulators [C, G N] the columns of each row's group, less what zero points add: [C, N]."""
    acc = (acc - tl.sum(zeros, 0)[None, :]).reshape(acc.shape[0], GROUPS, N)
    mine = (tl.arange(0, acc.shape[0]) // 32)[:, None] == tl.arange(0, GROUPS)[None, :]
    return tl.sum(tl.where(mine[:, :, None], acc, 0.0), 1)


@triton.jit(do_not_specialize=["num_new", "L", "splits", "window"])
def attention_kernel(
    q_ptr, k_ptr, ks_ptr, kz_ptr, v_ptr, vs_ptr, vz_ptr, length_ptr, mask_ptr, mask_offset_ptr, parts_ptr, max_ptr, sum_ptr,
    H, rep, num_new, R, L, splits, scaling, softcap, window,
    stride_qb, stride_qh, stride_qi, stride_qd, stride_kb, stride_kh, stride_vb, stride_vh, stride_vd,
    stride_ksb, stride_ksh, stride_ksg, stride_kst, stride_kzb, stride_kzh, stride_kzg, stride_kzt,
    stride_vsb, stride_vsh, stride_vsg, stride_vst, stride_vzb, stride_vzh, stride_vzg, stride_vzt,
    stride_mb, stride_mh, stride_mi, stride_ml,
    STRIDE_KT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, DTYPE: tl.constexpr,
    N: tl.constexpr, BLOCK_T: tl.constexpr, MULTIPLE: tl.constexpr, RAGGED: tl.constexpr, MASKED: tl.constexpr,
    KEYS_ALIGNED: tl.constexpr, VALUES_ALIGNED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One program: a key/value head of a sequence, one of ``splits`` parts of what is stored, N of the rows (token, head).

    Codes are addressed in words where ALIGNED, else in bytes; 16-bit keys in elements, 16-bit values in words of two where
    ALIGNED. DTYPE: of 16-bit keys and values. STRIDE_KT is a constant so that the addresses of a tile's rows are too. MULTIPLE
    divides R and BLOCK_T; RAGGED: BLOCK_T does not divide R; MASKED: R < BLOCK_T. Writes sums of P times V [part, row, DV], their
    exponents m, and denominators.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    HALF_T: tl.constexpr = BLOCK_T // 2
    DP: tl.constexpr = triton.next_power_of_2(D)
    DVP: tl.constexpr = triton.next_power_of_2(DV)
    GROUPS_K: tl.constexpr = DP // 64  # of 4 bits, in each half of the channels
    GROUPS_V: tl.constexpr = DVP // 64
    WORDS_K: tl.constexpr = DP // 8 if KEYS == "int4" else DP // 4  # of a token
    ROWS_V: tl.constexpr = DVP // 2 if VALUES == "int4" else DVP
    LIVE_V: tl.constexpr = DV // 2 if VALUES == "int4" else DV  # of these rows
    PER_V: tl.constexpr = 1 if not VALUES_ALIGNED else 2 if VALUES == "16bit" else 4  # tokens that a pointer's step goes over
    FACTOR: tl.constexpr = 2.0**8 if KEYS == "fp8" else 1.0
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    split = tl.program_id(1)
    rows = tl.program_id(2) * N + tl.arange(0, N)
    token = rows // rep
    mask_n = token < num_new
    q_head = h * rep + rows % rep
    query_age = tl.where(mask_n, num_new - 1 - token, -1)
    length = tl.load(length_ptr)
    stored = tl.minimum(length, R).to(tl.int32)
    newest = ((length - 1) % R).to(tl.int32)  # its slot
    mask_ptrs, column = rows, length  # of no mask
    if MASK != "none":
        mask_ptrs = mask_ptr + b * stride_mb + q_head * stride_mh + token.to(tl.int64) * stride_mi
        column = length - 1 - tl.load(mask_offset_ptr)  # of the newest token

    # ---- queries, apart by the planes that they multiply, and divided by a power of two for each row
    q_ptrs = q_ptr + b * stride_qb + q_head * stride_qh + token.to(tl.int64) * stride_qi
    k_dtype: tl.constexpr = DTYPE if KEYS == "16bit" else tl.float16
    if KEYS == "16bit":
        q0 = _load_query(q_ptrs, mask_n, 0, stride_qd, 1, DP, D)
        top = tl.max(tl.abs(q0), 0)
    elif KEYS == "int4":
        q0 = _load_query(q_ptrs, mask_n, 0, stride_qd, 2, DP // 4, D // 2)
        other = _load_query(q_ptrs, mask_n, D // 2, stride_qd, 2, DP // 4, D)
        half0 = _load_query(q_ptrs, mask_n, 1, stride_qd, 2, DP // 4, D // 2)
        half1 = _load_query(q_ptrs, mask_n, D // 2 + 1, stride_qd, 2, DP // 4, D)
        top = tl.max(tl.maximum(tl.maximum(tl.abs(q0), tl.abs(other)), tl.maximum(tl.abs(half0), tl.abs(half1))), 0)
    else:
        q0 = _load_query(q_ptrs, mask_n, 0, stride_qd, 2, DP // 2, D)
        other = _load_query(q_ptrs, mask_n, 1, stride_qd, 2, DP // 2, D)
        top = tl.max(tl.maximum(tl.abs(q0), tl.abs(other)), 0)
    exponent = tl.maximum(top.to(tl.int32, bitcast=True) & 0x7F800000, 27 << 23)  # at least 2^-100
    down = (0x7F000000 - exponent).to(tl.float32, bitcast=True)[None, :]
    q_scale = exponent.to(tl.float32, bitcast=True) * (scaling * LOG2E * FACTOR)
    q0 = (q0 * down).to(k_dtype)
    q1 = q0
    if KEYS != "16bit":
        q1 = (other * down).to(k_dtype)
    q2, q3, sums0, sums1 = q0, q0, q_scale, q_scale  # which 8 and 16 bits do not use
    if KEYS == "int8":
        sums0 = (tl.sum(q0.to(tl.float32), 0) + tl.sum(q1.to(tl.float32), 0)) * -1152.0
    if KEYS == "int4":
        q0, q1 = _apart(q0, GROUPS_K), _apart(q1, GROUPS_K)
        q2, q3 = _apart((half0 * down).to(k_dtype), GROUPS_K), _apart((half1 * down).to(k_dtype), GROUPS_K)
        sums0 = (tl.sum(q0.to(tl.float32), 0) + tl.sum(q2.to(tl.float32), 0)).reshape(GROUPS_K, N)
        sums1 = (tl.sum(q1.to(tl.float32), 0) + tl.sum(q3.to(tl.float32), 0)).reshape(GROUPS_K, N)

    # ---- tiles of this program: of those that any of its rows may see
    begin, end = tl.full((), 0, tl.int64), stored.to(tl.int64)
    if WINDOW and length <= R:
        begin = tl.maximum(length - num_new + tl.program_id(2) * N // rep - window + 1, begin)
    if CAUSAL and length <= R:
        end = tl.minimum(length - num_new + (tl.program_id(2) * N + N - 1) // rep + 1, end)
    begin = (begin // BLOCK_T).to(tl.int32)
    tiles = tl.cdiv(end, BLOCK_T).to(tl.int32)
    share = tl.cdiv(tl.maximum(tiles - begin, 0), splits)
    first = begin + split * share
    last = tl.minimum(first + share, tiles)

    even = 2 * tl.arange(0, HALF_T)
    odd = even + 1
    words_k = tl.arange(0, WORDS_K)
    if KEYS == "16bit":
        columns_k = tl.arange(0, DP)
        mask_k = (columns_k < D)[None, :]
    else:
        columns_k = words_k if KEYS_ALIGNED else 4 * words_k
        mask_k = (words_k < (D // 8 if KEYS == "int4" else D // 4))[None, :]
    k_ptrs = k_ptr + b * stride_kb + h * stride_kh + even[:, None] * STRIDE_KT + columns_k[None, :]
    rows_v = tl.arange(0, ROWS_V)
    if VALUES == "16bit":
        tokens_v = even
        columns_v = tl.arange(0, HALF_T) if VALUES_ALIGNED else even
    else:
        tokens_v = 4 * tl.arange(0, BLOCK_T // 4)
        columns_v = tl.arange(0, BLOCK_T // 4) if VALUES_ALIGNED else tokens_v
    mask_v = (rows_v < LIVE_V)[:, None] & (tokens_v < R)[None, :]
    MASKED_V: tl.constexpr = MASKED or DV != DVP
    v_ptrs = v_ptr + b * stride_vb + h * stride_vh + rows_v.to(tl.int64)[:, None] * stride_vd + columns_v[None, :]
    ks_ptr += b * stride_ksb + h * stride_ksh
    kz_ptr += b * stride_kzb + h * stride_kzh
    vs_ptr += b * stride_vsb + h * stride_vsh
    vz_ptr += b * stride_vzb + h * stride_vzh

    m = tl.full((N,), LOWEST, tl.float32)
    denominator = tl.zeros((HALF_T, N), tl.float32)
    if VALUES == "int4":
        acc = tl.zeros((ROWS_V, GROUPS_V * N), tl.float32)
        acc_high = tl.zeros((ROWS_V, GROUPS_V * N), tl.float32)
        zeros_low = tl.zeros((HALF_T, GROUPS_V * N), tl.float32)
        zeros_high = tl.zeros((HALF_T, GROUPS_V * N), tl.float32)
    else:
        acc = tl.zeros((ROWS_V, N), tl.float32)
    for tile in range(first, last):
        wanted = tile * BLOCK_T
        start, live0, live1 = wanted, even < stored - wanted, odd < stored - wanted
        if RAGGED:  # the last tile reaches back
            start = tl.multiple_of(tl.minimum(wanted, tl.maximum(R - BLOCK_T, 0)), MULTIPLE)
            live0 = (even >= wanted - start) & (even < stored - start)
            live1 = (odd >= wanted - start) & (odd < stored - start)
        k_start = k_ptrs + start.to(tl.int64) * STRIDE_KT
        if KEYS == "16bit":
            k0 = tl.load(k_start, mask=mask_k & (even < R)[:, None], other=0.0, eviction_policy="evict_first")
            k1 = tl.load(k_start + STRIDE_KT, mask=mask_k & (odd < R)[:, None], other=0.0, eviction_policy="evict_first")
        else:
            MASKED_K: tl.constexpr = MASKED or D != DP
            k0 = _load_words(k_start, mask_k & (even < R)[:, None], 0, 4, MASKED_K, KEYS_ALIGNED)
            k1 = _load_words(k_start + STRIDE_KT, mask_k & (odd < R)[:, None], 0, 4, MASKED_K, KEYS_ALIGNED)
        v_start = v_ptrs + start // PER_V
        if VALUES != "16bit":
            v = _load_words(v_start, mask_v, tokens_v[None, :], R, MASKED_V, VALUES_ALIGNED)
        elif VALUES_ALIGNED:
            v = tl.load(v_start, mask=mask_v, other=0, eviction_policy="evict_first")
        else:
            v0 = tl.load(v_start, mask=mask_v, other=0.0)
            v1 = tl.load(v_start + 1, mask=mask_v & (odd < R)[None, :], other=0.0)

        s0 = _scores(
            k0, q0, q1, q2, q3, sums0, sums1, ks_ptr, kz_ptr, start, even, live0,
            stride_ksg, stride_kst, stride_kzg, stride_kzt, D, KEYS, MASKED, N,
        )  # fmt: skip
        s1 = _scores(
            k1, q0, q1, q2, q3, sums0, sums1, ks_ptr, kz_ptr, start, odd, live1,
            stride_ksg, stride_kst, stride_kzg, stride_kzt, D, KEYS, MASKED, N,
        )  # fmt: skip
        s0 = _finish_scores(
            s0, q_scale, live0, start + even, newest, R, query_age, window, softcap, mask_ptrs, column, L, stride_ml,
            CAUSAL, WINDOW, SOFTCAP, MASK,
        )  # fmt: skip
        s1 = _finish_scores(
            s1, q_scale, live1, start + odd, newest, R, query_age, window, softcap, mask_ptrs, column, L, stride_ml,
            CAUSAL, WINDOW, SOFTCAP, MASK,
        )  # fmt: skip

        # ---- probabilities, in units of 2^m
        factor = tl.full((1, N), 1.0, tl.float32) if SOFTCAP or MASK == "float" else q_scale[None, :]
        if VALUES == "16bit":
            new_m = tl.maximum(m, tl.max(tl.maximum(s0, s1) * factor, 0))
        elif VALUES == "int4":
            COUNT_V: tl.constexpr = DV // 64
            low0 = _load_groups(vs_ptr, start + even, stride_vsg, stride_vst, live0, 0, GROUPS_V, COUNT_V).to(tl.float32)
            low1 = _load_groups(vs_ptr, start + odd, stride_vsg, stride_vst, live1, 0, GROUPS_V, COUNT_V).to(tl.float32)
            high0 = _load_groups(vs_ptr, start + even, stride_vsg, stride_vst, live0, COUNT_V, GROUPS_V, COUNT_V).to(tl.float32)
            high1 = _load_groups(vs_ptr, start + odd, stride_vsg, stride_vst, live1, COUNT_V, GROUPS_V, COUNT_V).to(tl.float32)
            log0 = _log2(tl.max(tl.maximum(low0, high0), 1))
            log1 = _log2(tl.max(tl.maximum(low1, high1), 1))
            new_m = tl.maximum(m, tl.max(tl.maximum(s0 * factor + log0[:, None], s1 * factor + log1[:, None]), 0))
        else:
            scale0 = _load_scale(vs_ptr, start, even, stride_vst, live0, MASKED)
            scale1 = _load_scale(vs_ptr, start, odd, stride_vst, live1, MASKED)
            scale0, scale1 = tl.where(live0, scale0, 0.0), tl.where(live1, scale1, 0.0)  # what is not stored may be NaN
            log0, log1 = _log2(scale0), _log2(scale1)
            new_m = tl.maximum(m, tl.max(tl.maximum(s0 * factor + log0[:, None], s1 * factor + log1[:, None]), 0))
        p0, p1 = tl.exp2(s0 * factor - new_m[None, :]), tl.exp2(s1 * factor - new_m[None, :])
        decay = tl.exp2(m - new_m)
        m = new_m
        denominator = denominator * decay[None, :] + (p0 + p1)

        # ---- values
        if VALUES == "int4":
            wide = _repeat(decay, GROUPS_V)[None, :]
            zero0 = _load_groups(vz_ptr, start + even, stride_vzg, stride_vzt, live0, 0, GROUPS_V, COUNT_V)
            zero1 = _load_groups(vz_ptr, start + odd, stride_vzg, stride_vzt, live1, 0, GROUPS_V, COUNT_V)
            weight0, weight1 = _spread(p0, low0), _spread(p1, low1)
            zeros_low = zeros_low * wide + _zero_share(weight0, zero0, N) + _zero_share(weight1, zero1, N)
            acc = tl.dot(_decode(v, 0, VALUES, 1032), weight0, acc * wide)
            acc = tl.dot(_decode(v, 2, VALUES, 1032), weight1, acc)
            zero0 = _load_groups(vz_ptr, start + even, stride_vzg, stride_vzt, live0, COUNT_V, GROUPS_V, COUNT_V)
            zero1 = _load_groups(vz_ptr, start + odd, stride_vzg, stride_vzt, live1, COUNT_V, GROUPS_V, COUNT_V)
            weight0, weight1 = _spread(p0, high0), _spread(p1, high1)
            zeros_high = zeros_high * wide + _zero_share(weight0, zero0, N) + _zero_share(weight1, zero1, N)
            acc_high = tl.dot(_decode(v, 1, VALUES, 1032), weight0, acc_high * wide)
            acc_high = tl.dot(_decode(v, 3, VALUES, 1032), weight1, acc_high)
        elif VALUES == "16bit":
            if VALUES_ALIGNED:
                v0, v1 = _halves(v)
                v0, v1 = v0.to(DTYPE, bitcast=True), v1.to(DTYPE, bitcast=True)
            v0, v1 = tl.where(live0[None, :], v0, 0.0), tl.where(live1[None, :], v1, 0.0)  # what is not stored may be NaN
            acc = tl.dot(v0.to(DTYPE), p0.to(DTYPE), acc * decay[None, :], input_precision="ieee")
            acc = tl.dot(v1.to(DTYPE), p1.to(DTYPE), acc, input_precision="ieee")
        else:
            acc = tl.dot(_decode(v, 0, VALUES, 1152), (p0 * scale0[:, None]).to(tl.float16), acc * decay[None, :])
            acc = tl.dot(_decode(v, 1, VALUES, 1152), (p1 * scale1[:, None]).to(tl.float16), acc)

    # ---- results
    total_rows = tl.num_programs(2) * N
    part = (head * splits + split) * total_rows + rows
    tl.store(max_ptr + part, m)
    tl.store(sum_ptr + part, tl.sum(denominator, 0))
    if first < last:
        parts_ptrs = parts_ptr + part[None, :] * DV + rows_v[:, None]
        mask = (rows_v < LIVE_V)[:, None] & mask_n[None, :]
        if VALUES == "int4":
            tl.store(parts_ptrs, _gather_groups(acc, zeros_low, GROUPS_V, N), mask=mask)
            tl.store(parts_ptrs + LIVE_V, _gather_groups(acc_high, zeros_high, GROUPS_V, N), mask=mask)
        else:
            tl.store(parts_ptrs, acc * (2.0**8 if VALUES == "fp8" else 1.0), mask=mask)
