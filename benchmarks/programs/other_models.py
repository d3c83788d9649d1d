# SPDX-License-Identifier: Apache-2.0
"""Models of images, sound, several of them at once, and series of transformers."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.programs.program import Program, integers, normal, uniform
from benchmarks.programs.transformer import ROWS, Batch, ids, images, padding, transformer

_IMAGES: dict[str, dict[str, Any]] = {
    "ViT": {}, "DeiT": {}, "Beit": {}, "Dinov2": {}, "ViTMSN": {},
    "Swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2,
             "patch_size": 4},
    "Swinv2": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2,
               "patch_size": 4},
    "ConvNext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "ConvNextV2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
               "layer_type": "bottleneck"},
    "RegNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    "MobileNetV1": {"depth_multiplier": 0.25, "lr": 0.002},
    "MobileNetV2": {"depth_multiplier": 0.25, "lr": 0.002},
    "MobileViT": {"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
                  "num_attention_heads": 2, "patch_size": 2},
    "EfficientNet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "PoolFormer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "patch_size": 7},
    "Pvt": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2]},
    "Segformer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
                  "decoder_hidden_size": 16},
    "Bit": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 4},
    "FocalNet": {"embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
                 "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 4},
    "Levit": {"hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2],
              "key_dim": [4, 4, 4], "depths": [1, 1, 1], "image_size": 64, "patch_size": 16,
              "lr": 0.005},
}  # fmt: skip
# Their last maps are a pixel of an image of 32 x 32, and BatchNorm needs more values: of two that
# are near, its gradient is all rounding.
_LARGE = {"Levit": 8, "MobileNetV1": 2, "MobileNetV2": 2}
_SOUND: dict[str, str] = {
    "Wav2Vec2": "Wav2Vec2ForCTC", "Hubert": "HubertForCTC", "WavLM": "WavLMForCTC",
    "UniSpeech": "UniSpeechForCTC", "Data2VecAudio": "Data2VecAudioForCTC", "SEW": "SEWForCTC",
}  # fmt: skip
_SOUND_OPTIONS: dict[str, Any] = {
    "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
    "apply_spec_augment": False,
}  # fmt: skip


def _large_images(rows: int) -> Batch:
    return lambda k: {"pixel_values": normal(k, rows, 3, 64, 64), "labels": integers(k, 3, rows)}


def _sound(k: int) -> dict[str, Any]:
    return {"input_values": normal(k, ROWS, 400), "labels": integers(k, 90, ROWS, 5) + 5}


def _spectrograms(k: int) -> dict[str, Any]:
    return {"input_values": normal(k, ROWS, 32, 16), "labels": integers(k, 3, ROWS)}


def _speech(k: int) -> dict[str, Any]:
    return {"input_features": normal(k, ROWS, 16, 40), "labels": ids(k, 1, 6)}


def _pairs(k: int) -> dict[str, Any]:
    return {"input_ids": ids(k), "attention_mask": padding(k), "return_loss": True,
            "pixel_values": normal(k, ROWS, 3, 32, 32)}  # fmt: skip


def _maps(k: int) -> dict[str, Any]:
    return {"pixel_values": normal(k, ROWS, 3, 32, 32), "labels": integers(k, 3, ROWS, 32, 32)}


def _series(k: int) -> dict[str, Any]:
    return {"past_values": normal(k, ROWS, 32, 2), "future_values": normal(k, ROWS, 8, 2, seed=1)}


def _decisions(k: int) -> dict[str, Any]:
    return {
        "states": normal(k, ROWS, 6, 5), "actions": normal(k, ROWS, 6, 3, seed=1),
        "rewards": uniform(k, ROWS, 6, 1), "returns_to_go": uniform(k, ROWS, 6, 1, seed=1),
        "timesteps": torch.arange(6).repeat(ROWS, 1), "attention_mask": torch.ones(ROWS, 6),
    }  # fmt: skip


def _action_loss(out: Any) -> torch.Tensor:
    loss: torch.Tensor = out.action_preds.square().mean()
    return loss


_TEXT_PART = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
              "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 0,
              "eos_token_id": 1}  # fmt: skip
_IMAGE_PART = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
               "num_attention_heads": 4, "image_size": 32, "patch_size": 8}  # fmt: skip
_PARTS: dict[str, Any] = {"text_config": _TEXT_PART, "vision_config": _IMAGE_PART}
_SERIES: dict[str, Any] = {"context_length": 32, "prediction_length": 8, "num_input_channels": 2}

PROGRAMS: list[Program] = [
    *(
        transformer(
            name, f"{name}Config", f"{name}ForImageClassification",
            _large_images(_LARGE[name]) if name in _LARGE else images, kind="images", **options,
        )
        for name, options in _IMAGES.items()
    ),
    transformer("Segformer: maps", "SegformerConfig", "SegformerForSemanticSegmentation", _maps,
                kind="segmentation", **_IMAGES["Segformer"]),
    transformer("MobileViT: maps", "MobileViTConfig", "MobileViTForSemanticSegmentation", _maps,
                kind="segmentation", aspp_out_channels=16, **_IMAGES["MobileViT"]),
    *(
        transformer(name, f"{name}Config", model, _sound, kind="sound", **{
            **_SOUND_OPTIONS, **({"squeeze_factor": 1} if name == "SEW" else {})})
        for name, model in _SOUND.items()
    ),
    transformer("AST", "ASTConfig", "ASTForAudioClassification", _spectrograms, kind="sound",
                max_length=32, num_mel_bins=16, patch_size=8, frequency_stride=8, time_stride=8),
    transformer("Whisper", "WhisperConfig", "WhisperForConditionalGeneration", _speech,
                kind="sound", num_mel_bins=16, max_source_positions=20, max_target_positions=32),
    transformer("CLIP", "CLIPConfig", "CLIPModel", _pairs, kind="images and text",
                projection_dim=16, **_PARTS),
    transformer("SigLIP", "SiglipConfig", "SiglipModel", _pairs, kind="images and text", **_PARTS),
    transformer("PatchTST", "PatchTSTConfig", "PatchTSTForPrediction", _series, kind="series",
                patch_length=8, patch_stride=8, **_SERIES),
    transformer("PatchTSMixer", "PatchTSMixerConfig", "PatchTSMixerForPrediction", _series,
                kind="series", patch_length=8, patch_stride=8, **_SERIES),
    transformer("DecisionTransformer", "DecisionTransformerConfig", "DecisionTransformerModel",
                _decisions, kind="reinforcement learning", loss=_action_loss, state_dim=5,
                act_dim=3, max_ep_len=16),
]  # fmt: skip
