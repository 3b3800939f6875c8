"""One merge of `bench export` in a process of its own: `merge|peft BASE ADAPTER OUT`.

Prints its seconds, after all imports, and the peak memory of the process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from lora_moe_rl.bench.process import status_bytes, to_disk


def merge(base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    from lora_moe_rl.bench.export_model import FileTensors, spec_of
    from lora_moe_rl.export.merged import export_merged

    start = time.perf_counter()
    report = export_merged(spec_of(base), FileTensors(adapter), base, out)
    row: dict[str, Any] = {"merge_s": time.perf_counter() - start}
    total = report.total
    return row | {
        "error": total.relative,
        "error_over_change": total.error_over_change,
        "cosine": total.cosine,
        "lost": total.lost,
    }


def peft(base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    """Its own way with a random adapter of the same ranks on the same linears."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from lora_moe_rl.bench.export_model import RANK

    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    config = LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=r".*\.(self_attn\.\w+_proj(_with_mqa)?|mlp\.(shared_experts\.)?\w+_proj)",
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        exclude_modules=r".*kv_b_proj",
        init_lora_weights=False,
    )
    merged = get_peft_model(model, config).merge_and_unload()
    merged.save_pretrained(out)
    to_disk(out)
    return {"merge_s": time.perf_counter() - start}


if __name__ == "__main__":
    job, *paths = sys.argv[1:]
    found = {"merge": merge, "peft": peft}[job](*map(Path, paths))
    print(json.dumps(found | {"memory_gb": status_bytes("VmHWM") / 1e9}))
