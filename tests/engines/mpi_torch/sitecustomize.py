"""Stands for a torch that was built with MPI, which no package index has: `torch.distributed` with a process group over
mpi4py, as far as ferries use one. On PYTHONPATH.

As torch's own it has one thread's access to MPI, leaves MPI's errors fatal, and a process ends at once where a transfer
is let go of that is under way. What is sent is counted in the file that COUNT_MPI names.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any

_PATCHED = "torch.distributed.distributed_c10d"


class _Patch(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _PATCHED:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module._MPI_AVAILABLE = True
            module.ProcessGroupMPI = _Made

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Made:
    """What distributed_c10d asks for a group."""

    @staticmethod
    def create(ranks: list[int]) -> Any:
        import mpi4py

        mpi4py.rc.thread_level = "serialized"
        import torch
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        world.Set_errhandler(MPI.ERRORS_ARE_FATAL)

        class Transfer(torch._C._distributed_c10d.Work):
            def __init__(self, request: Any) -> None:
                super().__init__()
                self._request = request
                self._done = False

            def is_completed(self) -> bool:
                self._done = self._done or self._request.Test()
                return self._done

            def __del__(self) -> None:
                if not self._done:
                    os.abort()

        class Group(torch._C._distributed_c10d.ProcessGroup):
            sent = 0

            def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Transfer:
                Group.sent += tensors[0].numel()
                return Transfer(world.Isend(tensors[0].numpy(), dest=to, tag=tag))

            def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Transfer:
                return Transfer(world.Irecv(tensors[0].numpy(), source=source, tag=tag))

            def getBackendName(self) -> str:
                return "mpi"

        import atexit

        def count() -> None:
            if "COUNT_MPI" in os.environ:
                with open(os.environ["COUNT_MPI"], "a") as file:
                    file.write(f"{world.rank} {Group.sent}\n")

        atexit.register(count)
        return Group(world.rank, world.size)


sys.meta_path.insert(0, _Patch())
