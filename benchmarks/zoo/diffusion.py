"""Diffusion models and their autoencoders, of `diffusers`: images, video and sound."""

from __future__ import annotations

import diffusers as df
import torch

from .case import Case, images, integers, noise, sample, square

LATENT = {"in_channels": 4, "sample_size": 16}
TWO = {"block_out_channels": (32, 64), "norm_num_groups": 8}
CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32, "attention_head_dim": 8, "layers_per_block": 1,
}  # fmt: skip
HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}


def _latents(batch: int = 4) -> torch.Tensor:
    return noise(batch, 4, 16, 16)


def _steps(batch: int = 4) -> torch.Tensor:
    return torch.arange(batch)


def unet_2d() -> Case:
    model = df.UNet2DModel(
        sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8, dropout=0.1,
    )  # fmt: skip
    return Case(model.train(), {"sample": images(4, 32), "timestep": _steps()}, sample)


def unet_2d_condition() -> Case:
    model = df.UNet2DConditionModel(**LATENT, **TWO, **CROSS, out_channels=4, dropout=0.1)
    batch = {"sample": _latents(), "timestep": _steps(), "encoder_hidden_states": noise(4, 12, 32)}
    return Case(model.train(), batch, sample)


def unet_1d() -> Case:
    model = df.UNet1DModel(
        sample_size=256, in_channels=2, out_channels=2, extra_in_channels=64, layers_per_block=1,
        block_out_channels=(32, 32, 64), down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
    )  # fmt: skip
    return Case(model.train(), {"sample": noise(4, 2, 256), "timestep": _steps()}, sample)


def unet_3d_condition() -> Case:
    model = df.UNet3DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    batch = {"sample": noise(1, 4, 4, 16, 16), "timestep": _steps(1), "encoder_hidden_states": noise(1, 12, 32)}
    return Case(model.train(), batch, sample)


def unet_spatio_temporal() -> Case:
    model = df.UNetSpatioTemporalConditionModel(
        sample_size=16, in_channels=8, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), cross_attention_dim=32,
        num_attention_heads=(2, 4), projection_class_embeddings_input_dim=96, addition_time_embed_dim=32,
    )  # fmt: skip
    batch = {
        "sample": noise(1, 2, 8, 16, 16),
        "timestep": _steps(1),
        "encoder_hidden_states": noise(1, 1, 32),
        "added_time_ids": torch.ones(1, 3),
    }
    return Case(model.train(), batch, sample)


def controlnet() -> Case:
    model = df.ControlNetModel(
        in_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=32, attention_head_dim=8,
        norm_num_groups=8, conditioning_embedding_out_channels=(8, 16),
    )  # fmt: skip
    batch = {
        "sample": _latents(),
        "timestep": _steps(),
        "encoder_hidden_states": noise(4, 12, 32),
        "controlnet_cond": images(4, 32),
    }

    def loss(output: df.models.controlnets.controlnet.ControlNetOutput) -> torch.Tensor:
        parts = [*output.down_block_res_samples, output.mid_block_res_sample]
        return torch.stack([t.square().mean() for t in parts]).sum()

    return Case(model.train(), batch, loss)


def autoencoder_kl() -> Case:
    model = df.AutoencoderKL(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=8, sample_size=32,
    )  # fmt: skip
    return Case(model.train(), {"sample": images(4, 32), "sample_posterior": True}, sample)


def autoencoder_tiny() -> Case:
    model = df.AutoencoderTiny(
        encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16), num_encoder_blocks=(1, 2),
        num_decoder_blocks=(2, 1),
    )  # fmt: skip
    return Case(model.train(), {"sample": images(4, 64)}, sample)


def vq_model() -> Case:
    model = df.VQModel(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=8, num_vq_embeddings=64,
    )  # fmt: skip
    return Case(model.train(), {"sample": images(4, 32)}, sample)


