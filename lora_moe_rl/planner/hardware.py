"""GPUs and links that a plan is made for, and the efficiencies its times assume."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lora_moe_rl.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Vendors' figures. `memory`: GiB the driver shows; `flops`: dense bf16, a second; `bandwidth`:
    of its memory, `fast_link`: to the GPUs of its node, `link`: to others, `host_link`: to the
    host's memory (PCIe of 16 lanes), bytes a second and direction."""

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
        Gpu("a100", 80, 312e12, 2.04e12, 300e9, 25e9, 32e9),
        Gpu("h800", 80, 989e12, 3.35e12, 200e9),
        Gpu("h100", 80, 989e12, 3.35e12, 450e9),
        Gpu("h20", 96, 148e12, 4.0e12, 450e9),
        Gpu("h200", 140, 989e12, 4.8e12, 450e9),
        Gpu("b200", 179, 2250e12, 8.0e12, 900e9),
    )
}
DEFAULT_GPU = "h100"


@dataclass(frozen=True)
class Hardware:
    """What a recipe is for. `gpu_memory` GiB and `bandwidth` GB/s between nodes, where they are not
    those of `gpu`."""

    gpus: int
    gpu: str = DEFAULT_GPU
    gpu_memory: float | None = None
    bandwidth: float | None = None
    gpus_per_node: int = 8

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
