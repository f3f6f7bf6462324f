"""The mask of dropout from a counter, in Triton: the same wherever it is computed, so that none is ever stored.

One 32-bit word for every two neighbouring columns, sixteen bits each, from a mixer of 32-bit numbers (two rounds of
multiply and xor-shift, the constants of Wellons' lowbias32) keyed by 64 bits. The pair is found by shifting the
column, so a program whose threads hold neighbours, as every layout of bf16 does, computes the word once for both: about
seven integer instructions for a number, where Philox takes tens.
"""

import triton
import triton.language as tl


@triton.jit
def mixed(x, key):
    """Thirty-two bits that look random, of a counter; `key` comes in between its two rounds."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= (x >> 15) ^ key
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def load_keys(seed_ptr, salt, THRESHOLD: tl.constexpr):
    """Two keys of 32 bits, as blocks of one, from a seed of 64 and the place where it is used."""
    zero = tl.arange(0, 1)
    keys = zero, zero
    if THRESHOLD > 0:
        seed = tl.load(seed_ptr + zero)
        place = (zero + salt).to(tl.uint32)
        key = mixed(seed.to(tl.uint32), place)
        keys = key, mixed((seed >> 32).to(tl.uint32) ^ key, place)
    return keys


@triton.jit
def kept_scale(THRESHOLD: tl.constexpr):
    """The factor of kept elements, which preserves the mean."""
    return 65536.0 / (65536 - THRESHOLD)


@triton.jit
def dropped(x_ND, keys, rows, first, D: tl.constexpr, THRESHOLD: tl.constexpr):
    """A block of a [N, D] matrix with zeros where dropout puts them; the others are to be multiplied by `kept_scale`.

    `rows` count from the matrix' first; the block's columns from the even number `first`. THRESHOLD is the rate in
    65536ths; of 0 leaves everything.
    """
    if THRESHOLD > 0:
        columns = tl.arange(0, x_ND.shape[1])
        key, between = keys
        pairs_N = rows.to(tl.uint32) * ((D + 1) // 2) + key
        word_ND = mixed(pairs_N[:, None] + (first // 2 + (columns >> 1)).to(tl.uint32)[None, :], between[None, :])
        number_ND = tl.where((columns & 1)[None, :] == 1, word_ND >> 16, word_ND & 0xFFFF)
        x_ND = tl.where(number_ND >= THRESHOLD, x_ND, 0.0)
    return x_ND
