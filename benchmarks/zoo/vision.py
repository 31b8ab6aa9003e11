"""Images, video and images with text, of `transformers`: classification, detection, segmentation, depth, matching."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from .case import Case, images, integers, labelled, noise, square, tokens

VIT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192, "image_size": 64,
    "patch_size": 8, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
SWIN = {
    "image_size": 64, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
    "drop_path_rate": 0.1, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
CONV = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
DETECTION = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_queries": 10,
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
}  # fmt: skip
TEXT_SIDE = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "attention_dropout": 0.1, "eos_token_id": 255, "bos_token_id": 1,
}  # fmt: skip
IMAGE_SIDE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64,
    "patch_size": 8, "attention_dropout": 0.1,
}  # fmt: skip


def _classifier(model: Any, config: Any) -> Case:
    return Case(model(config).train(), labelled())


def _resnet(stages: list[str]) -> Any:
    return hf.ResNetConfig(
        embedding_size=16,
        hidden_sizes=CONV["hidden_sizes"],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=stages,
    )


def _swin(stages: list[str]) -> Any:
    sizes = {**SWIN, "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "window_size": 2}
    return hf.SwinConfig(**sizes, out_features=stages)


STAGES = ["stage1", "stage2", "stage3", "stage4"]


def vit() -> Case:
    return _classifier(hf.ViTForImageClassification, hf.ViTConfig(**VIT, num_labels=10))


def beit() -> Case:
    config = hf.BeitConfig(**VIT, num_labels=10, drop_path_rate=0.1, use_relative_position_bias=True, out_indices=[2])
    return _classifier(hf.BeitForImageClassification, config)


def dinov2() -> Case:
    config = hf.Dinov2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=3, image_size=64, patch_size=8,
        num_labels=10, drop_path_rate=0.1, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return _classifier(hf.Dinov2ForImageClassification, config)


def vit_mae() -> Case:
    config = hf.ViTMAEConfig(
        **VIT, decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    )  # fmt: skip
    return Case(hf.ViTMAEForPreTraining(config).train(), {"pixel_values": images()})


def swin() -> Case:
    return _classifier(hf.SwinForImageClassification, hf.SwinConfig(**SWIN, num_labels=10))


def swin_v2() -> Case:
    return _classifier(hf.Swinv2ForImageClassification, hf.Swinv2Config(**SWIN, num_labels=10))


def convnext_v2() -> Case:
    config = hf.ConvNextV2Config(**CONV, num_labels=10, drop_path_rate=0.1)
    return _classifier(hf.ConvNextV2ForImageClassification, config)


def resnet() -> Case:
    model = hf.ResNetForImageClassification(hf.ResNetConfig(**CONV, embedding_size=16, num_labels=10))
    return Case(model.train(), labelled(4, 128))


def mobilenet_v2() -> Case:
    config = hf.MobileNetV2Config(depth_multiplier=0.25, num_labels=10, image_size=64)
    return _classifier(hf.MobileNetV2ForImageClassification, config)


def mobilevit() -> Case:
    config = hf.MobileViTConfig(
        image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64], num_labels=10,
        num_attention_heads=2,
    )  # fmt: skip
    return _classifier(hf.MobileViTForImageClassification, config)


def efficientnet() -> Case:
    config = hf.EfficientNetConfig(
        image_size=64, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320, num_labels=10
    )
    return _classifier(hf.EfficientNetForImageClassification, config)


def focalnet() -> Case:
    config = hf.FocalNetConfig(
        image_size=64, embed_dim=32, depths=[2, 2], focal_levels=[2, 2], focal_windows=[3, 3], num_labels=10,
        drop_path_rate=0.1,
    )  # fmt: skip
    return _classifier(hf.FocalNetForImageClassification, config)


def levit() -> Case:
    config = hf.LevitConfig(
        image_size=128, hidden_sizes=[32, 48, 64], num_attention_heads=[2, 3, 4], depths=[1, 1, 1], key_dim=[8, 8, 8],
        num_labels=10,
    )  # fmt: skip
    return Case(hf.LevitForImageClassification(config).train(), labelled(4, 128))


def hiera() -> Case:
    config = hf.HieraConfig(
        image_size=[64, 64], patch_size=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3], embed_dim=32,
        depths=[1, 1, 2], num_heads=[1, 2, 4], query_stride=[2, 2], num_query_pool=2, masked_unit_size=[4, 4],
        masked_unit_attention=[True, True, False], num_labels=10, drop_path_rate=0.1,
    )  # fmt: skip
    return _classifier(hf.HieraForImageClassification, config)


def video_mae() -> Case:
    config = hf.VideoMAEConfig(**VIT, num_frames=4, tubelet_size=2, num_labels=10)
    return Case(
        hf.VideoMAEForVideoClassification(config).train(),
        {"pixel_values": noise(2, 4, 3, 64, 64), "labels": torch.arange(2)},
    )


def segformer() -> Case:
    config = hf.SegformerConfig(
        hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 3, 4], decoder_hidden_size=32,
        num_labels=5, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, drop_path_rate=0.1,
    )  # fmt: skip
    batch = {"pixel_values": images(), "labels": integers(5, 4, 64, 64)}
    return Case(hf.SegformerForSemanticSegmentation(config).train(), batch)


def upernet() -> Case:
    config = hf.UperNetConfig(
        backbone_config=_swin(STAGES), hidden_size=32, pool_scales=[1, 2], num_labels=5, auxiliary_in_channels=64,
        auxiliary_channels=32,
    )  # fmt: skip
    batch = {"pixel_values": images(), "labels": integers(5, 4, 64, 64)}
    return Case(hf.UperNetForSemanticSegmentation(config).train(), batch)


def maskformer() -> Case:
    detector = hf.DetrConfig(**{**DETECTION, "backbone_config": _resnet(["stage4"])})
    config = hf.MaskFormerConfig(
        backbone_config=_swin(STAGES), decoder_config=detector, fpn_feature_size=32, mask_feature_size=32, num_labels=5
    )
    return Case(hf.MaskFormerModel(config).train(), {"pixel_values": images(4, 128)}, square)


def mask2former() -> Case:
    config = hf.Mask2FormerConfig(
        backbone_config=_resnet(STAGES), hidden_dim=32, feature_size=32, mask_feature_size=32,
        encoder_feedforward_dim=64, dim_feedforward=64, encoder_layers=2, decoder_layers=3,
        num_attention_heads=4, num_queries=10, num_labels=5,
    )  # fmt: skip
    return Case(hf.Mask2FormerModel(config).train(), {"pixel_values": images(2, 128)}, square)


def _boxes(output: Any) -> torch.Tensor:
    """In the place of the loss that matches queries with objects: it needs scipy."""
    found: torch.Tensor = output.logits.square().mean() + output.pred_boxes.square().mean()
    return found


def _detector(model: Any, config: Any, size: int = 64) -> Case:
    return Case(model(config).train(), {"pixel_values": images(2, size)}, _boxes)


def detr() -> Case:
    config = hf.DetrConfig(**{**DETECTION, "backbone_config": _resnet(["stage4"])})
    return _detector(hf.DetrForObjectDetection, config, 128)


def deformable_detr() -> Case:
    config = hf.DeformableDetrConfig(
        **{**DETECTION, "backbone_config": _resnet(STAGES[1:])}, num_feature_levels=3, disable_custom_kernels=True
    )
    return _detector(hf.DeformableDetrForObjectDetection, config, 128)


def rt_detr() -> Case:
    backbone = hf.RTDetrResNetConfig(
        embedding_size=16, hidden_sizes=CONV["hidden_sizes"], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=STAGES[1:],
    )  # fmt: skip
    config = hf.RTDetrConfig(
        backbone_config=backbone, backbone=None, use_timm_backbone=False, use_pretrained_backbone=False,
        freeze_backbone_batch_norms=False, encoder_hidden_dim=32, encoder_in_channels=[32, 48, 64],
        encoder_ffn_dim=64, encoder_attention_heads=4, d_model=32, decoder_in_channels=[32, 32, 32],
        decoder_ffn_dim=64, decoder_layers=2, decoder_attention_heads=4, num_queries=10, num_denoising=0,
    )  # fmt: skip
    return _detector(hf.RTDetrForObjectDetection, config, 64)


def yolos() -> Case:
    config = hf.YolosConfig(**{**VIT, "image_size": [64, 64]}, num_detection_tokens=10)
    return _detector(hf.YolosForObjectDetection, config)


def sam() -> Case:
    config = hf.SamConfig(
        vision_config={
            "hidden_size": 32, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 64, "patch_size": 8, "mlp_dim": 64,
            "window_size": 4, "global_attn_indexes": [1], "num_pos_feats": 16,
        },
        prompt_encoder_config={"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 8},
        mask_decoder_config={
            "hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 4, "iou_head_hidden_dim": 32,
            "num_hidden_layers": 2,
        },
    )  # fmt: skip
    batch = {"pixel_values": images(2), "input_points": noise(2, 1, 2, 2) * 10 + 32}
    return Case(hf.SamModel(config).train(), batch, lambda o: o.pred_masks.square().mean() + o.iou_scores.mean())


def dpt() -> Case:
    config = hf.DPTConfig(
        **{**VIT, "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], is_hybrid=False,
        neck_hidden_sizes=[16, 16, 24, 32], fusion_hidden_size=16,
    )  # fmt: skip
    return Case(hf.DPTForDepthEstimation(config).train(), {"pixel_values": images()}, square)


def clip() -> Case:
    config = hf.CLIPConfig(text_config=TEXT_SIDE, vision_config=IMAGE_SIDE, projection_dim=32)
    batch = {"input_ids": tokens(8, 48), "pixel_values": images(8), "return_loss": True}
    return Case(hf.CLIPModel(config).train(), batch)


def siglip() -> Case:
    config = hf.SiglipConfig(text_config=TEXT_SIDE, vision_config=IMAGE_SIDE)
    batch = {"input_ids": tokens(8, 48), "pixel_values": images(8), "return_loss": True}
    return Case(hf.SiglipModel(config).train(), batch)


def blip() -> Case:
    config = hf.BlipConfig(
        text_config={**TEXT_SIDE, "encoder_hidden_size": 64, "projection_dim": 32, "attention_probs_dropout_prob": 0.1},
        vision_config=IMAGE_SIDE, projection_dim=32,
    )  # fmt: skip
    ids = tokens(8, 48)
    return Case(
        hf.BlipForConditionalGeneration(config).train(),
        {"input_ids": ids, "pixel_values": images(8), "labels": ids.clone()},
    )


def vilt() -> Case:
    config = hf.ViltConfig(**VIT, vocab_size=256, max_position_embeddings=64, num_labels=10)
    batch = {"input_ids": tokens(4, 32), "pixel_values": images(4)}
    return Case(hf.ViltModel(config).train(), batch, square)


def llava() -> Case:
    vision = hf.CLIPVisionConfig(**IMAGE_SIDE)
    language = hf.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=160, use_cache=False,
    )  # fmt: skip
    config = hf.LlavaConfig(vision_config=vision, text_config=language, image_token_index=3, image_token_id=3)
    ids = tokens(4, 96)
    ids[:, :64] = 3
    batch = {"input_ids": ids, "pixel_values": images(4), "labels": ids.clone()}
    return Case(hf.LlavaForConditionalGeneration(config).train(), batch)


CASES = (
    vit, beit, dinov2, vit_mae, swin, swin_v2, convnext_v2, resnet, mobilenet_v2, mobilevit,
    efficientnet, focalnet, levit, hiera, video_mae, segformer, upernet, maskformer, mask2former,
    detr, deformable_detr, rt_detr, yolos, sam, dpt, clip, siglip, blip, vilt, llava,
)  # fmt: skip
