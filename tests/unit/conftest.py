"""Megatron-core is prepared for the CPU before a test's file imports it."""

from lora_moe_rl.trainer import megatron_on_cpu

megatron_on_cpu.install()
