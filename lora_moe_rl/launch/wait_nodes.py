"""`python -m lora_moe_rl.launch.wait_nodes N`: until the cluster of RAY_ADDRESS has N nodes."""

from __future__ import annotations

import logging
import sys
import time

TIMEOUT_S, POLL_S = 600.0, 2.0


def main(number: int, timeout: float = TIMEOUT_S) -> int:
    """Returns 1, and says which nodes there are, when there are fewer at the time's end."""
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    deadline = time.monotonic() + timeout
    while True:
        alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        if len(alive) >= number:
            return 0
        if time.monotonic() >= deadline:
            found = ", ".join(alive)
            print(f"error: {len(alive)} of {number} nodes in {timeout:.0f} s: {found}")
            return 1
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
