"""Adapters of `peft` on models of `transformers`."""

from __future__ import annotations

from collections.abc import Callable

import peft

from .. import text, vision
from ..case import Case

AT = {"target_modules": ["q_proj", "v_proj"]}


def _adapted(base: Callable[[], Case], config: peft.PeftConfig) -> Callable[[], Case]:
    def make() -> Case:
        case = base()
        return Case(peft.get_peft_model(case.model, config).train(), case.batch, case.loss_fn)

    return make


CASES = {
    "lora": _adapted(text.llama, peft.LoraConfig(r=4, lora_dropout=0.1, **AT)),
    "lora_all_linear": _adapted(text.mistral, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")),
    "dora": _adapted(text.llama, peft.LoraConfig(r=4, use_dora=True, lora_dropout=0.1, **AT)),
    "lora_conv1d": _adapted(text.gpt2, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)),
    "lora_vision": _adapted(vision.vit, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])),
    "loha": _adapted(text.llama, peft.LoHaConfig(r=4, **AT)),
    "ia3": _adapted(text.llama, peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"],
                                               feedforward_modules=["down_proj"])),
    "vera": _adapted(text.llama, peft.VeraConfig(r=8, target_modules=["q_proj", "o_proj"])),
    "oft": _adapted(text.llama, peft.OFTConfig(oft_block_size=16, **AT)),
    "prompt_tuning": _adapted(text.gpt2, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)),
    "prefix_tuning": _adapted(text.llama, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)),
}  # fmt: skip
