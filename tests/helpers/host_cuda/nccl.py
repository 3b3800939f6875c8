"""Groups of NCCL's: gloo's, which torch asks for tensors on GPUs alone."""

from __future__ import annotations

from types import ModuleType


def install(module: ModuleType) -> None:
    """`module`: torch.distributed.distributed_c10d."""
    gloo, nccl = module.ProcessGroupGloo, module.ProcessGroupNCCL

    class Group(gloo):
        Options = nccl.Options

        def __init__(self, store, rank: int, size: int, options):
            super().__init__(store, rank, size, timeout=options._timeout)

    module.ProcessGroupNCCL = Group  # type: ignore[attr-defined]
