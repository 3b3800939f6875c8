"""GPUs and links that a plan is made for, and the efficiencies its times assume."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lora_moe_rl.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Vendors' figures. `memory`: whole GiB that the driver gives to programs, as
    `torch.cuda.mem_get_info` has them, less than nvidia-smi shows; `flops`: dense bf16, a second;
    `bandwidth`: of its memory, `fast_link`: to the GPUs of its node, `link`: to others,
    `host_link`: to the host's memory (PCIe of 16 lanes), bytes a second and direction."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    fast_link: float
    link: float = 50e9
    host_link: float = 64e9


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 79, 312e12, 2.04e12, 300e9, 25e9, 32e9),
        Gpu("h800", 79, 989e12, 3.35e12, 200e9),
        Gpu("h100", 79, 989e12, 3.35e12, 450e9),
        Gpu("h20", 95, 148e12, 4.0e12, 450e9),
        Gpu("h200", 139, 989e12, 4.8e12, 450e9),
        Gpu("b200", 178, 2250e12, 8.0e12, 900e9),
    )
}
DEFAULT_GPU = "h100"
HOST_GIB = 128  # of a node's host for each of its GPUs, where nobody says: less than most have


@dataclass(frozen=True)
class Hardware:
    """What a recipe is for. `gpu_memory` GiB and `bandwidth` GB/s between nodes, where they are not
    those of `gpu`; `host_memory` GiB of a node, where it is not HOST_GIB for each of its GPUs."""

    gpus: int
    gpu: str = DEFAULT_GPU
    gpu_memory: float | None = None
    bandwidth: float | None = None
    gpus_per_node: int = 8
    host_memory: float | None = None

    @property
    def node_memory(self) -> float:
        """GiB of the host's memory of a node."""
        if self.host_memory is not None:
            return self.host_memory
        return float(HOST_GIB * self.gpus_per_node)

    @property
    def spec(self) -> Gpu:
        """Raises ConfigError for an unknown GPU."""
        if self.gpu not in GPUS:
            raise ConfigError(f"{self.gpu!r} is not a known GPU; there are {', '.join(GPUS)}")
        gpu = GPUS[self.gpu]
        return replace(
            gpu,
            memory=gpu.memory if self.gpu_memory is None else self.gpu_memory,
            link=gpu.link if self.bandwidth is None else self.bandwidth * 1e9,
        )


@dataclass(frozen=True)
class Efficiency:
    """Shares of what the hardware could do that times are computed with: stated guesses, printed
    with every time."""

    train_flops: float = 0.30
    prefill_flops: float = 0.40
    decode_bandwidth: float = 0.50
    links: float = 0.70


# Of every GPU, for the CUDA context, cuBLAS workspaces and NCCL's buffers of some ten groups.
RUNTIME_BYTES = int(2.5 * GIB)
# What the caching allocator holds beyond what is asked of it.
FRAGMENTATION = 0.05