def autoencoder_dc() -> Case:
    model = df.AutoencoderDC(
        latent_channels=8, attention_head_dim=8, encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(16, 32),
        decoder_block_out_channels=(16, 32), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)), scaling_factor=1.0,
    )  # fmt: skip
    return Case(model.train(), {"sample": images(4, 32)}, sample)


def dit() -> Case:
    model = df.DiTTransformer2DModel(
        **HEADS, in_channels=4, out_channels=8, num_layers=2, dropout=0.1, sample_size=16, patch_size=2,
        num_embeds_ada_norm=100, norm_num_groups=8,
    )  # fmt: skip
    return Case(model.train(), {"hidden_states": _latents(), "timestep": _steps(), "class_labels": _steps()}, sample)


def pixart() -> Case:
    model = df.PixArtTransformer2DModel(
        **HEADS, in_channels=4, out_channels=8, num_layers=2, dropout=0.1, cross_attention_dim=64, sample_size=16,
        patch_size=2, norm_num_groups=8, caption_channels=32, use_additional_conditions=False,
    )  # fmt: skip
    batch = {
        "hidden_states": _latents(),
        "encoder_hidden_states": noise(4, 12, 32),
        "timestep": _steps(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return Case(model.train(), batch, sample)


def transformer_2d() -> Case:
    model = df.Transformer2DModel(
        **HEADS, in_channels=32, num_layers=2, dropout=0.1, norm_num_groups=8, cross_attention_dim=32
    )
    return Case(
        model.train(), {"hidden_states": noise(4, 32, 16, 16), "encoder_hidden_states": noise(4, 12, 32)}, sample
    )


def sd3() -> Case:
    model = df.SD3Transformer2DModel(
        **LATENT, **HEADS, patch_size=2, num_layers=2, joint_attention_dim=32, caption_projection_dim=64,
        pooled_projection_dim=64, out_channels=4, pos_embed_max_size=16,
    )  # fmt: skip
    batch = {
        "hidden_states": _latents(),
        "encoder_hidden_states": noise(4, 12, 32),
        "pooled_projections": noise(4, 64),
        "timestep": _steps(),
    }
    return Case(model.train(), batch, sample)


def flux() -> Case:
    model = df.FluxTransformer2DModel(
        **HEADS, patch_size=1, in_channels=16, num_layers=1, num_single_layers=2, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    batch = {
        "hidden_states": noise(4, 64, 16),
        "encoder_hidden_states": noise(4, 12, 32),
        "pooled_projections": noise(4, 32),
        "timestep": noise(4).sigmoid(),
        "img_ids": torch.zeros(64, 3),
        "txt_ids": torch.zeros(12, 3),
    }
    return Case(model.train(), batch, sample)


def sana() -> Case:
    model = df.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=16, num_layers=2,
        num_cross_attention_heads=4, cross_attention_head_dim=16, cross_attention_dim=64, caption_channels=32,
        dropout=0.1, sample_size=16, patch_size=1,
    )  # fmt: skip
    batch = {"hidden_states": _latents(), "encoder_hidden_states": noise(4, 12, 32), "timestep": _steps()}
    return Case(model.train(), batch, sample)


def hunyuan_dit() -> Case:
    model = df.HunyuanDiT2DModel(
        **HEADS, in_channels=4, patch_size=2, sample_size=16, hidden_size=64, num_layers=2, mlp_ratio=2.0,
        learn_sigma=True, cross_attention_dim=32, cross_attention_dim_t5=32, pooled_projection_dim=16, text_len=12,
        text_len_t5=12, norm_type="layer_norm", use_style_cond_and_image_meta_size=False,
    )  # fmt: skip
    batch = {
        "hidden_states": _latents(),
        "timestep": _steps().float(),
        "encoder_hidden_states": noise(4, 12, 32),
        "text_embedding_mask": torch.ones(4, 12),
        "encoder_hidden_states_t5": noise(4, 12, 32),
        "text_embedding_mask_t5": torch.ones(4, 12),
        "image_rotary_emb": (torch.ones(64, 16), torch.zeros(64, 16)),
    }
    return Case(model.train(), batch, sample)


def lumina2() -> Case:
    model = df.Lumina2Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, hidden_size=48, num_layers=2, num_refiner_layers=1,
        num_attention_heads=2, num_kv_heads=1, multiple_of=16, axes_dim_rope=(8, 8, 8), axes_lens=(64, 32, 32),
        cap_feat_dim=32,
    )  # fmt: skip
    batch = {
        "hidden_states": _latents(),
        "timestep": noise(4).sigmoid(),
        "encoder_hidden_states": noise(4, 12, 32),
        "encoder_attention_mask": torch.ones(4, 12, dtype=torch.bool),
    }
    return Case(model.train(), batch, sample)


def uvit_2d() -> Case:
    model = df.UVit2DModel(
        hidden_size=32, cond_embed_dim=32, micro_cond_encode_dim=8, micro_cond_embed_dim=80, encoder_hidden_size=32,
        vocab_size=64, codebook_size=48, in_channels=32, block_out_channels=32, num_res_blocks=1,
        block_num_heads=4, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, sample_size=16,
        downsample=True, upsample=True, hidden_dropout=0.1, attention_dropout=0.1,
    )  # fmt: skip
    batch = {
        "input_ids": integers(48, 4, 16, 16),
        "encoder_hidden_states": noise(4, 12, 32),
        "pooled_text_emb": noise(4, 32),
        "micro_conds": torch.ones(4, 10),
    }
    return Case(model.train(), batch, square)


def cogvideox() -> Case:
    model = df.CogVideoXTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=32, num_layers=2, dropout=0.1,
        sample_width=16, sample_height=16, sample_frames=5, patch_size=2, temporal_compression_ratio=4,
        max_text_seq_length=12,
    )  # fmt: skip
    batch = {"hidden_states": noise(2, 2, 4, 16, 16), "encoder_hidden_states": noise(2, 12, 32), "timestep": _steps(2)}
    return Case(model.train(), batch, sample)


