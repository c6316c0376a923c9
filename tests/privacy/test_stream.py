"""The stream is AES-256-CTR, and its rounded normals are the rounding of real normals, not of floating-point ones."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from raydp.errors import InvalidValue
from raydp.privacy import stream
from raydp.privacy.stream import Stream, long_pair

SECRET = bytes(range(32))


def test_the_stream_is_aes_256_in_counter_mode() -> None:
    """The block cipher of FIPS 197 on the counters 0 and 1 (NIST SP 800-38A, section 6.5)."""
    # The cipher gives the published vector of FIPS 197, appendix C.3, whose key is this one ...
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    block = Cipher(algorithms.AES256(SECRET), modes.ECB()).encryptor()
    assert block.update(bytes.fromhex("00112233445566778899aabbccddeeff")).hex() == "8ea2b7ca516745bfeafc49904b496089"
    # ... and the stream is that cipher on counters.
    wanted = block.update(bytes(16)) + block.update(bytes(15) + b"\x01")
    found = Stream(SECRET)
    assert found.read(20) + found.read(12) == wanted  # reading on continues where reading stopped


def test_words_and_uniforms_come_from_the_bytes() -> None:
    words = Stream(SECRET).words(4)
    assert words.dtype == np.uint64
    assert [int(word) for word in words] == [
        int.from_bytes(Stream(SECRET).read(32)[8 * i : 8 * i + 8], "little") for i in range(4)
    ]
    uniforms = Stream(SECRET).random((2, 2))
    assert uniforms.ravel().tolist() == [int(word >> np.uint64(11)) * 2.0**-53 for word in words]
    assert stats.kstest(Stream(SECRET).random(100_000), "uniform").pvalue > 1e-4


@pytest.mark.parametrize("probability", [0.0, 2.0**-64, 1e-3, 0.1, 1 / 3, 1.0])
def test_an_event_is_never_likelier_than_asked(probability: float) -> None:
    class Words(Stream):
        def words(self, count: int) -> np.ndarray:
            edge = min(math.floor(math.ldexp(probability, 64)), 2**64 - 1)
            return np.array([0, max(edge - 1, 0), edge, 2**64 - 1], dtype=np.uint64)

    happens = Words(SECRET).below(probability, 4).tolist()
    if probability == 1.0:
        assert happens == [True] * 4
    else:  # exactly the floor(p·2^64) words below that number
        assert happens == [probability > 0, probability > 0, False, False]


@pytest.mark.parametrize("scale", [0.3, 5.0, 2.0**22 * 1.37, 2.0**30, 2.0**45])
def test_rounded_normals_are_those_of_256_bits(scale: float) -> None:
    """Every draw, whether it took the fast path or not, is what long arithmetic makes of the same words."""
    pairs = 400
    words = Stream(SECRET).words(2 * pairs)
    found = Stream(SECRET).rounded_normals(2 * pairs, scale)
    context = mpmath.MPContext()
    context.prec = 300
    tail = scale * 2.0**-43  # what the 128 further bits can still move, near the ends of (0, 1)
    for pair in range(pairs):
        u, v = (context.ldexp(2 * int(word) + 1, -65) for word in (words[pair], words[pairs + pair]))
        radius = scale * context.sqrt(-2 * context.log(u))
        for place, real in ((pair, context.cos), (pairs + pair, context.sin)):
            exact = radius * real(2 * context.pi * v)
            assert abs(found[place] - exact) <= 0.5 + tail


def test_the_error_of_the_fast_path_is_below_what_is_claimed() -> None:
    """Against 300 bits, at random uniforms and at both ends of the fast path, where the error is largest."""
    generator = np.random.default_rng(0)
    edge = int(stream._EDGE * 2**64)
    first = np.concatenate(
        [
            generator.integers(edge, 2**64 - edge, 3000, dtype=np.uint64),
            edge + generator.integers(0, edge, 1000, dtype=np.uint64),
            2**64 - edge - 1 - generator.integers(0, edge, 1000, dtype=np.uint64),
        ]
    )
    second = generator.integers(0, 2**64 - 1, len(first), dtype=np.uint64)
    _, (found,) = stream.standard_pairs(np.stack([first, second])[None])
    context = mpmath.MPContext()
    context.prec = 300
    worst = 0.0
    for place in range(len(first)):
        for offset in (0, 1):  # the further bits may be anything in between
            u = context.ldexp(int(first[place]) + offset, -64)
            r, a = context.sqrt(-2 * context.log(u)), 2 * context.pi * context.ldexp(int(second[place]) + offset, -64)
            worst = max(worst, abs(float(r * context.cos(a) - float(found[0, place]))))
            worst = max(worst, abs(float(r * context.sin(a) - float(found[1, place]))))
    assert worst < stream._ERROR / 2


def test_the_long_path_is_taken_where_the_fast_one_could_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a claimed error of half a grid cell everything is computed long, and nothing changes."""
    fast = Stream(SECRET).rounded_normals(501, 2.0**22)
    calls = []
    monkeypatch.setattr(stream, "long_pair", lambda *a, **k: calls.append(1) or long_pair(*a, **k))
    monkeypatch.setattr(stream, "_ERROR", 2.0**-22)
    assert np.array_equal(Stream(SECRET).rounded_normals(501, 2.0**22), fast)
    assert len(calls) == 251


