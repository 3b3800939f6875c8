"""A run's own chat template (`model.chat_template`), beside what is exported of it.

transformers takes `chat_template.jinja` before the template in tokenizer_config.json (5.12,
`PreTrainedTokenizerBase._from_pretrained`). A processor takes its own processor_config.json and
chat_template.json before it, and tools take `additional_chat_templates/tool_use.jinja`: of a base
that has these, none is left as it was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.export.run_settings import settings_at
from lora_moe_rl.files.untrusted import inside, read_json

FILE = "chat_template.jinja"
MORE = "additional_chat_templates"  # a directory of transformers'
KEY = "chat_template"
# Files of a base that may have a template under KEY.
HOLDERS = (
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "chat_template.json",
)


def of_adapter(run: Path | None, path: Path) -> str | None:
    """The template that the adapter at `path` was trained with: that of the checkpoint's step, or
    the file beside one that is no run's; None for the tokenizer's own."""
    if run is None:
        file = path / FILE
        return file.read_text(encoding="utf-8") if file.is_file() else None
    try:
        found = settings_at(run, path)["model.chat_template"]
    except KeyError:
        return None
    except ConfigError as error:
        print(
            f"warning: the tokenizer's own chat template is taken; whether the run had another is "
            f"not known: {error}",
            file=sys.stderr,
        )
        return None
    return found


def beside(template: str | None) -> dict[str, str]:
    """{file of a PEFT directory: its content}."""
    return {} if template is None else {FILE: template}


def in_place_of(base: Path, text: str) -> dict[str, str | None]:
    """{file of a whole model: its content, None for one that is left out}: those of `base` that
    have a template, with `text` in its place. Raises FileError for one that cannot be read."""
    files: dict[str, str | None] = {
        f"{MORE}/{one.name}": None for one in (base / MORE).glob("*.jinja")
    }
    for name in HOLDERS:
        if (base / name).exists() and KEY in (content := read_json(inside(base, name))):
            files[name] = json.dumps(content | {KEY: text}, indent=2, ensure_ascii=False) + "\n"
    return files | {FILE: text}
