"""The one base of a run's trainer and engines, from before they start until they have ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lora_moe_rl.base import choose
from lora_moe_rl.models import quantised
from lora_moe_rl.run.prepared import Prepared
from lora_moe_rl.telemetry import console

MIB = 2**20


@contextmanager
def held_base(run: Prepared) -> Iterator[str | None]:
    """The folder in which trainer and engines share their base; None: they do not. A run
    with model.held_once=auto that cannot says why."""
    model, shape = run.config.model, run.spec.shape
    if run.private:
        if model.held_once != "off":
            console.say(f"trainer and engines hold a base each: {run.private}")
        yield None
        return
    from lora_moe_rl.base.owner import owned

    form = quantised.form_in(run.model_dir)
    with owned(model.held_dir) as folder:
        share = choose.held_share(run.config, shape, form)
        if choose.on_gpu():
            size = choose.gpu_bytes(run.config, shape, form) / MIB
            held = f"{size:,.1f} MiB on each GPU, {share:.0%} of the base"
        else:
            size = choose.held_bytes(run.config, shape, form) / MIB
            held = f"{size:,.1f} MiB, {share:.0%} of it, in {folder}"
        console.say(f"trainer and engines hold their base once: {held}")
        for name, why in choose.private(run.config, shape, form).items():
            console.say(f"{name} is not shared: {why}")
        yield folder
