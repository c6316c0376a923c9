"""Secret keys, and the noise and the samples that follow from them.

Every random draw that privacy rests on is a function of a secret 32-byte key and an *address* such as
``("noise", "train", 17, "fc.weight")``. A step that is replayed after a crash, by whatever process, asks for the
same addresses and gets the same draws, so it releases nothing new.

The derivation of keys is keyed BLAKE2b (RFC 7693), a pseudo-random function, over an encoding of the address in which
no two addresses share their bytes. The derived key is that of an AES-256 stream (:mod:`raydp.privacy.stream`), so all
draws of a run are computationally indistinguishable from independent uniform bits to whoever lacks the run's key. The
guarantee of a run is therefore computational (Mironov, Pandey, Reingold & Vadhan, CRYPTO 2009).

**Floating point.** Noise that is drawn and added in floating point leaks: which numbers can come out depends on the sum
(Mironov, CCS 2012; Jin et al., IEEE S&P 2022), and the rounding of the sum itself can exceed its sensitivity
(Casacuberta et al., CCS 2022). Here both are integers. Each clipped vector is cut off towards zero on a grid whose
spacing γ is a power of two (:attr:`raydp.privacy.mechanism.Phase.spacing`), so its norm is still at most C and nothing
is added to the sensitivity; the vectors are summed exactly, as integers S; and the noise is N = round(σC/γ · Z) with Z
standard normal. As S is an integer,

    S + round(σC/γ · Z) = round(S + σC/γ · Z),

the Gaussian mechanism on γS, of sensitivity C and noise σC, followed by a rounding that does not depend on the data:
post-processing. Every integer can come out whatever S is. A geometry that projects the sum instead of each example, as
DP-NGD's whitening does, sums the clipped *gradients* exactly, projects that sum in float64, and rounds it to the grid;
each example is clipped to a little less than C, by what this can add (:mod:`raydp.training.step`). So it is with
gradients that are never multiplied out and summed exactly on a finer grid (:mod:`raydp.geometry.rank_one`). Lengths in
whitened spaces rest on an allowance for float32's rounding that is generous, but not the worst case. What follows
(scaling, dividing by B, rounding to float32) is post-processing too. The rounded normals are exact but for probability
2^-100 a draw, which adds less than 2^-50 to delta over 2^45 draws at any epsilon below 3. Timing is not covered.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from raydp import _validate
from raydp.errors import CorruptFile, InvalidValue, RaydpError
from raydp.privacy.mechanism import Phase
from raydp.privacy.stream import Stream

_BYTES = 32
# The layout names the draws as well: a run that drew otherwise (layouts 1 and 2, Philox) cannot be replayed here.
_HEADER = "raydp noise key, layout 3, "

#: What the draws are and what is claimed of them, for statements and reports.
NOISE_SOURCE = "AES-256-CTR keyed by BLAKE2b from the operating system's entropy"
NOISE_CLAIM = (
    "The clipped vectors are summed exactly as integers on a grid of a power of two, each cut off towards zero, and "
    "the noise is a normal rounded to an integer exactly but for probability 2^-100 a draw: the Gaussian mechanism "
    "followed by rounding, which floating-point attacks (Mironov 2012; Jin et al. 2022; Casacuberta et al. 2022) do "
    "not reach. DP-NGD's whitened sum is one of gradients, and that of outer products lies on a finer grid; both are "
    "exact too, and give up of C what rounding them to the noise's grid may add. "
    "The guarantee is computational: it assumes that AES-256 and BLAKE2b are pseudo-random. Timing is not covered."
)


class NoiseKey:
    """32 secret bytes. Whoever holds them can subtract the noise, so they are never shown.

    ``repr`` and ``str`` hide them, pickling and copying are refused, JSON has no encoding for them. A process that
    needs the key loads it from its file.

    Attributes:
        is_insecure: the key was made from a known seed (:meth:`insecure`), so nothing it noised is private. It is
            inherited by derived keys and survives :meth:`save`.

    >>> from raydp.privacy import NoiseKey
    >>> key = NoiseKey.generate()
    >>> key.is_insecure, key.rounded_normals(3, 1e6, "train", 0).shape
    (False, (3,))
    >>> bool((key.rounded_normals(3, 1e6, "train", 0) == key.rounded_normals(3, 1e6, "train", 0)).all())  # a replay
    True
    """

    __slots__ = ("__secret", "is_insecure")

    def __init__(self, secret: bytes, *, is_insecure: bool = False) -> None:
        if not isinstance(secret, bytes) or len(secret) != _BYTES:
            # The value is not put into the message: it may be most of a secret.
            raise InvalidValue("secret", "<hidden>", f"must be {_BYTES} bytes", "Use NoiseKey.generate().")
        self.__secret = secret
        self.is_insecure = is_insecure

    @classmethod
    def generate(cls) -> NoiseKey:
        """A new key from the operating system's entropy."""
        return cls(secrets.token_bytes(_BYTES))

    @classmethod
    def insecure(cls, seed: int) -> NoiseKey:
        """A key that anyone can recompute from ``seed``: for debugging and tests, never for private data."""
        seed = _validate.integer("seed", seed)
        return cls(_prf(b"", (seed,), person=b"raydp.insecure"), is_insecure=True)

    def derive(self, *address: str | int) -> NoiseKey:
        """The key at an address: a pseudo-random function of this key and the address.

        Raises:
            InvalidValue: the address is empty or holds something else than str and int.
        """
        return NoiseKey(_prf(self.__secret, address, person=b"raydp.derive"), is_insecure=self.is_insecure)

    def generator(self, *address: str | int) -> Stream:
        """The stream that belongs to the address, at its start.

        Never send its state anywhere: it holds the stream's key (though not this key).
        """
        return Stream(_prf(self.__secret, address, person=b"raydp.stream"))

    def rounded_normals(self, count: int, scale: float, *address: str | int) -> np.ndarray:
        """Normals of standard deviation ``scale`` rounded to integers, int64 (count,).

        The same address, count and scale give the same draw, whoever asks; another count an independent one.
        """
        return self.generator(*address, count).rounded_normals(count, scale)

    def use_rounded_normals(
        self, count: int, scale: float, use: Callable[[int, np.ndarray], None], *address: str | int
    ) -> None:
        """The draws of :meth:`rounded_normals`, handed over piece by piece, with the place of each piece's first."""
        self.generator(*address, count).use_rounded_normals(count, scale, use)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file of mode 0600, whole or not at all, and durably.

        Raises:
            InvalidValue: the file exists. A key is never overwritten: its steps could not be replayed any more.
            RaydpError: the disk is full or the directory is not writable; no file is left behind.
        """
        path = Path(path)
        kind = "insecure" if self.is_insecure else "secret"
        scratch = _scratch(path)
        try:
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                os.fchmod(descriptor, 0o600)  # the file may be left from a crash, with other rights
                with os.fdopen(descriptor, "wb", closefd=False) as file:
                    file.write(f"{_HEADER}{kind}\n{self.__secret.hex()}\n".encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.link(scratch, path)  # unlike a rename, a link never replaces a file that is there
        except FileExistsError:
            raise InvalidValue(
                "path", str(path), "must not exist yet", "Load this key, or destroy it if its run is over."
            ) from None
        except OSError as error:
            raise RaydpError(
                f"The key file {path} cannot be written: {error.strerror}. Nothing has run with this key yet. "
                "Free space, or make its directory exist and writable, and start again."
            ) from error
        finally:
            scratch.unlink(missing_ok=True)
        _fsync_directory(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NoiseKey:
        """Read a key that :meth:`save` wrote.

        Raises:
            InvalidValue: there is no such file, or others than its owner may read or write it.
            CorruptFile: it does not hold a key.
        """
        path = Path(path)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            remedy = "A key is destroyed when its run is over; start a new run."
            raise InvalidValue("path", str(path), "must be a key file", remedy) from None
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise InvalidValue("path", str(path), "must be a regular file", "Name the key file itself.")
            if stat.S_IMODE(mode) & 0o077:
                raise InvalidValue(
                    "path",
                    str(path),
                    f"must be readable by its owner only, but has mode {stat.S_IMODE(mode):04o}",
                    "Whoever read the key can remove the noise. If nobody else could, `chmod 600` it; else start anew.",
                )
            key = cls._parse(os.read(descriptor, 1024))
        finally:
            os.close(descriptor)
        if key is None:
            raise CorruptFile(f"{path} does not hold a noise key of layout 3. Its run cannot be continued; start anew.")
        return key

    @classmethod
    def _parse(cls, content: bytes) -> NoiseKey | None:
        for kind in ("secret", "insecure"):
            head = f"{_HEADER}{kind}\n".encode()
            if content.startswith(head) and len(content) == len(head) + 2 * _BYTES + 1 and content.endswith(b"\n"):
                with contextlib.suppress(ValueError):
                    return cls(bytes.fromhex(content[len(head) :].decode("ascii")), is_insecure=kind == "insecure")
        return None

    @staticmethod
    def destroy(path: str | os.PathLike[str]) -> None:
        """Overwrite the key file, make that durable, and remove it; a file that is gone already is fine.

        On a file system that keeps old blocks (snapshots, flash storage) the overwriting may not reach them.
        """
        path = Path(path)
        for file in (path, _scratch(path)):
            try:
                descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                os.write(descriptor, bytes(os.fstat(descriptor).st_size))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.unlink(file)
            _fsync_directory(file)

    def __repr__(self) -> str:
        return f"NoiseKey(<{'insecure' if self.is_insecure else 'secret'}>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RaydpError(
            "A NoiseKey is not pickled or copied: it would leave its file of mode 0600 for a place that others read. "
            "Pass the path of the key file, and call NoiseKey.load there."
        )


def poisson_sample(key: NoiseKey, phase: Phase, step: int, members: np.ndarray | None = None) -> np.ndarray:
    """The Poisson sample of one step: sorted int64 indices of the examples that take part, possibly none.

    Each of the ``phase.spec.population`` examples takes part with probability ``phase.sample_rate``, independently
    of the others and of all other steps. Example i compares the i-th word of the stream at the address
    ``("sample", phase.name, step)`` with floor(q·2^64), whoever asks and however many workers share the batch; so the
    probability is q rounded down to 64 bits, never above q.

    Args:
        members: None, or which examples of a larger data set belong to a secret part of it, bool (M,); then
            ``phase.spec.population`` is the part's expected size. Every example of the data set has a word of its own,
            so whether one takes part depends on its own membership only.

    Raises:
        InvalidValue: the phase has no such step.

    >>> from raydp.privacy import NoiseKey, Phase, PhaseSpec, poisson_sample
    >>> spec = PhaseSpec(name="train", steps=10, batch_size=3, population=30, clip_norm=1.0)
    >>> phase = Phase(spec=spec, noise_multiplier=1.0)
    >>> [len(poisson_sample(NoiseKey.insecure(0), phase, step)) for step in range(6)]
    [4, 2, 3, 1, 3, 3]
    """
    step = _validate.integer(f"{phase.name}.step", step, low=0, high=phase.steps - 1)
    count = phase.spec.population if members is None else len(members)
    takes_part = key.generator("sample", phase.name, step).below(phase.sample_rate, count)
    return np.flatnonzero(takes_part if members is None else takes_part & members).astype(np.int64)


def poisson_members(key: NoiseKey, fraction: float, population: int) -> np.ndarray:
    """A secret Poisson subsample, drawn once for a whole search: bool (population,), which examples are in it.

    Example i is in with probability ``fraction`` (rounded down to 64 bits), independently of all others. The same key
    gives the same subsample; how many are in it is as secret as who is.
    """
    fraction = _validate.between("fraction", fraction, 0, 1, low_open=True, high_open=True)
    population = _validate.integer("population", population, low=1)
    return key.generator("subsample").below(fraction, population)


def _prf(secret: bytes, address: Sequence[str | int], *, person: bytes) -> bytes:
    """Keyed BLAKE2b, 32 bytes. Each item is written as type, length and bytes: no two addresses collide."""
    if not address:
        raise InvalidValue("address", address, "must not be empty", 'Write an address such as ("noise", "train", 3).')
    state = hashlib.blake2b(key=secret, digest_size=_BYTES, person=person)
    for item in address:
        if isinstance(item, str):
            tag, content = b"s", item.encode()
        elif isinstance(item, int) and not isinstance(item, bool):
            tag, content = b"i", str(item).encode()
        else:
            raise InvalidValue("address", item, "must consist of str and int", "Convert it to one of them.")
        state.update(tag + len(content).to_bytes(8, "big") + content)
    return state.digest()


def _scratch(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _fsync_directory(path: Path) -> None:
    """Make the creation or the removal of ``path`` itself durable."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
