"""Language models of `transformers`: encoders, decoders, both, mixtures of experts, state-space models."""

from __future__ import annotations

from typing import Any

import transformers as hf

from .case import Case, text

BERT = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192,
    "max_position_embeddings": 160, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
BOTH = {
    "vocab_size": 256, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192, "max_position_embeddings": 160,
    "dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1, "use_cache": False,
}  # fmt: skip
DECODER = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160, "attention_dropout": 0.1, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "output_router_logits": True}


def _train(model: Any, config: Any, batch: Any = None) -> Case:
    return Case(model(config).train(), text() if batch is None else batch)


def _encoder(model: Any, config: Any, **more: Any) -> Case:
    return _train(model, config(**{**BERT, **more}))


def _decoder(model: Any, config: Any, **more: Any) -> Case:
    return _train(model, config(**{**DECODER, **more}))


def bert() -> Case:
    return _encoder(hf.BertForMaskedLM, hf.BertConfig)


def distilbert() -> Case:
    config = hf.DistilBertConfig(
        vocab_size=256, dim=64, n_layers=2, n_heads=4, hidden_dim=192, max_position_embeddings=160
    )
    return _train(hf.DistilBertForMaskedLM, config)


def albert() -> Case:
    return _encoder(hf.AlbertForMaskedLM, hf.AlbertConfig, embedding_size=32)


def deberta() -> Case:
    return _encoder(hf.DebertaForMaskedLM, hf.DebertaConfig, relative_attention=True, pos_att_type=["p2c", "c2p"])


def deberta_v2() -> Case:
    return _encoder(
        hf.DebertaV2ForMaskedLM, hf.DebertaV2Config,
        relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=32,
    )  # fmt: skip


def modernbert() -> Case:
    config = hf.ModernBertConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=160, local_attention=16, attention_dropout=0.1, mlp_dropout=0.1, embedding_dropout=0.1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    return _train(hf.ModernBertForMaskedLM, config)


def fnet() -> Case:
    config = hf.FNetConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, intermediate_size=192)
    return _train(hf.FNetForMaskedLM, config)


def convbert() -> Case:
    return _encoder(hf.ConvBertForMaskedLM, hf.ConvBertConfig, embedding_size=64)


def nystromformer() -> Case:
    return _encoder(hf.NystromformerForMaskedLM, hf.NystromformerConfig, num_landmarks=8, segment_means_seq_len=128)


def longformer() -> Case:
    return _encoder(hf.LongformerForMaskedLM, hf.LongformerConfig, attention_window=16)


def big_bird() -> Case:
    return _encoder(hf.BigBirdForMaskedLM, hf.BigBirdConfig, attention_type="original_full")


def xlnet() -> Case:
    config = hf.XLNetConfig(vocab_size=256, d_model=64, n_layer=2, n_head=4, d_inner=192, dropout=0.1)
    return _train(hf.XLNetLMHeadModel, config)


