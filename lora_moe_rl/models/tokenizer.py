"""A model's tokenizer: the one that its files describe, or an error; never another, never a prompt.

transformers 5.12 gives a directory whose tokenizer has code of its own (Moonlight, Kimi-K2) a
generic class with other ids for special tokens, where it knows the model's type, and asks on the
terminal where it does not (`MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS` and what reads it, in
`transformers/models/auto/tokenization_auto.py`). Importing this file imports no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lora_moe_rl.adapters.families import language_config
from lora_moe_rl.errors import ConfigError, ModelError
from lora_moe_rl.models.late_dynamo import late_dynamo
from lora_moe_rl.upstream.transformers_import import import_transformers
from lora_moe_rl.upstream.uncollected import uncollected

CONFIG = "tokenizer_config.json"
WHOLE = "tokenizer.json"  # all that a fast tokenizer is, whatever its class is called
VOCABULARIES = (WHOLE, "tiktoken.model", "tokenizer.model", "vocab.json", "vocab.txt")
# What transformers calls a class that knows nothing of the model.
GENERIC = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend", "SentencePieceBackend")
SHOWN = 3


def check_tokenizer(directory: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Checks what can be seen without transformers; returns tokenizer_config.json, or {}.

    Raises ConfigError for a tokenizer that needs code from its directory where
    model.trust_remote_code does not allow it, and ModelError for files that are missing.
    """
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object; fetch the model again")
    if not any((directory / name).is_file() for name in VOCABULARIES):
        raise ModelError(
            f"{directory} has no tokenizer (none of {', '.join(VOCABULARIES)}); fetch the model's "
            "tokenizer into it"
        )
    if (code := remote_code(config)) is None:
        return config
    if not trust_remote_code:
        raise ConfigError(
            f"the tokenizer of {directory} needs code that comes with the model ({code}, named by "
            f"{CONFIG}), and model.trust_remote_code is false; read that file, and set "
            "model.trust_remote_code=true to let it run"
        )
    file = directory / f"{code.partition('.')[0]}.py"
    if "--" not in code and not file.is_file():
        raise ModelError(f"{path} names {code}, and there is no {file}; fetch the model again")
    return config


def remote_code(config: dict[str, Any]) -> str | None:
    """The class that tokenizer_config.json names as its own code, `file.Class`; None for none."""
    mapped = config.get("auto_map")
    if isinstance(mapped, dict):
        mapped = mapped.get("AutoTokenizer")
    named = mapped if isinstance(mapped, list) else [mapped]
    return next((str(name) for name in named if name), None)


def load_tokenizer(
    directory: Path | str, trust_remote_code: bool, chat_template: str | None = None
) -> Any:
    """The tokenizer of a model's directory, with the class and the ids that its files name, and
    with `chat_template` in the place of its own. It knows the model's vocab_size too
    (`model_vocab_size`).

    Raises what `check_tokenizer` raises, and ModelError for one that cannot be loaded or that
    transformers makes otherwise.
    """
    directory = Path(directory)
    config = check_tokenizer(directory, trust_remote_code)
    with late_dynamo(), uncollected():
        import_transformers()
        from transformers import AutoTokenizer

    trusted = remote_code(config) is not None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trusted, config=_config_of_unknown(directory)
        )
    except Exception as error:  # of transformers, and of the model's own code
        lines = str(error).strip().splitlines() or [""]
        raise ModelError(
            f"the tokenizer of {directory} cannot be loaded: {type(error).__name__}: {lines[0]}"
        ) from error
    _check_class(directory, config, tokenizer)
    _check_ids(directory, config, tokenizer)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.model_vocab_size = _model_vocab_size(directory)
    return tokenizer


def model_vocab_size(tokenizer: Any) -> int | None:
    """How many ids the model has that a tokenizer was loaded with; None for one that was made
    otherwise. A tokenizer may have fewer, where the model's embedding is padded, and more, where a
    token was added to it alone."""
    return getattr(tokenizer, "model_vocab_size", None)


def foreign_ids(tokenizer: Any, token_ids: Iterable[int]) -> list[int]:
    """The ids among these that the tokenizer's model does not have."""
    size = model_vocab_size(tokenizer)
    return [] if size is None else [token for token in token_ids if not 0 <= token < size]


def stop_ids(model_dir: Path | str) -> set[int]:
    """The end-of-sequence ids that the model's files name. Raises ModelError for what is no id."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        try:
            said = json.loads(path.read_text()) if path.exists() else {}
            value = language_config(said).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelError(f"{path} is no JSON object: {error}; fetch it again") from error
        ids = value if isinstance(value, list) else [value]
        for one in ids if value is not None else []:
            if isinstance(one, bool) or not isinstance(one, int) or one < 0:
                raise ModelError(
                    f"eos_token_id of {path} is {value!r}; it must be the id of a token, or a list "
                    "of such"
                )
            found.add(one)
    return found


def _config_of_unknown(directory: Path) -> Any:
    """What a tokenizer is found by, of a model whose type transformers does not know: it would read
    all of config.json, by a class that fails on YaRN. None for a type that it knows."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    try:
        kind = json.loads((directory / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    if not isinstance(kind, str) or kind in CONFIG_MAPPING:
        return None
    return type("Config", (PreTrainedConfig,), {"model_type": kind})()


def _check_class(directory: Path, config: dict[str, Any], tokenizer: Any) -> None:
    named = config.get("tokenizer_class")
    found = type(tokenizer).__name__
    if named is None or _plain(named) == _plain(found) or _plain(named) in GENERIC:
        return
    if _plain(found) in GENERIC and (directory / WHOLE).is_file():
        return
    raise ModelError(
        f"the tokenizer of {directory} is a {named} by its {CONFIG}, and transformers makes a "
        f"{found} of it, which may give a text other ids; write it as {WHOLE} with the tool that "
        "the model comes from"
    )


def _check_ids(directory: Path, config: dict[str, Any], tokenizer: Any) -> None:
    added = config.get("added_tokens_decoder") or {}
    wrong = []
    for number, token in added.items():
        content = token["content"] if isinstance(token, dict) else token
        found = tokenizer.convert_tokens_to_ids(content)
        if found != int(number):
            wrong.append(f"{content} is {number} there and {found} here")
    if wrong:
        raise ModelError(
            f"the tokenizer of {directory}, a {type(tokenizer).__name__}, gives {len(wrong)} of "
            f"{len(added)} special tokens other ids than its {CONFIG}: "
            f"{'; '.join(wrong[:SHOWN])}{'; ...' if len(wrong) > SHOWN else ''}"
        )


def _model_vocab_size(directory: Path) -> int | None:
    """None for a config.json that does not say; the model's own checks tell of that."""
    path = directory / "config.json"
    try:
        size = language_config(json.loads(path.read_text())).get("vocab_size")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return size if isinstance(size, int) else None


def _plain(name: str) -> str:
    return name.removesuffix("Fast")