def test_uniforms_at_the_ends_of_the_interval_take_the_long_path() -> None:
    assert long_pair(0, 0, bits=192, scale=1.0) == (16, 0)  # sqrt(-2 ln 2^-193) = 16.36
    assert long_pair(2**192 - 1, 0, bits=192, scale=2.0**57) == (0, 0)

    class Ends(Stream):
        def words(self, count: int) -> np.ndarray:
            return np.full(count, 0 if self.low else 2**64 - 1, dtype=np.uint64)

    for low in (True, False):
        ends = Ends(SECRET)
        ends.low = low  # type: ignore[attr-defined]
        found = np.abs(ends.rounded_normals(2, 2.0**22)).max()
        assert found > 9.4 * 2**22 if low else found < 2**-31 * 2**22 + 1


@pytest.mark.parametrize("count", [1, 16_384, 16_385, 80_000, 700_001])
def test_neither_threads_nor_pieces_change_a_draw(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    alone = Stream(SECRET).rounded_normals(count, 2.0**22)
    monkeypatch.setattr(stream, "_BLOCKS_AT_ONCE", 1)
    try:
        torch.set_num_threads(3)
        other = Stream(SECRET)
        assert np.array_equal(other.rounded_normals(count, 2.0**22), alone)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    # The stream is read on behind the words of all pairs.
    after = Stream(SECRET)
    after.words(2 * ((count + 1) // 2))
    assert other.read(8) == after.read(8)


@settings(max_examples=20, deadline=None)
@given(count=st.integers(0, 40_000), scale=st.floats(1e-3, 2.0**57))
def test_any_count_and_scale(count: int, scale: float) -> None:
    if scale > 2.0**32:
        count %= 100  # all long arithmetic
    found = Stream(SECRET).rounded_normals(count, scale)
    assert found.shape == (count,) and found.dtype == np.int64
    assert np.array_equal(found, Stream(SECRET).rounded_normals(count, scale))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 2.0**58])
def test_a_bad_scale_is_refused(scale: float) -> None:
    with pytest.raises(InvalidValue, match="scale"):
        Stream(SECRET).rounded_normals(4, scale)


def test_moments_tails_and_distribution_are_those_of_a_normal() -> None:
    size, scale = 2_000_000, 2.0**22
    draws = Stream(SECRET).rounded_normals(size, scale) / scale
    assert stats.kstest(draws, "norm").pvalue > 1e-4
    for order, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (6, 15.0)):
        spread = math.sqrt(math.prod(range(1, 2 * order, 2)) - moment**2)
        assert abs(np.mean(draws**order) - moment) < 5 * spread / math.sqrt(size)
    for bound in (1.0, 2.0, 3.0, 4.0, 4.5, 5.0):
        count = int((np.abs(draws) > bound).sum())
        assert stats.binomtest(count, size, 2 * stats.norm.sf(bound)).pvalue > 1e-4
    halves = draws[: size // 2], draws[size // 2 :]
    assert abs(np.corrcoef(*halves)[0, 1]) < 5 / math.sqrt(size / 2)
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 5 / math.sqrt(size)


def test_a_narrow_normal_has_the_probabilities_of_a_rounded_one() -> None:
    """P[N = k] = Φ((k + 1/2)/s) − Φ((k − 1/2)/s), tested where single integers are likely."""
    size, scale = 400_000, 1.3
    draws = Stream(SECRET).rounded_normals(size, scale)
    values = np.arange(-5, 6)
    edges = stats.norm.cdf(np.concatenate([[-np.inf], values[1:] - 0.5, [np.inf]]) / scale)
    counts = np.bincount(np.clip(draws, -5, 5) + 5, minlength=11)
    assert stats.chisquare(counts, size * np.diff(edges)).pvalue > 1e-4


def test_standard_normals_lie_on_their_grid() -> None:
    draws = Stream(SECRET).standard_normal((50, 3))
    assert draws.shape == (50, 3)
    assert np.array_equal(draws * 2.0**30, np.rint(draws * 2.0**30))
    assert stats.kstest(draws.ravel(), "norm").pvalue > 1e-4
    assert Stream(SECRET).standard_normal((4, 2), dtype=np.float32).dtype == np.float32


def test_integers_are_uniform_in_their_range() -> None:
    draws = Stream(SECRET).integers(-2, 5, (70_000, 1))
    assert draws.shape == (70_000, 1)
    assert stats.chisquare(np.bincount(draws.ravel() + 2, minlength=7)).pvalue > 1e-4
