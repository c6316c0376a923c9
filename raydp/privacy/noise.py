"""Secret keys, and the noise and the samples that follow from them.

Every random draw that privacy rests on is a function of a secret 32-byte key and an *address* such as
``("noise", "train", 17, "fc.weight")``. A step that is replayed after a crash, by whatever process, asks for the
same addresses and gets the same draws, so it releases nothing new.

The derivation of keys is cryptographic: keyed BLAKE2b (RFC 7693), a pseudo-random function, over an encoding of the
address in which no two addresses share their bytes. The stream is not: the derived key seeds numpy's Philox4x64-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a counter-based generator that passes the
statistical batteries but was not designed to withstand an adversary who sees raw outputs. The normals are float64
from numpy's ziggurat. Their low bits are those of a generator, not of a Gaussian, so attacks on the low bits of
floating-point noise (Mironov, CCS 2012) are hindered by rounding sum and noise to float32 only when they are one, and
are not proven to fail. (float32 normals lie on so coarse a grid that a sum of private values visibly leaves it, and end
at 8.2 standard deviations; these end at 13.7.)
Draws are equal only under one version of numpy (NEP 19), which is why a run records its versions.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from raydp import _validate
from raydp.errors import CorruptFile, InvalidValue, RaydpError
from raydp.privacy.mechanism import Phase

_BYTES = 32
# The layout names the draws as well: layout 1 drew float32 normals, so a run that it began cannot be replayed here.
_HEADER = "raydp noise key, layout 2, "

#: What the draws are and what is claimed of them, for statements and reports.
NOISE_SOURCE = "Philox4x64-10 (numpy), keyed by BLAKE2b from the operating system's entropy"
NOISE_CLAIM = (
    "The noise is added in double precision. The generator is statistical, not cryptographic, and no claim is made "
    "against attacks on the low bits of floating-point noise (Mironov 2012)."
)


class NoiseKey:
    """32 secret bytes. Whoever holds them can subtract the noise, so they are never shown.

    ``repr`` and ``str`` hide them, pickling and copying are refused, JSON has no encoding for them. A process that
    needs the key loads it from its file.

    Attributes:
        is_insecure: the key was made from a known seed (:meth:`insecure`), so nothing it noised is private. It is
            inherited by derived keys and survives :meth:`save`.
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

    def generator(self, *address: str | int) -> np.random.Generator:
        """A counter-based generator (Philox) at the start of the stream that belongs to the address.

        Never send its state anywhere: it holds the stream's 128-bit key (though not this key).
        """
        stream = _prf(self.__secret, address, person=b"raydp.stream")
        return np.random.Generator(np.random.Philox(key=np.frombuffer(stream[:16], dtype="<u8").astype(np.uint64)))

    def gaussian(self, shape: int | Sequence[int], *address: str | int) -> np.ndarray:
        """Standard normals, float64, of the given shape: the same address gives the same draw, whoever asks.

        Two shapes at one address share their stream: a tensor that is noised needs an address of its own.
        """
        size = shape if isinstance(shape, int) else tuple(shape)
        return np.asarray(self.generator(*address).standard_normal(size))

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
            raise CorruptFile(f"{path} does not hold a noise key of layout 2. Its run cannot be continued; start anew.")
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


def poisson_sample(key: NoiseKey, phase: Phase, step: int) -> np.ndarray:
    """The Poisson sample of one step: sorted int64 indices of the examples that take part, possibly none.

    Each of the ``phase.spec.population`` examples takes part with probability ``phase.sample_rate``, independently
    of the others and of all other steps. Example i compares the i-th uniform (53 bits) of the stream at the address
    ``("sample", phase.name, step)`` with q, whoever asks and however many workers share the batch.

    Raises:
        InvalidValue: the phase has no such step.
    """
    step = _validate.integer(f"{phase.name}.step", step, low=0, high=phase.steps - 1)
    uniforms = key.generator("sample", phase.name, step).random(phase.spec.population)
    return np.flatnonzero(uniforms < phase.sample_rate).astype(np.int64)


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
