"""The page as one file that can be sent: what it shows stands in it."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from lora_moe_rl.data.kept import spread
from lora_moe_rl.files.unchanged import flat
from lora_moe_rl.page.answers import STEPS
from lora_moe_rl.page.norms import adapter_norms
from lora_moe_rl.page.runs import Run, Runs
from lora_moe_rl.page.samples import Choice
from lora_moe_rl.page.web_files import SCRIPTS, STYLE, html_of, web_file

DATA = "PAGE_DATA"


def static_page(root: Path, most_samples: int) -> str:
    """HTML: all metrics of the runs below `root`, and of each run `most_samples` samples, spread
    evenly over the file, the spans of its last steps, how often experts were chosen in some, and
    the norms of its checkpoints."""
    runs = Runs(root).look()
    data = {
        "runs": [run.summary() for run in runs],
        "of": {run.name: _contents(run, most_samples) for run in runs},
    }
    script = "\n".join([f"const {DATA} = {_embedded(data)};", *map(web_file, SCRIPTS)])
    style = web_file(STYLE)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    return html_of(head, f"<script>{script}</script>")


def _contents(run: Run, most_samples: int) -> dict[str, Any]:
    names = run.metrics.names()
    every = run.samples.choose(Choice(), 0, 0)
    chosen = spread(every["samples"], most_samples)
    return {
        "names": names,
        "metrics": run.metrics.columns(names),
        "settings": flat(run.config),
        "samples": [run.sample(number) for number in chosen],
        "of_samples": every["samples"],
        "timeline": run.spans.of_steps(None, STEPS),
        "routes": run.routes.some(),
        "adapter": adapter_norms(run),
    }


def _embedded(data: dict[str, Any]) -> str:
    """JSON that may stand in a script: no text in it ends the script, or begins a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