def t5() -> Case:
    config = hf.T5Config(
        vocab_size=256, d_model=64, d_kv=16, d_ff=192, num_layers=2, num_heads=4, dropout_rate=0.1, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return _train(hf.T5ForConditionalGeneration, config, text(8, 96))


def bart() -> Case:
    return _train(hf.BartForConditionalGeneration, hf.BartConfig(**BOTH), text(8, 96))


def mbart_layerdrop() -> Case:
    config = hf.MBartConfig(**BOTH, encoder_layerdrop=0.3, decoder_layerdrop=0.3)
    return _train(hf.MBartForConditionalGeneration, config, text(8, 96))


def switch_transformers() -> Case:
    config = hf.SwitchTransformersConfig(
        vocab_size=256, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, use_cache=False, decoder_start_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return _train(hf.SwitchTransformersForConditionalGeneration, config, text(4, 96))


def gpt2() -> Case:
    config = hf.GPT2Config(
        vocab_size=256, n_positions=160, n_embd=64, n_layer=2, n_head=4, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    return _train(hf.GPT2LMHeadModel, config)


def gpt_neo() -> Case:
    config = hf.GPTNeoConfig(
        vocab_size=256, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=16, max_position_embeddings=160, use_cache=False, resid_dropout=0.1, embed_dropout=0.1,
        attention_dropout=0.1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _train(hf.GPTNeoForCausalLM, config)


def gpt_neox() -> Case:
    config = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
    return _train(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**config, hidden_dropout=0.1))


def opt_layerdrop() -> Case:
    config = hf.OPTConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=3, ffn_dim=192, max_position_embeddings=160,
        num_attention_heads=4, word_embed_proj_dim=64, dropout=0.1, layerdrop=0.2, use_cache=False,
    )  # fmt: skip
    return _train(hf.OPTForCausalLM, config)


def bloom() -> Case:
    config = hf.BloomConfig(
        vocab_size=256, hidden_size=64, n_layer=2, n_head=4, hidden_dropout=0.1, attention_dropout=0.1, use_cache=False
    )
    return _train(hf.BloomForCausalLM, config)


def falcon() -> Case:
    config = hf.FalconConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, hidden_dropout=0.1,
        attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    return _train(hf.FalconForCausalLM, config)


def mpt() -> Case:
    config = hf.MptConfig(
        vocab_size=256, d_model=64, n_layers=2, n_heads=4, expansion_ratio=3, max_seq_len=160, use_cache=False,
        resid_pdrop=0.1, emb_pdrop=0.1,
    )  # fmt: skip
    return _train(hf.MptForCausalLM, config)


def llama() -> Case:
    return _decoder(hf.LlamaForCausalLM, hf.LlamaConfig)


def mistral() -> Case:
    return _decoder(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=32)


def qwen3() -> Case:
    return _decoder(hf.Qwen3ForCausalLM, hf.Qwen3Config, head_dim=16)


def gemma2() -> Case:
    return _decoder(hf.Gemma2ForCausalLM, hf.Gemma2Config, head_dim=16, sliding_window=32, query_pre_attn_scalar=16)


def gemma3() -> Case:
    return _decoder(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, head_dim=16, sliding_window=32, query_pre_attn_scalar=16)


def phi3() -> Case:
    return _decoder(hf.Phi3ForCausalLM, hf.Phi3Config, resid_pdrop=0.1)


def mixtral() -> Case:
    return _decoder(hf.MixtralForCausalLM, hf.MixtralConfig, num_local_experts=4, output_router_logits=True)


def qwen2_moe() -> Case:
    return _decoder(hf.Qwen2MoeForCausalLM, hf.Qwen2MoeConfig, **EXPERTS, shared_expert_intermediate_size=64)


def qwen3_moe() -> Case:
    return _decoder(hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, **EXPERTS, head_dim=16)


def olmoe() -> Case:
    return _decoder(hf.OlmoeForCausalLM, hf.OlmoeConfig, num_experts=4, num_experts_per_tok=2)


def granite_moe() -> Case:
    return _decoder(hf.GraniteMoeForCausalLM, hf.GraniteMoeConfig, num_local_experts=4, num_experts_per_tok=2)


def deepseek_v3() -> Case:
    return _decoder(
        hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config,
        num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=64,
        first_k_dense_replace=1, n_group=2, topk_group=1, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16,
    )  # fmt: skip


def gpt_oss() -> Case:
    return _decoder(
        hf.GptOssForCausalLM, hf.GptOssConfig,
        num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=32, output_router_logits=True,
    )  # fmt: skip


def mamba() -> Case:
    config = hf.MambaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, use_cache=False)
    return _train(hf.MambaForCausalLM, config, text(8, 16))


def mamba2() -> Case:
    config = hf.Mamba2Config(
        vocab_size=256, hidden_size=64, num_heads=8, head_dim=16, state_size=16, n_groups=2, num_hidden_layers=2,
        chunk_size=16, use_cache=False,
    )  # fmt: skip
    return _train(hf.Mamba2ForCausalLM, config, text(8, 32))


def rwkv() -> Case:
    config = hf.RwkvConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, context_length=32, use_cache=False)
    return _train(hf.RwkvForCausalLM, config, text(8, 16))


def recurrent_gemma() -> Case:
    config = hf.RecurrentGemmaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        lru_width=64, attention_window_size=32, use_cache=False,
    )  # fmt: skip
    return _train(hf.RecurrentGemmaForCausalLM, config, text(8, 32))


def jamba() -> Case:
    return _train(
        hf.JambaForCausalLM,
        hf.JambaConfig(
            **{**DECODER, "num_hidden_layers": 4},
            num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
            expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=8, use_mamba_kernels=False,
        ),
        text(4, 16),
    )  # fmt: skip


CASES = (
    bert, distilbert, albert, deberta, deberta_v2, modernbert, fnet, convbert,
    nystromformer, longformer, big_bird, xlnet, t5, bart, mbart_layerdrop, switch_transformers, gpt2,
    gpt_neo, gpt_neox, opt_layerdrop, bloom, falcon, mpt, llama, mistral, qwen3, gemma2, gemma3, phi3,
    mixtral, qwen2_moe, qwen3_moe, olmoe, granite_moe, deepseek_v3, gpt_oss, mamba, mamba2, rwkv,
    recurrent_gemma, jamba,
)  # fmt: skip
