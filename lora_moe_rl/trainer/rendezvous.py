"""How the trainer's ranks find each other, and on which sockets they listen meanwhile.

torch.distributed's store takes messages from whoever reaches it. So rank 0's listens on the address
that it was given alone: on one machine that is the loopback interface, and so are gloo's and NCCL's
own connections, which would choose an interface by the machine's name. On several gloo's are on the
interface that rank 0 is reached by.
"""

from __future__ import annotations

from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout

from lora_moe_rl.cluster.addresses import speak_towards
from lora_moe_rl.refit.store import listen


def join(backend: str, rank: int, world_size: int, address: str) -> None:
    """torch.distributed's default group. `address`: host:port of rank 0, the host by number."""
    host, _, port = address.rpartition(":")
    speak_towards(host)
    timeout = default_pg_timeout
    if rank == 0:
        store = listen(host, int(port), timeout)
    else:
        store = dist.TCPStore(host, int(port), None, False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
