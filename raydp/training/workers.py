"""How the processes of one run act as one, over torch.distributed.

The clipped vectors of a step are summed as integers, exactly, so the sum over workers is the sum over examples whatever
their number, and every worker adds the same noise to it. Nothing else that is private travels.

No worker waits for one that will not come. Every exchange begins with a small one, in which each says that it goes on,
or that it ends and why; whoever ends closes its connections after that, and a process that dies has them closed by the
operating system, either of which ends the exchanges of the others.
"""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from raydp._workers import Alone, Workers, check_source, gather, own_part, owners
from raydp.errors import Diverged, RaydpError, WorkerFailed, WorkerLost
from raydp.training.checkpoint import placing

Value = TypeVar("Value")

_SUM, _SPREAD, _SHARE, _WAIT = range(1, 5)  # kinds of exchange
_NAMES = {_SUM: "sum", _SPREAD: "spread", _SHARE: "share", _WAIT: "wait"}
_MESSAGE = 2048  # bytes of an error's text that travel
_PATIENCE = 10.0  # seconds that a worker which was asked to stop waits for the others to hear of it


class Group:
    """The workers of an initialised torch.distributed process group (``init_process_group``, or Ray Train).

    All of its processes make one at the same time. The group has connections of its own (gloo), and closes them when a
    worker ends, so that no other waits for it; tensors on a GPU travel by nccl where the process group has it.

    Args:
        device: where :meth:`share` puts tensors that are on a GPU.
        timeout: seconds that an exchange may take. It must cover the longest time that one worker works while the
            others wait, which is an evaluation.

    Raises:
        RaydpError: there is no process group.
    """

    def __init__(self, *, device: str = "cpu", timeout: float = 1800.0) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RaydpError(
                "there is no torch.distributed process group. Call torch.distributed.init_process_group in every "
                "worker first, or let Ray Train do so."
            )
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()
        self._device = device
        self._timeout = timeout
        self._connections: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._nccl = "nccl" in dist.get_backend_config(dist.group.WORLD)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        with self._exchange(_SUM, sum(map(torch.numel, tensors))):
            for merged in _merged(tensors):
                self._over(merged, lambda flat, group: dist.all_reduce(flat, group=group))

    def spread(self, tensors: Sequence[Tensor], *, source: int = 0) -> None:
        check_source(source, self.count)
        with self._exchange(_SPREAD, sum(map(torch.numel, tensors))):
            for merged in _merged(tensors):
                self._over(merged, lambda flat, group: dist.broadcast(flat, source, group=group))

    def share(self, value: Value, *, source: int = 0) -> Value:
        check_source(source, self.count)
        content = torch.empty(0, dtype=torch.uint8)
        if self.rank == source:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        with self._exchange(_SHARE, source):
            size = torch.tensor([len(content)])
            dist.broadcast(size, source, group=self._connections)
            if self.rank != source:
                content = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(content, source, group=self._connections)
        if self.rank == source:
            return value
        shared: Value = torch.load(
            io.BytesIO(content.numpy().tobytes()), map_location=placing(self._device), weights_only=True
        )
        return shared

    def wait(self) -> None:
        with self._exchange(_WAIT, 0):
            pass

    def leave(self, error: BaseException) -> None:
        if self._connections is None:
            return
        # The others may have left as well: then there is nobody to tell.
        with contextlib.suppress(Diverged, WorkerFailed, WorkerLost):
            self._agree(0, 0, error)
        self._close()

    @contextlib.contextmanager
    def _exchange(self, kind: int, size: int) -> Iterator[None]:
        """All workers are about to do the same; a connection that breaks is a worker that is lost."""
        if self._connections is None:
            raise WorkerLost("this worker has left its run, so it exchanges nothing more")
        self._agree(kind, size, None)
        try:
            yield
        except RuntimeError as failure:
            self._lose(failure)

    def _agree(self, kind: int, size: int, error: BaseException | None) -> None:
        """Raises WorkerFailed, Diverged: another worker ends. RaydpError: the workers are not at the same exchange."""
        failed = 0 if error is None else self.count - self.rank  # the greatest is that of the lowest rank
        word = torch.tensor([failed, *((kind, -kind, size, -size) if error is None else (-(2**62),) * 4)])
        try:
            if error is None:
                dist.all_reduce(word, dist.ReduceOp.MAX, group=self._connections)
            else:
                work = dist.all_reduce(word, dist.ReduceOp.MAX, group=self._connections, async_op=True)
                # An error is worth waiting for those who are at work; who is asked to stop (a signal, say) is not free
                # to wait as long.
                work.wait(timedelta(seconds=self._timeout if isinstance(error, Exception) else _PATIENCE))
            failed, most, least, largest, smallest = word.tolist()
            if failed:
                self._hear(self.count - failed, error)
        except RuntimeError as failure:
            self._lose(failure)
        if (most, largest) != (-least, -smallest):
            self._close()
            raise RaydpError(
                f"the workers of this run are not doing the same: worker {self.rank} is at {_NAMES[kind]} of {size}. "
                "Check that all have the same specification and the same version of raydp."
            )

    def _hear(self, worker: int, error: BaseException | None) -> None:
        """What the failed worker says, and the end of this one."""
        text = torch.zeros(_MESSAGE, dtype=torch.uint8)
        if worker == self.rank:
            assert error is not None
            # What raydp raises can be told (raydp.training.discretion); what others raise may hold private numbers.
            reason = str(error) if isinstance(error, RaydpError) else ""
            said = f"{type(error).__name__}\n{reason}".encode()[:_MESSAGE]
            text[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        dist.broadcast(text, worker, group=self._connections)
        kind, _, reason = bytes(text.tolist()).rstrip(b"\0").decode(errors="replace").partition("\n")
        self._close()
        if kind == Diverged.__name__:  # an outcome of the run, not a failure of the worker that saw it first
            raise Diverged(reason)
        raise WorkerFailed(worker, kind, reason)

    def _lose(self, failure: RuntimeError) -> None:
        traceback.clear_frames(failure.__traceback__)  # they hold on to the connections, which would stay open
        self._close()
        raise WorkerLost(
            "another worker of this run is gone: it was killed, its machine was lost, or it took longer than the "
            "process group allows. Resume the run; it goes on from its last checkpoint."
        ) from failure

    def _close(self) -> None:
        """Close the connections, so that others who wait on them hear of it."""
        connections, self._connections = self._connections, None
        if connections is not None:
            dist.destroy_process_group(connections)

    def _over(self, flat: Tensor, exchange: Any) -> None:
        """Run an exchange of one flat tensor where its kind of memory can travel."""
        if flat.is_cpu:
            exchange(flat, self._connections)
        elif self._nccl:
            exchange(flat, dist.group.WORLD)
        else:
            staged = flat.cpu()
            exchange(staged, self._connections)
            flat.copy_(staged)


@contextlib.contextmanager
def as_one(workers: Workers) -> Iterator[None]:
    """Work that ends on all workers if it ends on one of them."""
    try:
        yield
    except BaseException as error:
        workers.leave(error)
        raise


def _merged(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors of each type and device as one flat tensor; what becomes of it is copied back into them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in kinds.values():
        if len(members) == 1 and members[0].is_contiguous():
            yield members[0].detach().view(-1)
            continue
        flat = torch.cat([member.detach().flatten() for member in members])
        yield flat
        with torch.no_grad():
            for member, part in zip(members, flat.split([member.numel() for member in members]), strict=True):
                member.copy_(part.view_as(member))


__all__ = ["Alone", "Group", "WorkerFailed", "WorkerLost", "Workers", "as_one", "gather", "own_part", "owners"]
