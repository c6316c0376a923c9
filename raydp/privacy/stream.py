"""A cryptographic stream of random words, and normals rounded to integers that are drawn from it exactly.

The stream is AES-256 in counter mode (NIST SP 800-38A), which under the usual assumption on AES cannot be told from
independent uniform bits. What is read from it depends on its 32-byte key alone: neither on the machine nor on the
version of any library.

**Rounded normals.** A pair of words stands for the leading 64 bits of two uniform numbers u, v in (0, 1), and
s·sqrt(-2 ln u)·cos(2πv) and s·sqrt(-2 ln u)·sin(2πv) are two independent normals of standard deviation s (Box & Muller,
Ann. Math. Statist. 29, 1958). They are computed in float64 to an absolute error below s·2^-43. Where the nearest
integer depends on that error, or a uniform lies within 2^-18 of 0 or 1, 128 further bits are read for each uniform and
everything is computed again to 256 bits. So the integer that is returned is the rounding of the *real* normal, but for
an event of probability below 2^-100 a draw. Floating-point arithmetic, whose sines and how many threads compute them,
decides how long it takes and nothing else.

The error of the fast path, for u in [2^-18, 1 - 2^-18] and r = sqrt(-2 ln u) in [2^-8.5, 5]: the 64 bits leave u open
by 2^-64 and float64 rounds it by 2^-54 at most, so ln u is off by 2^-54 near u = 1, where r is 2^-8.5, and by 2^-46
near u = 2^-18, where r is 5; r is off by 2^-45.5 at most. The angle is off by 2^-50, the functions and products by a
few units in the last place of numbers below 8. A test compares with 256 bits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from raydp import _validate

#: Standard deviations up to this are drawn at full speed; beyond, more and more draws need the long arithmetic.
LARGEST_FAST_SCALE = 2.0**30

_ERROR = 2.0**-43  # absolute, of the fast path's standard normals
_EDGE = 2.0**-18
_MORE_BITS = 128
_PAIRS_IN_A_BLOCK = 2**13  # part of what a draw is
_BLOCKS_AT_ONCE = 4  # stays in the processor's caches, and enough for each call


class Stream:
    """The stream of one key, read from its beginning.

    Never send its state anywhere: it holds the key of the stream.

    Args:
        secret: 32 bytes, used for this stream alone.
    """

    def __init__(self, secret: bytes) -> None:
        self.__secret = secret
        # The counter starts at 0: a key has one stream, so no pair of key and counter comes twice.
        self.__encryptor = Cipher(algorithms.AES256(secret), modes.CTR(bytes(16))).encryptor()

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        return self.__encryptor.update(bytes(count))

    def words(self, count: int) -> np.ndarray:
        """The next ``count`` words, uniform uint64."""
        return np.frombuffer(bytearray(self.read(8 * count)), dtype="<u8").astype(np.uint64, copy=False)

    def random(self, size: int | tuple[int, ...] = ()) -> np.ndarray:
        """Uniform float64 in [0, 1), multiples of 2^-53, of the given shape."""
        count = math.prod(size) if isinstance(size, tuple) else size
        return ((self.words(count) >> np.uint64(11)) * 2.0**-53).reshape(size)

    def below(self, probability: float, count: int) -> np.ndarray:
        """``count`` independent events, bool, each of probability floor(p·2^64)/2^64: never above p."""
        probability = _validate.between("probability", probability, 0, 1)
        words = self.words(count)
        if probability == 1.0:
            return np.ones(count, dtype=bool)
        return words < np.uint64(math.floor(math.ldexp(probability, 64)))

    def rounded_normals(self, count: int, scale: float) -> np.ndarray:
        """``count`` independent normals of mean 0 and standard deviation ``scale``, rounded to the nearest integer.

        Args:
            count: >= 0.
            scale: s > 0, at most 2^57, so that 64-bit integers hold every draw (up to 16.4 standard deviations).

        Returns:
            int64 (count,).
        """
        found = np.empty(count, dtype=np.int64)

        def keep(start: int, draws: np.ndarray) -> None:
            found[start : start + len(draws)] = draws

        self.use_rounded_normals(count, scale, keep)
        return found

    def use_rounded_normals(self, count: int, scale: float, use: Callable[[int, np.ndarray], None]) -> None:
        """The same, handed over piece by piece while they are in the processor's caches.

        Args:
            count, scale: as above.
            use: called once for each piece with its place and its draws, int64, which it may change.
        """
        scale = _validate.between("scale", scale, 0, 2.0**57, low_open=True)
        with _undivided():
            for start, shape in _pieces((count + 1) // 2):
                words = self.words(math.prod(shape)).reshape(shape)
                use(2 * start, self._rounded_blocks(start, words, scale)[: count - 2 * start])

    def integers(self, low: int, high: int, size: int | tuple[int, ...] = ()) -> np.ndarray:
        """Uniform int64 in [low, high), to a relative (high - low)·2^-53."""
        return low + np.floor(self.random(size) * (high - low)).astype(np.int64)

    def standard_normal(self, size: int | tuple[int, ...] = (), dtype: Any = np.float64) -> np.ndarray:
        """Standard normals rounded to multiples of 2^-30, and then to ``dtype``.

        For augmentation and the randomness of a loss. What is added to a sum is drawn as integers.
        """
        count = math.prod(size) if isinstance(size, tuple) else size
        draws = self.rounded_normals(count, LARGEST_FAST_SCALE) / LARGEST_FAST_SCALE
        return draws.astype(dtype, copy=False).reshape(size)

    def _rounded_blocks(self, start: int, words: np.ndarray, scale: float) -> np.ndarray:
        """Pairs from place ``start`` on, int64 (words,), of uint64 words (blocks, 2, pairs).

        A block holds the words of all its first uniforms, then of all its second ones; and all its cosines, then all
        its sines.
        """
        pairs = words.shape[2]
        uniform, exact = standard_pairs(words)
        exact *= scale
        rounded = exact.round()
        found = rounded.to(torch.int64).numpy()
        distance = exact.sub_(rounded).abs_()
        largest = 0.5 - scale * _ERROR
        low, high = (float(bound) for bound in uniform.aminmax())
        if float(distance.max()) <= largest and low >= _EDGE and high <= 1 - _EDGE:
            return found.reshape(-1)
        doubtful = (distance.amax(dim=1) > largest) | (uniform < _EDGE) | (uniform > 1 - _EDGE)
        for block, place in np.argwhere(doubtful.numpy()).tolist():
            first, second = (int(word) for word in words[block, :, place])
            found[block, :, place] = self._long_pair(start + block * pairs + place, first, second, scale)
        return found.reshape(-1)

    def _long_pair(self, pair: int, first: int, second: int, scale: float) -> tuple[int, int]:
        """One pair to 256 bits; its further bits belong to the pair's place, whatever else is drawn."""
        more = hashlib.blake2b(
            pair.to_bytes(8, "big"), key=self.__secret, digest_size=2 * _MORE_BITS // 8, person=b"raydp.more"
        ).digest()
        middle = len(more) // 2
        return long_pair(
            (first << _MORE_BITS) + int.from_bytes(more[:middle], "big"),
            (second << _MORE_BITS) + int.from_bytes(more[middle:], "big"),
            bits=64 + _MORE_BITS,
            scale=scale,
        )


