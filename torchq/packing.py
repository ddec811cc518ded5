"""Bit packing in compressed-tensors order. Nothing about modules.

A row of b-bit codes is one dense little-endian bit stream along K: code ``i`` fills bits ``[i b, (i + 1) b)``, so 32 codes
fill exactly b words of 32 bits and 3-, 5-, 6- and 7-bit codes straddle words. Codes are signed, ``[-2^(b-1), 2^(b-1) - 1]``,
and are stored with ``2^(b-1)`` added. The last word is cut off at ``ceil(K b / 32)``.

Source: compressed-tensors, format ``pack-quantized``.
"""

import torch
from torch import Tensor

_CODES_PER_BLOCK = 32  # this many b-bit codes fill exactly b words


def packed_words(num_codes: int, num_bits: int) -> int:
    """Return how many int32 words a row of ``num_codes`` codes of ``num_bits`` takes."""
    return -(-num_codes * num_bits // 32)


def pack_int32(q: Tensor, num_bits: int) -> Tensor:
    """Pack signed codes into int32 words along the last dimension.

    Args:
        q: Codes, [N, K] int8 in [-2^(num_bits - 1), 2^(num_bits - 1) - 1].
        num_bits: Bits per code, 2 to 8.

    Returns:
        [N, ceil(K num_bits / 32)] int32, contiguous.

    Raises:
        ValueError: If ``num_bits``, the dtype or the number of dimensions is wrong, or a code is out of range.
    """
    _check_num_bits(num_bits)
    if q.dtype != torch.int8 or q.ndim != 2:
        raise ValueError(f"q must be a 2-D int8 tensor, got {q.ndim}-D {q.dtype}")
    half = 1 << (num_bits - 1)
    if q.numel() and num_bits < 8:
        low, high = (int(v) for v in torch.aminmax(q))
        if low < -half or high >= half:
            raise ValueError(f"q must lie in [{-half}, {half - 1}] for num_bits={num_bits}, got [{low}, {high}]")
    n, k = q.shape
    pad = -k % _CODES_PER_BLOCK
    codes = torch.nn.functional.pad(q, (0, pad), value=-half) if pad else q
    codes = codes.reshape(n, (k + pad) // _CODES_PER_BLOCK, _CODES_PER_BLOCK)
    words = torch.zeros(n, codes.shape[1], num_bits, dtype=torch.int32, device=q.device)
    for i in range(_CODES_PER_BLOCK):
        code = codes[..., i].to(torch.int32).add_(half)
        word, shift = divmod(i * num_bits, 32)
        words[..., word] |= code << shift
        if shift + num_bits > 32:
            words[..., word + 1] |= code >> (32 - shift)
    return words.flatten(1)[:, : packed_words(k, num_bits)].contiguous()


def unpack_int32(packed: Tensor, num_bits: int, shape: tuple[int, int] | torch.Size) -> Tensor:
    """Invert :func:`pack_int32`.

    Args:
        packed: [N, ceil(K num_bits / 32)] int32.
        num_bits: Bits per code, 2 to 8.
        shape: (N, K).

    Returns:
        Signed codes, [N, K] int8, contiguous.

    Raises:
        ValueError: If ``packed`` does not have the dtype and shape that ``shape`` calls for.
    """
    _check_num_bits(num_bits)
    n, k = (int(v) for v in shape)
    if packed.dtype != torch.int32 or tuple(packed.shape) != (n, packed_words(k, num_bits)):
        raise ValueError(
            f"packed must be int32 of shape {(n, packed_words(k, num_bits))} for shape={(n, k)} and num_bits={num_bits}, "
            f"got {packed.dtype} of shape {tuple(packed.shape)}"
        )
    num_blocks = -(-k // _CODES_PER_BLOCK)
    pad = num_blocks * num_bits - packed.shape[1]
    words = (torch.nn.functional.pad(packed, (0, pad)) if pad else packed).reshape(n, num_blocks, num_bits)
    codes = torch.empty(n, num_blocks, _CODES_PER_BLOCK, dtype=torch.int8, device=packed.device)
    half, mask = 1 << (num_bits - 1), (1 << num_bits) - 1
    for i in range(_CODES_PER_BLOCK):
        word, shift = divmod(i * num_bits, 32)
        code = words[..., word] >> shift  # arithmetic shift: the mask below removes the copies of the sign bit
        if shift + num_bits > 32:
            code = (code & ((1 << (32 - shift)) - 1)) | (words[..., word + 1] << (32 - shift))
        codes[..., i] = (code & mask).sub_(half)
    return codes.flatten(1)[:, :k].contiguous()


def pack_zero_point(zero_point: Tensor, num_bits: int) -> Tensor:
    """Pack zero points, [N, G] int8, along N as compressed-tensors does: [ceil(N num_bits / 32), G] int32."""
    return pack_int32(zero_point.t().contiguous(), num_bits).t().contiguous()


def unpack_zero_point(packed: Tensor, num_bits: int, shape: tuple[int, int]) -> Tensor:
    """Invert :func:`pack_zero_point`: [ceil(N num_bits / 32), G] int32 -> ``shape`` = (N, G) int8."""
    n, num_groups = shape
    return unpack_int32(packed.t().contiguous(), num_bits, (num_groups, n)).t().contiguous()


def _check_num_bits(num_bits: int) -> None:
    if not 2 <= num_bits <= 8:
        raise ValueError(f"num_bits must be 2 to 8, got {num_bits}")
