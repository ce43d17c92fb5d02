"""Small models of many architectures of transformers, and batches for each; see test_architectures.py.

A row contains the class of a model type, the function that makes its batches, and the sizes that differ from `SMALL`.
A size of `SMALL` counts if the config of the type, or a nested config, has its key and the row has no other value.
Dropout and random masking are off, because the results of two runs are compared.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

VOCAB, TOKENS, PIXELS, LARGE, LABELS = 64, 8, 16, 64, 5
IMAGE = 5
"""The placeholder token for a patch of an image."""

DROPS = ("drop", "mask_time_prob", "mask_feature_prob", "apply_spec_augment")

SMALL: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 2),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 24
    ),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "sliding_window": 4,
    "image_size": PIXELS,
    "patch_size": 4,
    "projection_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
"""Small sizes, under all names that models have for them."""


def sizes(config: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that make a config small: `own`, those of `SMALL`, and the same for nested configs."""
    made: dict[str, Any] = {}
    for key, usual in config.to_dict().items():
        nested = getattr(config, key, None) if isinstance(usual, dict) else None
        if isinstance(nested, transformers.PretrainedConfig):
            made[key] = {"model_type": nested.model_type, **sizes(nested, own.get(key, {}))}
        elif key in SMALL and (usual is None or type(usual) is type(SMALL[key])):
            made[key] = SMALL[key]
        elif any(word in key for word in DROPS) and isinstance(usual, int | float):
            made[key] = type(usual)(0)
    return {**made, **{key: value for key, value in own.items() if not isinstance(made.get(key), dict)}}


# -- batches ----------------------------------------------------------------------------------------------------------

Batch = dict[str, Any]


def text(rows: int, random: torch.Generator) -> Batch:
    tokens = torch.randint(3, VOCAB, (rows, TOKENS), generator=random)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def long_text(rows: int, random: torch.Generator) -> Batch:
    """Long enough for several blocks or buckets."""
    tokens = torch.randint(3, VOCAB, (rows, 4 * TOKENS), generator=random)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def pair(rows: int, random: torch.Generator) -> Batch:
    """Two texts, the second one for the decoder."""
    return {**text(rows, random), "labels": torch.randint(3, VOCAB, (rows, TOKENS), generator=random)}


def image(rows: int, random: torch.Generator, size: int = PIXELS) -> Batch:
    labels = torch.randint(0, LABELS, (rows,), generator=random)
    return {"pixel_values": torch.randn(rows, 3, size, size, generator=random), "labels": labels}


def large_image(rows: int, random: torch.Generator) -> Batch:
    """For models that halve an image five times and take a mean, which is ill-conditioned over few values."""
    return image(rows, random, LARGE)


def bare_image(rows: int, random: torch.Generator) -> Batch:
    return {"pixel_values": image(rows, random)["pixel_values"]}


def video(rows: int, random: torch.Generator) -> Batch:
    labels = torch.randint(0, LABELS, (rows,), generator=random)
    return {"pixel_values": torch.randn(rows, 2, 3, PIXELS, PIXELS, generator=random), "labels": labels}


def captioned(rows: int, random: torch.Generator) -> Batch:
    """Matching images and texts, for a contrastive loss."""
    batch = {**text(rows, random), **bare_image(rows, random), "return_loss": True}
    del batch["labels"]
    batch["input_ids"][:, -1] = 2  # some models look for this token as the end of a text
    return batch


def unlabeled(rows: int, random: torch.Generator) -> Batch:
    """An image and words, without labels."""
    batch = captioned_words(rows, random)
    del batch["labels"]
    return batch


def captioned_words(rows: int, random: torch.Generator) -> Batch:
    """An image and its text as labels."""
    return {**text(rows, random), **bare_image(rows, random)}


