"""Models of random weights, small enough to be computed here; nothing is fetched.

Runs in the engines' environment: `python -m kvcast.bench.engines.tiny_models KIND FOLDER`. KIND:
"llama" (grouped heads), "deepseek" (MLA: one latent vector a token, the same on all ranks), "gemma"
(layers with a sliding window beside such with full attention), "bench" (one head of keys and
values, and wide layers: to compute a prompt takes seconds; its KV is 1 KiB a token in bfloat16).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCABULARY = 1024
MAX_TOKENS = 8192


def _config(kind: str) -> Any:
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "max_position_embeddings": MAX_TOKENS,
        "initializer_range": 0.08,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "llama":
        from transformers import LlamaConfig

        return LlamaConfig(num_key_value_heads=4, **common)
    if kind == "bench":
        from transformers import LlamaConfig

        common |= {"hidden_size": 1024, "intermediate_size": 8192, "num_attention_heads": 4}
        common |= {"max_position_embeddings": 1 << 16, "initializer_range": 0.04}
        return LlamaConfig(num_key_value_heads=1, head_dim=64, **common)
    if kind == "deepseek":
        from transformers import DeepseekV2Config

        return DeepseekV2Config(
            **common,
            num_key_value_heads=8,
            moe_intermediate_size=128,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            first_k_dense_replace=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        )
    from transformers import Gemma3TextConfig

    common |= {"num_hidden_layers": 6}
    return Gemma3TextConfig(
        num_key_value_heads=4,
        head_dim=32,
        sliding_window=256,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        **common,
    )


def make(kind: str, folder: Path) -> None:
    """Write the model into `folder`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(_config(kind), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2"
    ).save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
