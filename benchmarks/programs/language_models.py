# SPDX-License-Identifier: Apache-2.0
"""Language models of transformers: encoders with their heads, decoders, encoder-decoders."""

from __future__ import annotations

import torch

from benchmarks.programs.program import Program
from benchmarks.programs.transformer import (
    Batch,
    answers,
    classes,
    language,
    masked,
    sequences,
    tokens,
    transformer,
    without_padding,
)

_HEADS: dict[str, tuple[str, Batch]] = {
    "masked LM": ("ForMaskedLM", masked),
    "sequence classes": ("ForSequenceClassification", classes),
    "token classes": ("ForTokenClassification", tokens),
    "answers": ("ForQuestionAnswering", answers),
}
_ENCODERS: dict[str, dict[str, object]] = {
    "Bert": {}, "Roberta": {"pad_token_id": 1}, "DistilBert": {"dim": 32, "hidden_dim": 64},
    "Albert": {}, "Electra": {}, "Deberta": {"relative_attention": True, "pos_att_type": ["c2p"]},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "MPNet": {},
    "MobileBert": {"intra_bottleneck_size": 16}, "SqueezeBert": {}, "XLMRoberta": {},
    "Longformer": {"attention_window": [4, 4]},
    "BigBird": {"attention_type": "original_full"}, "Funnel": {
        "block_sizes": [1, 1], "d_head": 8, "d_inner": 64},
    "FNet": {}, "Nystromformer": {"segment_means_seq_len": 64, "num_landmarks": 64},
    "ConvBert": {"conv_kernel_size": 3, "num_groups": 1, "head_ratio": 2}, "RoFormer": {},
    "LayoutLM": {}, "Ernie": {}, "MegatronBert": {}, "IBert": {"quant_mode": False},
    "ModernBert": {"global_attn_every_n_layers": 2, "attn_implementation": "sdpa"},
    "Canine": {}, "Data2VecText": {"pad_token_id": 1},
}  # fmt: skip
_HEADS_OF = {
    "Bert": tuple(_HEADS), "Roberta": ("masked LM", "sequence classes"),
    "Albert": ("masked LM", "answers"), "Electra": ("masked LM", "token classes"),
    "DebertaV2": ("masked LM", "sequence classes"), "Canine": ("sequence classes",),
    "ModernBert": ("masked LM", "sequence classes"),
    "MobileBert": ("masked LM", "answers"),
}  # fmt: skip
_DECODERS: dict[str, tuple[str, dict[str, object]]] = {
    "GPT2": ("GPT2LMHeadModel", {}),
    "GPTNeo": ("GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]]}),
    "GPTNeoX": ("GPTNeoXForCausalLM", {}), "GPTJ": ("GPTJForCausalLM", {"rotary_dim": 4}),
    "OPT": ("OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "Bloom": ("BloomForCausalLM", {}), "Llama": ("LlamaForCausalLM", {}),
    "Mistral": ("MistralForCausalLM", {"sliding_window": 8}),
    "Qwen2": ("Qwen2ForCausalLM", {}), "Qwen3": ("Qwen3ForCausalLM", {}),
    "Gemma": ("GemmaForCausalLM", {}), "Gemma2": ("Gemma2ForCausalLM", {"sliding_window": 8}),
    "Gemma3Text": ("Gemma3ForCausalLM", {"sliding_window": 8}), "Phi": ("PhiForCausalLM", {}),
    "Phi3": ("Phi3ForCausalLM", {}), "Falcon": ("FalconForCausalLM", {}),
    "Mpt": ("MptForCausalLM", {"n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "StableLm": ("StableLmForCausalLM", {}), "Starcoder2": ("Starcoder2ForCausalLM", {}),
    "CodeGen": ("CodeGenForCausalLM", {"rotary_dim": 4}), "Cohere": ("CohereForCausalLM", {}),
    "Olmo": ("OlmoForCausalLM", {}), "Olmo2": ("Olmo2ForCausalLM", {}),
    "Granite": ("GraniteForCausalLM", {}), "Glm": ("GlmForCausalLM", {}),
    "SmolLM3": ("SmolLM3ForCausalLM", {}), "Helium": ("HeliumForCausalLM", {}),
    "Nemotron": ("NemotronForCausalLM", {}), "Persimmon": ("PersimmonForCausalLM", {}),
    "BioGpt": ("BioGptForCausalLM", {}),
    "XGLM": ("XGLMForCausalLM", {"ffn_dim": 64, "attention_heads": 4}),
    "XLNet": ("XLNetLMHeadModel", {"d_inner": 64}),
    "OpenAIGPT": ("OpenAIGPTLMHeadModel", {}), "CTRL": ("CTRLLMHeadModel", {"dff": 64}),
    "Mixtral": ("MixtralForCausalLM", {}), "Qwen2Moe": ("Qwen2MoeForCausalLM", {}),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", {}), "Olmoe": ("OlmoeForCausalLM", {}),
    "PhiMoE": ("PhimoeForCausalLM", {}),
    "DeepseekV3": ("DeepseekV3ForCausalLM", {
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "num_key_value_heads": 4}),
    "Mamba": ("MambaForCausalLM", {"state_size": 4, "time_step_rank": 4}),
    "Mamba2": ("Mamba2ForCausalLM", {
        "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}),
    "RecurrentGemma": ("RecurrentGemmaForCausalLM", {
        "lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"],
        "num_key_value_heads": 1}),
    "Rwkv": ("RwkvForCausalLM", {"attention_hidden_size": 32, "context_length": 64}),
}  # fmt: skip
_NAMES = {
    "Gemma3Text": "Gemma3TextConfig",
    "PhiMoE": "PhimoeConfig",
    "DeepseekV3": "DeepseekV3Config",
}
_LED: dict[str, object] = {
    "attention_window": 4, "max_encoder_position_embeddings": 64,
    "max_decoder_position_embeddings": 64,
}  # fmt: skip
_SEQUENCES: dict[str, tuple[str, dict[str, object]]] = {
    "T5": ("T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
    "MT5": ("MT5ForConditionalGeneration", {}),
    "UMT5": ("UMT5ForConditionalGeneration", {}),
    "LongT5": ("LongT5ForConditionalGeneration", {
        "local_radius": 3, "decoder_start_token_id": 0}),
    "SwitchTransformers": ("SwitchTransformersForConditionalGeneration", {
        "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 8,
        "decoder_start_token_id": 0}),
    "Bart": ("BartForConditionalGeneration", {}),
    "MBart": ("MBartForConditionalGeneration", {}),
    "Pegasus": ("PegasusForConditionalGeneration", {}),
    "Marian": ("MarianMTModel", {"decoder_vocab_size": 100}),
    "BlenderbotSmall": ("BlenderbotSmallForConditionalGeneration", {}),
    "M2M100": ("M2M100ForConditionalGeneration", {}),
    "LED": ("LEDForConditionalGeneration", _LED),
}  # fmt: skip


def _quantizers_in_eval(model: torch.nn.Module) -> None:
    """Let the ranges of activations be, which only a quantized model reads."""
    for module in model.modules():
        if type(module).__name__ == "QuantAct":
            module.eval()


def _variants() -> list[Program]:
    """Return programs that are refused as they come, as they run."""
    encoder, masks = "text encoder", without_padding(masked)
    return [
        transformer("DebertaV2: sequence classes, problem type given", "DebertaV2Config",
                    "DebertaV2ForSequenceClassification", classes, kind=encoder,
                    problem_type="single_label_classification", **_ENCODERS["DebertaV2"]),
        transformer("Longformer: masked LM, no padding", "LongformerConfig",
                    "LongformerForMaskedLM", masks, kind=encoder, **_ENCODERS["Longformer"]),
        transformer("IBert: masked LM, ranges kept", "IBertConfig", "IBertForMaskedLM", masked,
                    kind=encoder, at_start=_quantizers_in_eval, **_ENCODERS["IBert"]),
        transformer("LED, no padding", "LEDConfig", "LEDForConditionalGeneration",
                    without_padding(sequences), kind="encoder-decoder", **_LED),
    ]  # fmt: skip


def _encoders() -> list[Program]:
    made = []
    for name, options in _ENCODERS.items():
        for head in _HEADS_OF.get(name, ("masked LM",)):
            ending, batch = _HEADS[head]
            model = name + ending
            config = f"{name}Config"
            kind = "text encoder"
            label = f"{name}: {head}"
            made.append(transformer(label, config, model, batch, kind=kind, **options))
    return made


PROGRAMS: list[Program] = [
    *_encoders(),
    *(
        transformer(name, _NAMES.get(name, f"{name}Config"), model, language, kind="decoder", **o)
        for name, (model, o) in _DECODERS.items()
    ),
    *(
        transformer(name, f"{name}Config", model, sequences, kind="encoder-decoder", **options)
        for name, (model, options) in _SEQUENCES.items()
    ),
    *_variants(),
]
