"""Random draws as a pure function of (seed, round, client, step, purpose, element).

A torch generator has one stream, so it cannot give each lane of a folded batch its own draws, nor the same draws when
lanes are grouped differently. Hashing a counter can: a lane's key is a 64-bit integer, and element i of a draw is a
hash of (key, i).
"""

import hashlib
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX64 = (-49064778989728563, -4265267296055464877)  # the finaliser constants of MurmurHash3, signed
_MIX32 = (0x7FEB352D, -2073254261)  # 0x7FEB352D and 0x846CA68B, signed: Wellons' lowbias32


def key_of(*parts: int | str) -> int:
    """Returns a signed 64-bit key for a tuple such as (seed, round, client, "dropout")."""
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def rng_of(*parts: int | str) -> np.random.Generator:
    """Returns a numpy generator for draws on the host (permutations, partitions, cohorts)."""
    return np.random.Generator(np.random.Philox(key_of(*parts) & (2**63 - 1)))


def fold(keys: Tensor, number: int | Tensor) -> Tensor:
    """Returns new keys from keys int64 `[K]` and a number (a step, a layer's salt), by a 64-bit mix."""
    x = keys + ((number + 1) * _GOLDEN if isinstance(number, Tensor) else folding(number))
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * _MIX64[0]
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * _MIX64[1]
    return x ^ ((x >> 33) & 0x7FFFFFFF)


def folding(number: int) -> int:
    """Returns what `fold` adds to a key, as a signed 64-bit integer."""
    return ((number + 1) * _GOLDEN + 2**63) % 2**64 - 2**63


@lru_cache(maxsize=64)
def _counter(elements: int, device: torch.device) -> Tensor:
    """Returns the half of the hash that all lanes share, int32 `[elements]`: computed once per size and device."""
    x = torch.arange(elements, device=device, dtype=torch.int64) * 0x9E3779B1 & 0xFFFFFFFF
    return (x ^ (x >> 16)).to(torch.int32)


def bits(keys: Tensor, elements: int) -> Tensor:
    """Returns random signed 32-bit integers `[K, elements]`; element i of lane k depends only on (keys[k], i).

    Two multiply-xorshift rounds, with one 32-bit half of the key entering before each. Only the high bits are meant to
    be compared, so the last shift is left out.
    """
    low, high = keys.to(torch.int32).unsqueeze(1), (keys >> 32).to(torch.int32).unsqueeze(1)
    x = _counter(elements, keys.device) + low
    x = x.mul_(_MIX32[0])
    x.bitwise_xor_(x.bitwise_right_shift(15).bitwise_and_(0x1FFFF))
    x.add_(high).mul_(_MIX32[1])
    x.bitwise_xor_(x.bitwise_right_shift(16).bitwise_and_(0xFFFF))
    return x.mul_(_MIX32[0])


def uniform(keys: Tensor, elements: int) -> Tensor:
    """Returns uniform draws in [0, 1), float32 `[K, elements]`."""
    return (bits(keys, elements).bitwise_right_shift(8).bitwise_and(0xFFFFFF)).to(torch.float32) * 2.0**-24


def dropout_threshold(drop: float) -> int:
    """Returns the limit below which a draw of `bits` is dropped."""
    return min(round(drop * 2**32) - 2**31, 2**31 - 1)


def keep_mask(keys: Tensor, elements: int, drop: float) -> Tensor:
    """Returns bool `[K, elements]`, False with probability `drop`."""
    return bits(keys, elements) >= dropout_threshold(drop)