def ltx_video() -> Case:
    model = df.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=16, cross_attention_dim=64,
        num_layers=2, caption_channels=32,
    )  # fmt: skip
    batch = {
        "hidden_states": noise(2, 128, 8),
        "encoder_hidden_states": noise(2, 12, 32),
        "timestep": noise(2).sigmoid(),
        "encoder_attention_mask": torch.ones(2, 12),
        "num_frames": 2,
        "height": 8,
        "width": 8,
    }
    return Case(model.train(), batch, sample)


def wan() -> Case:
    model = df.WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=32, freq_dim=32,
        ffn_dim=128, num_layers=2, rope_max_seq_len=64,
    )  # fmt: skip
    batch = {"hidden_states": noise(2, 4, 2, 16, 16), "timestep": _steps(2), "encoder_hidden_states": noise(2, 12, 32)}
    return Case(model.train(), batch, sample)


def stable_audio() -> Case:
    model = df.StableAudioDiTModel(
        sample_size=64, in_channels=8, num_layers=2, attention_head_dim=16, num_attention_heads=4,
        num_key_value_attention_heads=2, out_channels=8, cross_attention_dim=32, time_proj_dim=32,
        global_states_input_dim=32, cross_attention_input_dim=32,
    )  # fmt: skip
    batch = {
        "hidden_states": noise(4, 8, 64),
        "timestep": noise(4).sigmoid(),
        "encoder_hidden_states": noise(4, 12, 32),
        "global_hidden_states": noise(4, 1, 32),
        "rotary_embedding": (torch.ones(65, 8), torch.zeros(65, 8)),
    }
    return Case(model.train(), batch, sample)


CASES = (
    unet_2d, unet_2d_condition, unet_1d, unet_3d_condition, unet_spatio_temporal, controlnet, autoencoder_kl,
    autoencoder_tiny, vq_model, autoencoder_dc, dit, pixart, transformer_2d,
    sd3, flux, sana, hunyuan_dit, lumina2, uvit_2d, cogvideox, ltx_video, wan, stable_audio,
)  # fmt: skip
