"""torch's own CUDA code on a machine without a GPU: see device.c, which is compiled when it is
first wanted. What runs is torch's dispatcher, its caching allocator and its report of waits, and
Triton's compiler for sm_90.

    run(folder, "memory", "qwen3_30b_a3b", "48", "full")    what step.py does, in such a process
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

DEVICE, DRIVER, NVML, MACHINE = (
    Path(__file__).with_name(name) for name in ("device.c", "driver.c", "nvml.c", "machine.h")
)
OTHERS = re.compile(r"(?:cuda|cublas|nccl)[A-Z]\w*")
BY_NAME = re.compile(rb"\0(cu[A-Z]\w{5,})(?=\0)")
DEFINED = re.compile(r"^[a-z].*?(\w+)\(", re.MULTILINE)


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def missing() -> str:
    """Why there can be none here, '' if there can."""
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    if not (_package("torch") / "lib" / "libtorch_cuda.so").exists():
        return "this torch was built without CUDA"
    return ""


def run(folder: Path, *arguments: str, timeout_s: float = 300) -> dict[str, Any]:
    """What `step.py` found. `folder`: for what is compiled."""
    command = [sys.executable, "-m", "noop_cuda.step", *arguments]
    child = subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, timeout=timeout_s
    )
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-6000:]
    return json.loads(child.stdout.splitlines()[-1])


def environment(folder: Path) -> dict[str, str]:
    """With what is compiled into `folder`, where it may be from before. cuDNN is asked for nothing:
    it would want more of a driver."""
    source = DEVICE.read_text()
    wanted = _asked_by_torch() - {*DEFINED.findall(source)}
    source += "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(wanted))
    driver = DRIVER.read_text()
    wanted = _of_the_driver() - {*DEFINED.findall(driver)}
    driver += "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(wanted))
    key = hashlib.sha256(
        (source + driver + NVML.read_text() + MACHINE.read_text()).encode()
    ).hexdigest()[:12]
    built = folder / f"noop_cuda-{key}"
    if not built.exists():
        scratch = folder / f"{built.name}.{os.getpid()}"
        scratch.mkdir(parents=True)
        _compile(source, scratch / "device.so")
        _compile(driver, scratch / "libcuda.so.1")
        _compile(NVML.read_text(), scratch / "libnvidia-ml.so.1")
        scratch.rename(built)
    return {
        **os.environ,
        "LD_PRELOAD": str(built / "device.so"),
        "LD_LIBRARY_PATH": str(built),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def _asked_by_torch() -> set[str]:
    """Functions of CUDA, cuBLAS and NCCL that torch's libraries want of others."""
    libraries = [*(_package("torch") / "lib").glob("*.so"), *_of_others()]
    command = ["nm", "-D", "--undefined-only", *map(str, libraries)]
    return {*OTHERS.findall(subprocess.run(command, capture_output=True, text=True).stdout)}


def _of_others() -> list[Path]:
    """Libraries of vLLM and NIXL."""
    there = _package("torch").parent
    return [*_package("vllm").rglob("*.so"), *there.glob("nixl_cu13.libs/**/*.so*")]


def _of_the_driver() -> set[str]:
    """Functions of the driver that torch asks for by name, and vLLM and Triton."""
    command = ["nm", "-D", "--undefined-only", *map(str, _of_others())]
    wanted = subprocess.run(command, capture_output=True, text=True).stdout
    found = {*re.findall(r"\b(cu[A-Z]\w*)", wanted)}
    triton = (_package("triton") / "backends/nvidia/driver.c").read_text()
    found |= {*re.findall(r"\b(cu[A-Z]\w*)", triton)}
    for name in ("libc10_cuda.so", "libtorch_cuda.so"):
        with (
            open(_package("torch") / "lib" / name, "rb") as file,
            mmap(file.fileno(), 0, access=ACCESS_READ) as text,
        ):
            found.update(one.decode() for one in BY_NAME.findall(text))
    return found


def _compile(source: str, path: Path) -> None:
    headers = _package("triton") / "backends" / "nvidia" / "include"
    included = [f"-I{folder}" for folder in (headers, MACHINE.parent)]
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", *included, "-xc", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)


def prepare() -> None:
    """Triton compiles kernels for an H200 and launches none."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device) -> int:
            return 0

    triton.runtime.driver._active = Driver()  # pyright: ignore[reportAttributeAccessIssue]
    stock = triton.runtime.JITFunction.run

    def compiled(self, *args, grid, warmup, **more):
        return stock(self, *args, grid=grid, warmup=True, **more)

    triton.runtime.JITFunction.run = compiled


def without_numbers() -> None:
    """A step goes on though the norm of its gradients is none, and its tokens went to other experts
    than was told. What is told is computed on the host."""
    import torch

    from lora_moe_rl.adapters.gradients import Gradients
    from lora_moe_rl.router_replay.replay import Replay
    from lora_moe_rl.router_replay.sizes import Exchange

    begin, norm = Exchange.__init__, Gradients.norm

    def on_the_host(self, device) -> None:
        begin(self, device)
        self.device = torch.device("cpu")

    def one(self) -> float:
        with suppress(ValueError):  # the root of whatever number there is
            norm(self)
        return 1.0

    Exchange.__init__, Gradients.norm = on_the_host, one
    Replay.check_sizes = lambda self: None
