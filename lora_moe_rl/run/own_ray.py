"""Ray of a run, which starts while the last step before it is still looked at."""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType

from lora_moe_rl.config import RunConfig


class OwnRay:
    """Ray starts in a thread of its own, for seconds of which most are waited for. A context
    manager: Ray has ended when it has, started or not. Importing this file imports no Ray.

    The thread lives as long as Ray: the kernel kills Ray's processes when the thread that has
    started them ends (PR_SET_PDEATHSIG, by which Ray ends with its driver).
    """

    def __init__(self, config: RunConfig):
        engines = config.num_engines * config.rollout.nodes
        self._actors = config.trainer.world_size + engines
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._settled, self._over = threading.Event(), threading.Event()

    def __enter__(self) -> OwnRay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def begin(self) -> None:
        """Starts a Ray of the run's own; a cluster is joined when it is waited for, and no sooner:
        it may be somebody's who pays for it."""
        if "RAY_ADDRESS" not in os.environ:
            self._begin()

    def wait(self) -> None:
        """Until Ray is there. Raises what `prepare_ray` and `start_ray` raise."""
        if self._thread is None:
            self._begin()
        self._settled.wait()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._sigterm)  # Ray's own prints a stack
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Idempotent."""
        if self._thread is None:
            return
        import ray

        self._settled.wait()
        ray.shutdown()
        self._over.set()
        self._thread.join()

    def _begin(self) -> None:
        # Imported in one thread: the other imports transformers, which shares packages with it.
        from lora_moe_rl.cluster.ray_start import prepare_ray

        prepare_ray()
        self._sigterm = signal.getsignal(signal.SIGTERM)
        self._thread = threading.Thread(target=self._start, name="start of Ray", daemon=True)
        self._thread.start()

    def _start(self) -> None:
        from lora_moe_rl.cluster.ray_start import start_ray

        # Nor in what is started here: the run ends when its terminal is closed, and Ray with it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            start_ray(self._actors)
        except BaseException as error:  # told to who waits
            self._error = error
        self._settled.set()
        self._over.wait()
