"""Imported once in the process from which CPU ranks are forked: Megatron and transformers take
some fifteen seconds of a core, which every rank would pay again."""

from __future__ import annotations

import os

from lora_moe_rl.trainer.environment import CPU_ENVIRONMENT

os.environ.update(CPU_ENVIRONMENT)


def _import_all() -> None:
    import contextlib
    import importlib
    import warnings

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from lora_moe_rl.trainer import megatron_on_cpu

            megatron_on_cpu.install()
            for name in ("bridge", "engine", "local_modules", "model", "state", "update"):
                importlib.import_module(f"lora_moe_rl.trainer.{name}")
            importlib.import_module("lora_moe_rl.trainer.bridge").load()


_import_all()