@contextlib.contextmanager
def _undivided() -> Iterator[None]:
    """Inside, torch (and MKL) do not cut operations between threads.

    They are small, and threads that wait for one another after each take a hundred times as long where another process
    has a core. Threads for whole pieces gain nothing: they wait for Python's lock.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _pieces(pairs: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Where a piece begins, and the shape of its words: (blocks, 2, pairs of a block). The last block may be short."""
    start = 0
    while start < pairs:
        size = min(_PAIRS_IN_A_BLOCK, pairs - start)
        blocks = max(1, min(_BLOCKS_AT_ONCE, (pairs - start) // _PAIRS_IN_A_BLOCK))
        yield start, (blocks, 2, size)
        start += blocks * size


def standard_pairs(words: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of standard normals of pairs of words, in float64.

    torch computes them by the vector instructions of the processor, numpy one by one.

    Args:
        words: uint64 (blocks, 2, pairs), of the first and of the second uniforms.

    Returns:
        The first uniforms (blocks, pairs), and the cosines and sines (blocks, 2, pairs), which are right to an absolute
        2^-43 where the uniform is not within 2^-18 of 0 or 1.
    """
    numbers = torch.from_numpy(words.view(np.int64))
    # torch has signed words: the first lose their last bit, the second stand for an angle in [-π, π).
    uniform = numbers[:, 0].bitwise_right_shift(1).bitwise_and_(2**63 - 1).double().mul_(2.0**-63)
    radius = uniform.clamp(min=2.0**-64).log_().mul_(-2.0).sqrt_()
    angle = numbers[:, 1].double().mul_(2.0 * math.pi * 2.0**-64)
    pairs = torch.empty(words.shape, dtype=torch.float64)
    torch.mul(radius, angle.cos(), out=pairs[:, 0])
    torch.mul(radius, angle.sin_(), out=pairs[:, 1])
    return uniform, pairs


def long_pair(first: int, second: int, *, bits: int, scale: float) -> tuple[int, int]:
    """The rounded Box-Muller pair of the uniforms (first + 1/2)/2^bits and (second + 1/2)/2^bits, to 256 bits."""
    context = _long_arithmetic()
    uniform = context.ldexp(2 * first + 1, -bits - 1)
    angle = 2 * context.pi * context.ldexp(2 * second + 1, -bits - 1)
    radius = context.mpf(scale) * context.sqrt(-2 * context.log(uniform))
    return int(context.nint(radius * context.cos(angle))), int(context.nint(radius * context.sin(angle)))


@functools.cache
def _long_arithmetic() -> Any:
    import mpmath  # here, because most processes never need it

    context = mpmath.MPContext()  # of our own: the global one belongs to everybody
    context.prec = 256
    return context
