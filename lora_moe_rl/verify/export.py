"""`lora-moe-rl verify export`: every exported form of an adapter computes what was trained."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config.options import above_zero, names, not_negative, verify_parser
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.rollout.device import kernels_of_16_bits
from lora_moe_rl.rollout.facts import slot_rank
from lora_moe_rl.upstream.versions import vllm_on_cpu
from lora_moe_rl.verify.comparisons import Comparisons, largest_scaled, random_prompts
from lora_moe_rl.verify.forward import Forward, allowed
from lora_moe_rl.verify.inputs import drawn
from lora_moe_rl.verify.layouts import read_config
from lora_moe_rl.verify.ranks import spec_of
from lora_moe_rl.verify.report import Check, Say, progress

ABOUT = """\
Export a random adapter of MODEL in every form, and compare logprobs with transformers' forward of
the base with scale * B A added to its weights, in float64 (where memory is too small, in float32):

    peft 2d, peft 3d         the real PEFT library loads what `export --to peft` writes
    transformers, merged     loads what `export --to merged` writes
    vllm, adapter            `vllm serve` with what `export --to peft --for vllm` writes
    vllm, merged             `vllm serve` of the merged model

All of them compute in float32. Errors are relative to logprobs beyond -1; allowed is --tolerance,
or 3 times what transformers' own float32 is off by, where that is more. Exit code 1 when a form
differs. Settings are adapter.*, as adapter.rank=8.
"""
FORMS = ("peft-2d", "peft-3d", "merged", "vllm-adapter", "vllm-merged")
TOLERANCE = 5e-6
NEW_TOKENS = 4
EFFECT = 100  # the adapter must change logprobs by this many tolerances


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    asked = None if options.forms is None else names(options.forms, "--forms", "a form", FORMS)
    count = len(asked or FORMS) + 2
    with progress(count, options.json) as say, tempfile.TemporaryDirectory() as folder:
        verification = _Verification(options, Path(folder), say, asked)
        rows = verification.run()
    found = Comparisons({"model": options.model}, rows, left_out=verification.left_out)
    return found.conclude(options.json)


def _parser() -> argparse.ArgumentParser:
    parser = verify_parser("export", ABOUT)
    parser.add_argument("--forms", help=f"some of {','.join(FORMS)} (those that are read)")
    parser.add_argument(
        "--tolerance", type=not_negative, default=TOLERANCE, help=f"({TOLERANCE:g})"
    )
    parser.add_argument(
        "--timeout", type=above_zero, default=600, help="for a server's start (600 s)"
    )
    return parser


def _forms(spec: AdapterSpec, asked: Sequence[str] | None) -> tuple[Sequence[str], Sequence[str]]:
    """Those that are asked for, or all that something reads; and why others are left out that
    something reads elsewhere. Raises ConfigError for another one."""
    why = _unread(spec)
    elsewhere = {} if vllm_on_cpu() else _of_16_bits(spec)
    for form in asked or ():
        if reason := why.get(form) or elsewhere.get(form):
            raise ConfigError(f"--forms has {form}: of {spec.shape.architecture}, {reason}")
    left = [form for form in FORMS if form not in why]
    left_out = [f"{form}: {elsewhere[form]}" for form in left if form in elsewhere]
    return asked or [form for form in left if form not in elsewhere], [] if asked else left_out


def _of_16_bits(spec: AdapterSpec) -> dict[str, str]:
    """What vLLM does not serve in float32 on GPUs, and why."""
    kernels = {
        "vllm-adapter": kernels_of_16_bits(spec, slots=True),
        "vllm-merged": kernels_of_16_bits(spec, slots=False),
    }
    return {
        form: f"vLLM's kernels of {of} on GPUs take 16 bits alone; `lora-moe-rl serve-check` "
        "compares in them"
        for form, of in kernels.items()
        if of is not None
    }


def _unread(spec: AdapterSpec) -> dict[str, str]:
    """Why nothing reads a form."""
    family, why = spec.shape.family, {}
    if family.experts in ("stacked", "interleaved"):
        why["peft-2d"] = "PEFT reads peft-3d alone"
    if family.experts == "modules":
        why["peft-3d"] = "experts are modules one by one, and PEFT reads peft-2d alone"
    if family.experts == "interleaved":
        why["vllm-adapter"] = "vLLM reads no experts one by one"
        if any(site.num_experts is not None for site in spec):
            in_turn = "experts with gate and up in turn are not merged"
            why |= dict.fromkeys(("merged", "vllm-merged"), in_turn)
    return why


class _Verification:
    def __init__(
        self, options: argparse.Namespace, folder: Path, say: Say, asked: Sequence[str] | None
    ):
        import peft  # noqa: F401  first: it looks for transformer_engine, which may be a stand-in

        self.options, self.folder, self.say = options, folder, say
        self.base = resolve_model(options.model, named="--model ")
        settings = (options.settings, ["adapter.*"], {})
        self.config = read_config("verify export", str(self.base), *settings)
        self.spec = spec_of(self.base, self.config, servable=True)
        self.forms, self.left_out = _forms(self.spec, asked)
        self.tensors = drawn(self.spec.tensor_shapes, seed=0)
        self.prompts = random_prompts(self.spec.shape.vocab_size)
        say("transformers, merged by hand")
        self.without, _ = Forward(self.base).of(self.prompts)
        self.forward = Forward(self.base, self.spec, self.tensors)
        self.expected, self.rounding = self.forward.of(self.prompts)
        self.merged = folder / "merged"

    def run(self) -> list[Check]:
        limit, forms = allowed(self.options.tolerance, self.rounding), self.forms
        effect = largest_scaled(self.without, self.expected)
        rows = [Check("the adapter, against the base", effect, EFFECT * limit, at_least=True)]
        if {"merged", "vllm-merged"} & {*forms}:
            self.say("merging")
            self._merge()
        for form in FORMS:
            if form in forms:
                self.say(form)
                rows.append(Check(form, getattr(self, f"_{form.replace('-', '_')}")(), limit))
        return rows

    def _merge(self) -> None:
        from lora_moe_rl.export.merged import export_merged
        from lora_moe_rl.export.merged_weights import Form

        form = Form(dtype="float32")
        export_merged(self.spec, self.tensors, self.base, self.merged, form)

    def _merged(self) -> float:
        from lora_moe_rl.verify import hf

        return self._scored(hf.load(self.merged))

    def _peft_2d(self) -> float:
        return self._peft("2d")

    def _peft_3d(self) -> float:
        return self._peft("3d")

    def _peft(self, form: Any) -> float:
        from peft import PeftModel

        from lora_moe_rl.adapters import peft
        from lora_moe_rl.verify import hf

        directory = self.folder / form
        peft.write(directory, self.spec, self.tensors, self.config, form)
        return self._scored(PeftModel.from_pretrained(hf.load_whole(self.base), directory).eval())

    def _scored(self, model: Any) -> float:
        from lora_moe_rl.verify import hf

        return largest_scaled([hf.logprobs(model, ids) for ids in self.prompts], self.expected)

    def _vllm_adapter(self) -> float:
        from lora_moe_rl.adapters import peft

        directory = self.folder / "vllm"
        spec, tensors = peft.for_vllm(self.spec, self.tensors)
        peft.write(directory, spec, tensors, self.config, "2d")
        return self._served(self.base, directory)

    def _vllm_merged(self) -> float:
        return self._served(self.merged, None)

    def _served(self, model: Path, adapter: Path | None) -> float:
        from lora_moe_rl.verify import serving

        name = str(model) if adapter is None else serving.ADAPTER
        timeout, shape = self.options.timeout, self.spec.shape
        with serving.start(
            model, adapter, slot_rank(self.spec), shape, "float32", timeout
        ) as server:
            answers = [server.logprobs(name, ids, NEW_TOKENS) for ids in self.prompts]
        expected, _ = self.forward.of([ids for ids, _ in answers])
        return largest_scaled([values for _, values in answers], expected)
