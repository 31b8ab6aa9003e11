"""Models of `torchaudio`: recognition, separation, synthesis."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchaudio import models, transforms

from ..case import Case, integers, noise, uneven


def _conformer() -> Case:
    model = models.Conformer(32, 4, 64, 2, 7, dropout=0.1)
    return Case(model.train(), (noise(2, 80, 32), torch.tensor([80, 70])), uneven)


def _emformer() -> Case:
    model = models.Emformer(32, 4, 64, 2, 16, dropout=0.1, left_context_length=8, right_context_length=4)
    return Case(model.train(), (noise(2, 68, 32), torch.tensor([64, 64])), uneven)


def _separator() -> Case:
    model = models.ConvTasNet(2, 16, 32, 3, 16, 32, 3, 2)
    return Case(model.train(), noise(2, 1, 4000), uneven)


def _demucs() -> Case:
    model = models.HDemucs(["a", "b"], audio_channels=1, channels=8, nfft=1024, depth=4)
    return Case(model.train(), noise(1, 1, 8192), uneven)


def _wav2vec2() -> Case:
    options: dict[str, Any] = {
        "extractor_mode": "group_norm", "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2), (16, 3, 2)],
        "extractor_conv_bias": False, "encoder_embed_dim": 32, "encoder_projection_dropout": 0.1,
        "encoder_pos_conv_kernel": 16, "encoder_pos_conv_groups": 4, "encoder_num_layers": 2, "encoder_num_heads": 4,
        "encoder_attention_dropout": 0.1, "encoder_ff_interm_features": 64, "encoder_ff_interm_dropout": 0.1,
        "encoder_dropout": 0.1, "encoder_layer_norm_first": False, "encoder_layer_drop": 0.0, "aux_num_out": 20,
    }  # fmt: skip
    return Case(models.wav2vec2_model(**options).train(), noise(2, 4000), uneven)


def _tacotron() -> Case:
    model = models.Tacotron2(
        n_mels=16, n_symbol=40, symbol_embedding_dim=32, encoder_embedding_dim=32, encoder_n_convolution=2,
        decoder_rnn_dim=32, attention_rnn_dim=32, attention_hidden_dim=16, attention_location_n_filter=8,
        attention_location_kernel_size=7, prenet_dim=16, postnet_n_convolution=3, postnet_embedding_dim=32,
    )  # fmt: skip
    batch = (integers(40, 2, 12), torch.tensor([12, 12]), noise(2, 16, 10), torch.tensor([10, 10]))
    return Case(model.train(), batch, uneven)


class _Spectral(nn.Module):
    """A classifier of sound on its mel spectrogram, masked as for training."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.spectrogram = transforms.MelSpectrogram(n_fft=128, n_mels=32)
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body((self.spectrogram(x * self.gain) + 1e-5).log()[:, None])


CASES = {
    "conformer": _conformer,
    "emformer": _emformer,
    "conv_tas_net": _separator,
    "hybrid_demucs": _demucs,
    "deep_speech": lambda: Case(models.DeepSpeech(16, 48, 20, dropout=0.1).train(), noise(2, 1, 60, 16), uneven),
    "wav2letter": lambda: Case(models.Wav2Letter(20, "mfcc", 16).train(), noise(2, 16, 60), uneven),
    "wav2vec2": _wav2vec2,
    "tacotron2": _tacotron,
    "wave_rnn": lambda: Case(models.WaveRNN([2, 4], 16, 8, 2, 16, 16, 5, 16, 16, 16).train(),
                             (noise(2, 1, 64), noise(2, 1, 16, 12)), uneven),
    "mel_classifier": lambda: Case(_Spectral().train(), noise(4, 4000), uneven),
}  # fmt: skip
