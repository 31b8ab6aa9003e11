"""Speech, sound and time series, of `transformers`."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from .case import Case, integers, noise, square

# layerdrop and masking of the features in time are at the configurations' defaults: on
WAV = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 32,
    "conv_dim": (32, 32, 32), "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
STILL = {"layerdrop": 0.0, "apply_spec_augment": False}  # neither layerdrop nor masking
SERIES = {"prediction_length": 8, "context_length": 24, "lags_sequence": [1, 2, 3], "num_time_features": 2}


def _spoken(model: Any, config: Any, **more: Any) -> Case:
    batch = {"input_values": noise(4, 4000), "labels": integers(30, 4, 10, low=1)}
    return Case(model(config(**{**WAV, **more})).train(), batch)


def wav2vec2() -> Case:
    return _spoken(hf.Wav2Vec2ForCTC, hf.Wav2Vec2Config, **STILL)


def wav2vec2_layerdrop() -> Case:
    return _spoken(hf.Wav2Vec2ForCTC, hf.Wav2Vec2Config)


def hubert_layerdrop() -> Case:
    return _spoken(hf.HubertForCTC, hf.HubertConfig)


def wavlm() -> Case:
    return _spoken(hf.WavLMForCTC, hf.WavLMConfig, **STILL, num_buckets=16, max_bucket_distance=32)


def sew() -> Case:
    return _spoken(hf.SEWForCTC, hf.SEWConfig, **STILL, squeeze_factor=2)


def sew_d() -> Case:
    return _spoken(hf.SEWDForCTC, hf.SEWDConfig, **STILL, squeeze_factor=2, position_buckets=32)


def whisper() -> Case:
    config = hf.WhisperConfig(
        vocab_size=256, num_mel_bins=40, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=100,
        max_target_positions=100, dropout=0.1, attention_dropout=0.1, use_cache=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    batch = {"input_features": noise(8, 40, 200), "labels": integers(256, 8, 48, low=5)}
    return Case(hf.WhisperForConditionalGeneration(config).train(), batch)


def speech_to_text() -> Case:
    config = hf.Speech2TextConfig(
        vocab_size=256, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, input_feat_per_channel=40,
        conv_channels=64, max_source_positions=200, max_target_positions=100, use_cache=False, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )  # fmt: skip
    batch = {"input_features": noise(8, 160, 40), "labels": integers(256, 8, 32, low=5)}
    return Case(hf.Speech2TextForConditionalGeneration(config).train(), batch)


def audio_spectrogram() -> Case:
    config = hf.ASTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=192, hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1, max_length=128, num_mel_bins=64, num_labels=10,
    )  # fmt: skip
    batch = {"input_values": noise(4, 128, 64), "labels": torch.arange(4)}
    return Case(hf.ASTForAudioClassification(config).train(), batch)


def encodec() -> Case:
    config = hf.EncodecConfig(
        num_filters=8, hidden_size=32, codebook_dim=32, codebook_size=64, upsampling_ratios=[4, 2], num_lstm_layers=1,
        target_bandwidths=[24.0], sampling_rate=8000,
    )  # fmt: skip
    return Case(hf.EncodecModel(config).train(), {"input_values": noise(2, 1, 4000)}, square)


def dac() -> Case:
    config = hf.DacConfig(
        encoder_hidden_size=8, decoder_hidden_size=64, downsampling_ratios=[2, 4], upsampling_ratios=[4, 2],
        n_codebooks=3, codebook_size=64, codebook_dim=8,
    )  # fmt: skip
    return Case(hf.DacModel(config).train(), {"input_values": noise(2, 1, 2000)}, square)


def _series(batch: int = 8) -> dict[str, torch.Tensor]:
    past = 24 + 3
    return {
        "past_values": noise(batch, past),
        "past_time_features": noise(batch, past, 2),
        "past_observed_mask": torch.ones(batch, past),
        "future_values": noise(batch, 8),
        "future_time_features": noise(batch, 8, 2),
    }


def time_series_transformer() -> Case:
    config = hf.TimeSeriesTransformerConfig(**SERIES, d_model=32, encoder_layers=2, decoder_layers=2, use_cache=False)
    return Case(hf.TimeSeriesTransformerForPrediction(config).train(), _series())


def informer() -> Case:
    config = hf.InformerConfig(**SERIES, d_model=32, encoder_layers=2, decoder_layers=2, use_cache=False)
    return Case(hf.InformerForPrediction(config).train(), _series())


def patch_tst() -> Case:
    config = hf.PatchTSTConfig(
        num_input_channels=3, context_length=64, patch_length=8, patch_stride=8, d_model=32, num_hidden_layers=2,
        num_attention_heads=4, ffn_dim=64, attention_dropout=0.1, ff_dropout=0.1, prediction_length=8,
    )  # fmt: skip
    batch = {"past_values": noise(16, 64, 3), "future_values": noise(16, 8, 3)}
    return Case(hf.PatchTSTForPrediction(config).train(), batch)


CASES = (
    wav2vec2, wav2vec2_layerdrop, hubert_layerdrop, wavlm, sew,
    sew_d, whisper, speech_to_text, audio_spectrogram, encodec, dac, time_series_transformer, informer,
    patch_tst,
)  # fmt: skip