def illustrated(rows: int, random: torch.Generator, pieces: int = (PIXELS // 4) ** 2) -> Batch:
    """Texts with an image among their tokens."""
    words = text(rows, random)["input_ids"].clamp(min=IMAGE + 1)
    tokens = torch.cat([torch.full((rows, pieces), IMAGE), words], dim=1)
    mask = torch.ones_like(tokens)
    return {**bare_image(rows, random), "input_ids": tokens, "attention_mask": mask, "labels": tokens}


def illustrated_by_4(rows: int, random: torch.Generator) -> Batch:
    """For a model that joins four patches into one."""
    return illustrated(rows, random, 4)


def illustrated_by_lists(rows: int, random: torch.Generator) -> Batch:
    """Texts with a list of images each."""
    batch = illustrated_by_4(rows, random)
    return {**batch, "pixel_values": batch["pixel_values"].unsqueeze(1)}


def illustrated_by_pieces(rows: int, random: torch.Generator) -> Batch:
    """Images that are cut into 4 x 4 patches, each of 2 frames, 3 colors and 4 x 4 pixels."""
    batch = illustrated_by_4(rows, random)
    grid = torch.tensor([[1, 4, 4]]).repeat(rows, 1)
    kinds = (batch["input_ids"] == IMAGE).int()
    pieces = torch.randn(rows * 16, 2 * 3 * 4 * 4, generator=random)
    return {**batch, "pixel_values": pieces, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def wave(rows: int, random: torch.Generator) -> Batch:
    labels = torch.randint(0, LABELS, (rows,), generator=random)
    return {"input_values": torch.randn(rows, 400, generator=random), "labels": labels}


def spoken(rows: int, random: torch.Generator) -> Batch:
    """A waveform and its text."""
    return {"input_values": torch.randn(rows, 1000, generator=random), "labels": pair(rows, random)["labels"]}


def spectrum(rows: int, random: torch.Generator) -> Batch:
    """A spectrogram and its text, with frequency before time, as in Whisper."""
    return {"input_features": torch.randn(rows, 8, 32, generator=random), "labels": pair(rows, random)["labels"]}


def frames(rows: int, random: torch.Generator) -> Batch:
    """The same with time before frequency."""
    batch = spectrum(rows, random)
    return {**batch, "input_features": batch["input_features"].transpose(1, 2).contiguous()}


def frames_of_a_class(rows: int, random: torch.Generator) -> Batch:
    batch = frames(rows, random)
    return {**batch, "labels": torch.randint(0, LABELS, (rows,), generator=random)}


def values_of_a_class(rows: int, random: torch.Generator) -> Batch:
    batch = frames_of_a_class(rows, random)
    return {"input_values": batch["input_features"], "labels": batch["labels"]}


def series(rows: int, random: torch.Generator) -> Batch:
    past, future = torch.randn(rows, 48, 1, generator=random).split((32, 16), dim=1)
    return {"past_values": past, "future_values": future}


# -- the table ---------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """The class of transformers that makes a model type, and the function that makes its batches.

    `draws`: its forward draws random numbers from the generator of the process, which thread ranks would share.
    """

    make: str
    feed: Callable[[int, torch.Generator], Batch]
    own: Mapping[str, Any] = {}
    draws: bool = False


def several(names: str, make: str, feed: Callable[[int, torch.Generator], Batch]) -> dict[str, Row]:
    """Rows for model types whose other settings are in `OWN`."""
    return {name: Row(make, feed, OWN.get(name, {}), name in DRAWING) for name in names.split()}


# -- sizes of single model types ---------------------------------------------------------------------------------------

FOUR = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
PYRAMID = {**FOUR, "num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16, "image_size": LARGE}
SWIN = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 4}
HYBRID = ["linear_attention", "full_attention"]
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": HYBRID,
}
HEARD = {
    "conv_dim": [8, 8],
    "conv_kernel": [8, 4],
    "conv_stride": [4, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
}
SEEN = {"image_token_id": IMAGE, "image_token_index": IMAGE}

ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}

OWN: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"layer_types": HYBRID},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "codegen": {"n_embd": 32, "n_head": 4, "rotary_dim": 4, "n_ctx": 64},
    "cpmant": {"dim_head": 8, "dim_ff": 24, "prompt_length": 4, "position_bias_num_buckets": 8},
    "ctrl": {"dff": 24},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "inkling_text": {
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "rel_extent": 16,
        "sliding_window_size": 4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2, "expert_ffn_hidden_size": 8, "num_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "chunk_size": 4,
        "moe_shared_expert_intermediate_size": 8,
    },
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 16},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["lsh", "local"],
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 3,  # otherwise it seeds torch from the clock
        "attention_head_size": 8,
        "feed_forward_size": 24,
        "local_attn_chunk_length": 4,
    },
    "xlnet": {"d_inner": 24, "d_head": 8},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "attention_hidden_size": 32,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "mamba_headdim": 8,
        "chunk_size": 4,
        "adapter_rank": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
    # encoders of text
    "big_bird": {"block_size": 2, "num_random_blocks": 1},
    "distilbert": {"hidden_dim": 24},
    "flaubert": {"emb_dim": 16},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_head": 8, "d_inner": 24},
    "layoutlm": {"max_2d_position_embeddings": 8},
    "longformer": {"attention_window": 4},
    "luke": {"entity_vocab_size": 32, "entity_emb_size": 8},
    "mobilebert": {"true_hidden_size": 16, "intra_bottleneck_size": 16},
    "roc_bert": {
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": VOCAB,
        "shape_embed_dim": 8,
        "shape_vocab_size": VOCAB,
    },
    "xlm": {"emb_dim": 16},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    # from text to text
    "bigbird_pegasus": {"block_size": 2, "num_random_blocks": 1},
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "fsmt": {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB},
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "longt5": {"decoder_start_token_id": 1, "local_radius": 4, "global_block_size": 4},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 16},
    "switch_transformers": {
        "decoder_start_token_id": 1,
        "router_jitter_noise": 0.0,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    # images
    "bit": {**FOUR, "embedding_size": 8, "num_groups": 2},
    "convnext": FOUR,
    "convnextv2": FOUR,
    "donut-swin": SWIN,
    "dpt": {"backbone_out_indices": [0, 1]},
    "focalnet": {
        "embed_dim": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
    },
    "hgnet_v2": {
        "embedding_size": 8,
        "depths": [1, 1],
        "hidden_sizes": [8, 16],
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 8],
        "stage_mid_channels": [8, 8],
        "stage_out_channels": [8, 16],
        "stage_num_blocks": [1, 1],
        "stage_downsample": [False, True],
        "stage_downsample_strides": [2, 2],
        "stage_light_block": [False, True],
        "stage_kernel_size": [3, 3],
        "stage_numb_of_layers": [1, 1],
    },
    "hiera": {
        "embed_dim": 8,
        "image_size": [LARGE, LARGE],
        "depths": [1, 1],
        "num_heads": [1, 2],
        "num_query_pool": 1,
        "masked_unit_attention": [True, False],
        "masked_unit_size": [4, 4],
    },
    "imagegpt": {"vocab_size": VOCAB + 1},  # one more for the start of every text
    "mobilevit": {
        "hidden_sizes": [16, 16, 16],
        "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 16],
        "image_size": LARGE,
        "patch_size": 2,
    },
    "poolformer": FOUR,
    "pvt": PYRAMID,
    "pvt_v2": PYRAMID,
    "regnet": {**FOUR, "embedding_size": 8, "groups_width": 4},
    "resnet": {**FOUR, "embedding_size": 8},
    "segformer": PYRAMID,
    "swiftformer": {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "image_size": LARGE},
    "swin": SWIN,
    "swinv2": SWIN,
    "textnet": {"stem_out_channels": 8, "hidden_sizes": [8, 8, 8, 16, 16]},
    "timesformer": {"num_frames": 2},
    "videomae": {"num_frames": 2},
    "vivit": {"num_frames": 2, "tubelet_size": [1, 4, 4]},
    "yolos": {"image_size": [PIXELS, PIXELS], "num_detection_tokens": 4},
    # sound
    **dict.fromkeys(("data2vec-audio", "hubert", "sew", "unispeech", "unispeech-sat", "wav2vec2"), HEARD),
    **dict.fromkeys(("wav2vec2-conformer", "wavlm"), HEARD),
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4},
    "moonshine": {
        "encoder_num_hidden_layers": 1,
        "encoder_num_attention_heads": 2,
        "encoder_num_key_value_heads": 2,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_num_key_value_heads": 2,
    },
    "sew-d": {**HEARD, "position_buckets": 8},
    "speech_to_text": {"input_feat_per_channel": 8, "conv_channels": 8},
    "speecht5": {**HEARD, "num_mel_bins": 8},
    "wav2vec2-bert": {"feature_projection_input_dim": 8, "classifier_proj_size": 8},
    "whisper": {"num_mel_bins": 8, "max_source_positions": 16},
    # numbers in time
    "patchtsmixer": {"num_targets": 1},
    "patchtst": {"prediction_length": 16, "patch_length": 4, "patch_stride": 4, "do_mask_input": False},
    # images and text
    "aya_vision": SEEN,
    "gemma3": {**SEEN, "mm_tokens_per_image": 16},
    "idefics3": SEEN,
    "internvl": {**SEEN, "vision_config": {"image_size": [PIXELS, PIXELS], "patch_size": [4, 4]}},
    "llava": SEEN,
    "paligemma": SEEN,
    "deepseek_vl": SEEN,
    "qwen2_vl": {**SEEN, "vision_config": {"hidden_size": 16}, "text_config": ROTATED},
    "qwen2_5_vl": {**SEEN, "vision_config": {"out_hidden_size": 16}, "text_config": ROTATED},
    "smolvlm": SEEN,
}
"""Settings that `SMALL` lacks, or that differ from it."""

DRAWING = {"big_bird", "bigbird_pegasus", "groupvit", "phimoe", "reformer", "vilt", "vit_mae"}
"""Attended positions, hashes, experts, the order of patches."""

ARCHITECTURES: Mapping[str, Row] = {
    **several(
        """afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba beam bert-generation biogpt bitnet bloom
        codegen cohere cohere2 cohere2_moe cpmant ctrl cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
        diffllama doge dots1 dots3_note_text ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba
        flex_olmo flint fuyu gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_bigcode gpt_neo
        gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
        granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling_text jais2
        jamba jetmoe kolibri1 laguna lfm2 lfm2_moe lfm3 llama4_text longcat_flash mamba mamba2 mellum minicpm3 minimax
        minimax_m2 minimax_m3_vl_text ministral ministral3 modernbert-decoder moshi mpt nanochat nemotron nemotron_h
        olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2_moe qwen3_5_moe_text
        qwen3_5_text qwen3_next recurrent_gemma rwkv seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma
        xglm xlnet youtu zamba zamba2 zaya""",
        "AutoModelForCausalLM",
        text,
    ),
    **several(
        """albert camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm esmc eurobert
        flaubert fnet funnel gte ibert jina_embeddings_v3 layoutlm longformer luke megatron-bert mobilebert modernbert
        mpnet mra nomic_bert nystromformer rembert roberta roberta-prelayernorm roc_bert roformer squeezebert tapas
        ultrabert xlm xlm-roberta xlm-roberta-xl xmod yoso""",
        "AutoModelForMaskedLM",
        text,
    ),
    **several(
        """bart blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100 marian mbart mt5 mvp nllb-moe
        pegasus pegasus_x plbart prophetnet seamless_m4t seamless_m4t_v2 switch_transformers t5gemma t5gemma2 umt5""",
        "AutoModelForSeq2SeqLM",
        pair,
    ),
    **several("reformer", "AutoModelForCausalLM", long_text),
    **several("big_bird", "AutoModelForMaskedLM", long_text),
    **several("bigbird_pegasus", "AutoModelForSeq2SeqLM", long_text),
    **several(
        "beit data2vec-vision dinov2 dinov2_with_registers donut-swin focalnet ijepa siglip swin swinv2 vit_msn",
        "AutoModelForImageClassification",
        image,
    ),
    **several(
        """bit convnext convnextv2 hgnet_v2 hiera mobilevit poolformer pvt pvt_v2 regnet resnet segformer swiftformer
        textnet""",
        "AutoModelForImageClassification",
        large_image,
    ),
    **several("imagegpt", "ImageGPTForCausalImageModeling", text),
    **several("deit dpt vit_mae yolos", "AutoModel", bare_image),
    **several("timesformer videomae vivit", "AutoModelForVideoClassification", video),
    **several(
        """data2vec-audio hubert sew sew-d unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm""",
        "AutoModelForAudioClassification",
        wave,
    ),
    **several("wav2vec2-bert", "AutoModelForAudioClassification", frames_of_a_class),
    **several("audio-spectrogram-transformer", "AutoModelForAudioClassification", values_of_a_class),
    **several("whisper", "AutoModelForSpeechSeq2Seq", spectrum),
    **several("speech_to_text", "AutoModelForSpeechSeq2Seq", frames),
    **several("moonshine speecht5", "AutoModelForSpeechSeq2Seq", spoken),
    **several("patchtst", "PatchTSTForPrediction", series),
    **several("patchtsmixer", "PatchTSMixerForPrediction", series),
    **several(
        "altclip chinese_clip clip clipseg flava groupvit metaclip_2 owlvit vision-text-dual-encoder",
        "AutoModel",
        captioned,
    ),
    **several("blip git", "AutoModelForImageTextToText", captioned_words),
    **several("vilt", "AutoModel", unlabeled),
    **several("deepseek_vl gemma3 llava paligemma", "AutoModelForImageTextToText", illustrated),
    **several("aya_vision internvl", "AutoModelForImageTextToText", illustrated_by_4),
    **several("idefics3 smolvlm", "AutoModelForImageTextToText", illustrated_by_lists),
    **several("qwen2_5_vl qwen2_vl", "AutoModelForImageTextToText", illustrated_by_pieces),
}
"""Model type -> how to make and feed it."""


def new_model(name: str) -> nn.Module:
    """A model in training mode, with the same random weights each time."""
    row = ARCHITECTURES[name]
    usual = transformers.AutoConfig.for_model(name)
    config = transformers.AutoConfig.for_model(name, **sizes(usual, row.own), num_labels=LABELS)
    made_by = getattr(transformers, row.make)
    torch.manual_seed(0)
    return getattr(made_by, "from_config", made_by)(config).train()
