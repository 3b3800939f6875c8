"""Every error a user can meet, in one tree. All are picklable: they cross Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# The exit code of what may go well another time: EX_TEMPFAIL of sysexits.h.
FAULT = 75
# That of a run that cannot go on as long as the disk refuses: EX_IOERR.
DISK = 74


class LoraMoeRlError(Exception):
    """Base of the errors this system raises on purpose.

    The message names the value, the place and the way out. The command line prints it without a
    traceback and exits with `exit_code`.
    """

    exit_code = 1


class ConfigError(LoraMoeRlError, ValueError):
    """A setting, or a combination of settings, that cannot work."""

    exit_code = 2


class ModelError(LoraMoeRlError, ValueError):
    """A model directory that is incomplete, or an architecture that is not supported."""

    exit_code = 2


class DataError(LoraMoeRlError, ValueError):
    """Prompts that cannot be read: an empty file, a row without a prompt, a prompt too long."""

    exit_code = 2


class RunDirError(LoraMoeRlError):
    """A run directory that exists and is not to be resumed, or is in use."""

    exit_code = 2


class CheckpointError(LoraMoeRlError):
    """A checkpoint that cannot be written, or none that can be read."""


class DiskError(CheckpointError):
    """A checkpoint or an adapter that the disk refuses: it is full, read-only or away. `fault` is
    the message without the way out, for where the run itself takes one."""

    def __init__(self, fault: str, way_out: str = ""):
        self.fault, self.way_out = fault, way_out
        super().__init__(f"{fault}{way_out}")

    def __reduce__(self):
        return (type(self), (self.fault, self.way_out))


class DiskWait(LoraMoeRlError):
    """A run cannot go on from where it is: its disk is full, read-only or away for a while."""

    exit_code = DISK


class RewardError(LoraMoeRlError):
    """Too many samples of a step could not be rewarded."""


class FrozenStartError(LoraMoeRlError):
    """The adapter that a policy is measured against is not what it should be."""


class AdapterError(LoraMoeRlError, ValueError):
    """Adapter tensors that are not what the spec says."""

    exit_code = 2


class FileError(LoraMoeRlError, ValueError):
    """A file from elsewhere that is malformed, or that may not be read or written."""

    exit_code = 2


class ExportError(LoraMoeRlError):
    """An adapter or a merged model that cannot be written, or that is not served as it should."""


class RefitError(LoraMoeRlError):
    """An adapter version that could not be published, or that the engine does not serve."""


class NotServed(RefitError):
    """An adapter version that is in none of an engine's slots, which hold `served`."""

    def __init__(self, message: str, served: Sequence[int] = ()):
        super().__init__(message)
        self.served = tuple(served)

    def __reduce__(self):
        return (type(self), (str(self), self.served))


class ClusterError(LoraMoeRlError):
    """Ray could not be started or joined."""

    exit_code = FAULT


class EngineDied(LoraMoeRlError):
    """vLLM's processes of an engine have ended; the actor around them still lives."""


class EngineSilent(EngineDied):
    """An engine lives, and does nothing about the requests that it has."""


class RolloutError(LoraMoeRlError):
    """An engine answered with a sample that is not what was asked for."""


class ReplayError(LoraMoeRlError):
    """Router decisions that cannot be replayed."""


class RoutesLost(ReplayError):
    """Router decisions that have ended with the engine that recorded them."""

    exit_code = FAULT


class NonFiniteError(LoraMoeRlError):
    """Loss or gradients were NaN or infinite in too many steps in a row."""


class NothingTrainedError(LoraMoeRlError):
    """No token was left in the loss in too many steps in a row."""


class MismatchError(LoraMoeRlError):
    """Trainer and engines give the sampled tokens other probabilities: no longer one policy."""


class BenchmarkError(LoraMoeRlError):
    """A benchmark whose run was not right, or that cannot run: it has no figures to report."""


class ActorFailed(LoraMoeRlError):
    """An actor of the run died. Carries its name and the last lines of its log."""

    exit_code = FAULT

    def __init__(self, actor: str, reason: str, log_tail: str = ""):
        self.actor, self.reason, self.log_tail = actor, reason, log_tail
        tail = f"\nLast lines of its log:\n{log_tail}" if log_tail else ""
        super().__init__(f"actor {actor} failed: {reason}{tail}")

    def __reduce__(self):
        return (type(self), (self.actor, self.reason, self.log_tail))


class ActorSilent(ActorFailed):
    """Actors gave no answer in time: `actor` names all that were silent."""


class EngineLost(ActorFailed):
    """A rollout engine died, or was silent, more often than the run allows."""


class StallError(LoraMoeRlError):
    """Nothing happens in a run, and nothing is under way."""

    exit_code = FAULT


class NotShared(LoraMoeRlError):
    """Memory on a GPU that another process cannot have, or not any more."""


class HeldBaseError(LoraMoeRlError):
    """A base that trainer and engines are to share, and that cannot be: no room, or another one."""

    exit_code = 2


class ServiceError(LoraMoeRlError, ValueError):
    """What a client of the service asks for that cannot be done."""
