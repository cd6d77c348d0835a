"""Decoders: configurations, sharding, initialisation, the float64 reference, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from tw_compile.model_file import preset_names
from tw_compile.models.attention import attention_implementation
from tw_compile.models.config import ADDED_PLANS, config_from_dict, load_config, tensor_parallel_plan, truncate_layers
from tw_compile.models.decoder import Decoder, build_decoder
from tw_compile.models.reference import reference_forward, to_double
from tw_compile.planning import layer_shape
from tw_compile.planning.presets import preset_layer
from tw_compile.runner.worker import checkpoint_folder
from tw_compile.testing import GlooRanks
from tw_compile.testing.capture import capture_graphs, fake_cuda, fake_process_group

EMBEDDINGS_ALONE = {"embed_tokens": "embedding_rowwise"}
"""The plan that transformers 5.24 has of gpt_oss, hunyuan_v1_dense and eight families more."""

WITHOUT_A_PLAN = (
    "bamba",
    "diffllama",
    "dory",
    "falcon_h1",
    "hunyuan_vl_text",
    "lfm2",
    "lfm3",
    "qwen3_vl_text",
    "stablelm",
)
"""These eight, and one of which no transformers has any plan. An older transformers lacks dory and lfm3."""


def tiny(family: str) -> PretrainedConfig:
    return config_from_dict(FAMILIES[family])


def build(config: PretrainedConfig, world_size: int = 1, rank: int = 0, seed: int = 0) -> Decoder:
    with fake_process_group(world_size, rank):
        return build_decoder(config, device="cpu", dtype=torch.float32, seed=seed)


def token_ids(seq: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (2, seq), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", preset_names())
def test_preset_has_the_shape_its_file_says(name: str) -> None:
    config = load_config(name)
    assert config.hidden_size % config.num_attention_heads == 0
    assert config.dtype == torch.bfloat16
    assert getattr(config, "layer_types", None) is None or len(config.layer_types) == config.num_hidden_layers


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", preset_names())
def test_a_layer_that_is_read_from_a_preset_alone_is_the_one_of_transformers(name: str, world_size: int) -> None:
    config = load_config(name)
    expected = layer_shape(config, tensor_parallel_plan(config), world_size), config.num_hidden_layers
    left_to_transformers = config.model_type in ("gemma2", "gpt_oss", "olmo2")
    assert preset_layer(name, world_size) == (None if left_to_transformers else expected)


def test_a_file_is_no_preset(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(FAMILIES["llama"]))
    assert preset_layer(str(tmp_path / "model"), 2) is None


def test_load_config_reads_a_file_and_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen3"]))
    for source in (tmp_path, tmp_path / "config.json"):
        assert load_config(str(source)).model_type == "qwen3"


def test_load_config_names_the_presets() -> None:
    with pytest.raises(ValueError, match=r"source: expected a preset .*tiny-llama.*got 'no-such-model'"):
        load_config("no-such-model")


def test_load_config_rejects_an_unknown_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ValueError, match=r"model_type: .* got 'abacus'"):
        load_config(str(tmp_path))


def test_truncate_layers_cuts_per_layer_lists() -> None:
    config = load_config("gemma-2-9b")
    assert len(truncate_layers(config, 3).layer_types) == 3
    assert len(config.layer_types) == 42
    with pytest.raises(ValueError, match="num_layers: expected 1 to 42, got 43"):
        truncate_layers(config, 43)


def test_scores_with_a_soft_cap_are_not_left_to_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("gemma-2-9b")
    monkeypatch.setattr(MODEL_MAPPING[type(config)], "_supports_sdpa", True)  # as versions say that ignore the cap
    assert attention_implementation(config) == "eager"
    config.attn_logit_softcapping = None
    assert attention_implementation(config) != "eager"


def test_build_decoder_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match="default process group"):
        build_decoder(tiny("llama"), device="cpu", dtype=torch.float32)


def test_heads_that_do_not_divide_are_refused() -> None:
    config = tiny("llama")
    config.num_key_value_heads = 2
    with pytest.raises(ValueError, match=r"config.num_key_value_heads: expected a multiple of the world size 4, got 2"):
        build(config, world_size=4)


def test_width_that_does_not_divide_is_refused() -> None:
    config = tiny("llama")
    config.intermediate_size = 254
    with pytest.raises(ValueError, match=r"layers.0.mlp.*does not divide evenly over the world size 4"):
        build(config, world_size=4)


@pytest.mark.parametrize("family", [family for family in WITHOUT_A_PLAN if family in CONFIG_MAPPING])
def test_family_without_a_plan_is_refused_before_a_checkpoint_is_read(family: str, tmp_path: Path) -> None:
    config = config_from_dict(FAMILIES["llama"] | {"model_type": family, "head_dim": 16})
    refused = pytest.raises(ValueError, match=f"'{family}' has no tensor-parallel plan of its layers")
    with fake_process_group(2), refused:
        build_decoder(config, device="cpu", dtype=torch.float32, checkpoint=tmp_path / "absent")


def test_family_with_a_plan_of_the_embeddings_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_from_dict(FAMILIES["llama"] | {"model_type": "stablelm"})
    monkeypatch.setattr(type(config), "base_model_tp_plan", EMBEDDINGS_ALONE)
    for read in (tensor_parallel_plan, partial(build, world_size=2)):
        with pytest.raises(ValueError, match="'stablelm' has no tensor-parallel plan of its layers"):
            read(config)


def test_decoder_without_final_norm_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(tiny("llama"))
    del model.norm
    with pytest.raises(ValueError, match="LlamaModel has no final norm"):
        Decoder(model, set())


def test_our_plan_of_the_layers_completes_one_of_the_embeddings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("gpt_oss")
    monkeypatch.setattr(type(config), "base_model_tp_plan", EMBEDDINGS_ALONE)
    assert tensor_parallel_plan(config) == EMBEDDINGS_ALONE | ADDED_PLANS["gpt_oss"]
    assert {"embed_tokens.weight", "layers.0.self_attn.q_proj.weight"} <= build(config, world_size=2).sharded


def test_a_plan_that_transformers_has_of_the_layers_is_taken_instead_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = tiny("gpt_oss"), {"layers.*.self_attn.o_proj": "rowwise"}
    monkeypatch.setattr(type(config), "base_model_tp_plan", plan)
    assert tensor_parallel_plan(config) == plan
    assert "layers.0.self_attn.q_proj.weight" not in build(config, world_size=2).sharded


@pytest.mark.parametrize("family", ["gpt_oss", "qwen2"])
def test_sharded_parameters_differ_by_rank_and_replicated_ones_do_not(family: str) -> None:
    first, second = build(tiny(family), 2, rank=0), build(tiny(family), 2, rank=1)
    others = dict(second.model.named_parameters())
    for name, parameter in first.model.named_parameters():
        assert torch.equal(parameter, others[name]) == (name not in first.sharded), name
    assert "layers.0.self_attn.q_proj.bias" in first.sharded
    assert "layers.0.input_layernorm.weight" not in first.sharded
    assert torch.equal(first.norm.weight, second.norm.weight)


def test_padding_token_may_lie_in_another_ranks_rows() -> None:
    config = tiny("llama")
    config.pad_token_id = config.vocab_size - 1
    with fake_process_group(2), torch.no_grad():
        decoder = build_decoder(config, device="cpu", dtype=torch.float32)
        rows = decoder.model.embed_tokens(torch.tensor([[1, config.pad_token_id]]))[0]
    assert rows[0].any() and not rows[1].any()  # the other rank looks the padding token up


def test_same_seed_gives_the_same_weights() -> None:
    weight = build(tiny("llama")).norm.weight
    assert torch.equal(weight, build(tiny("llama")).norm.weight)
    assert not torch.equal(weight, build(tiny("llama"), seed=1).norm.weight)


@pytest.mark.parametrize(("family", "centre"), [("llama", 1.0), ("gemma2", 0.0)])
def test_norm_weights_scatter_around_their_neutral_value(family: str, centre: float) -> None:
    weight = build(tiny(family)).norm.weight
    assert abs(weight.mean() - centre) < 0.05
    assert 0.02 < weight.std() < 0.1


@pytest.mark.parametrize("family", ["gemma3_text", "llama", "phi", "qwen3_moe"])
def test_buffers_equal_those_of_an_ordinary_model(family: str) -> None:
    expected = dict(AutoModel.from_config(tiny(family)).named_buffers())
    actual = dict(build(tiny(family)).model.named_buffers())
    assert expected
    assert actual.keys() == expected.keys()
    for name, buffer in actual.items():
        torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0)


def test_residual_is_the_input_of_the_final_norm() -> None:
    decoder = build(tiny("gpt_neox"))
    with torch.no_grad():
        hidden, residual = decoder(token_ids())
    torch.testing.assert_close(hidden, decoder.norm(residual))
    assert not torch.allclose(hidden, residual)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_reference_keeps_double_precision(family: str) -> None:
    """The norm, whose Python code casts to float32, must not lose digits."""
    config = tiny(family)
    with fake_process_group(1):
        decoder = build_decoder(config, device="cpu", dtype=torch.float32)
        double = to_double(decoder)
        hidden, residual = reference_forward(double, token_ids())
        with torch.no_grad():
            low_hidden, low_residual = decoder(token_ids())
    weight = double.norm.weight + (1.0 if family == "gemma2" else 0.0)
    expected = residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weight
    assert hidden.dtype == torch.float64
    torch.testing.assert_close(hidden, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(low_residual.double(), residual, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(low_hidden.double(), hidden, rtol=1e-4, atol=1e-4)


def test_reference_does_not_share_weights_with_its_source() -> None:
    with fake_process_group(2):
        decoder = build_decoder(tiny("llama"), device="cpu", dtype=torch.float32)
        double = to_double(decoder)
    for parameter in decoder.parameters():
        parameter.zero_()
    with fake_process_group(2):
        hidden, _ = reference_forward(double, token_ids())
    assert hidden.abs().max() > 0.1


def test_fake_cuda_needs_no_memory_for_a_large_model() -> None:
    with fake_process_group(8), fake_cuda():
        decoder = build_decoder(load_config("llama-3.3-70b"), device="cuda", dtype=torch.bfloat16)
    assert {str(parameter.device) for parameter in decoder.parameters()} == {"cuda:0"}
    assert decoder.model.layers[79].mlp.up_proj.weight.shape == (28672 // 8, 8192)


@pytest.mark.full
def test_capture_keeps_the_sequence_length_symbolic() -> None:
    with fake_process_group(2), fake_cuda():
        decoder = build_decoder(tiny("llama"), device="cuda", dtype=torch.bfloat16)
        (graph,) = capture_graphs(decoder, (torch.zeros(1, 32, dtype=torch.long, device="cuda"),), dynamic=True)
    (mm, *_) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert isinstance(mm.meta["val"].shape[0], torch.SymInt)


SHARDED_FAMILIES = ["gemma2", "gpt_oss", "llama", "mixtral", "olmo2", "phi3", "qwen2", "starcoder2"]


def _unshard(name: str, shards: list[torch.Tensor], full: torch.Size) -> torch.Tensor:
    (dim,) = (dim for dim, (part, whole) in enumerate(zip(shards[0].shape, full, strict=True)) if part != whole)
    if name.endswith("experts.gate_up_proj"):  # gate and up are packed: each rank has a slice of both
        return torch.cat([half for pair in zip(*(s.chunk(2, dim) for s in shards), strict=True) for half in pair], dim)
    return torch.cat(shards, dim)


def _run_sharded(rank: int, folder: Path) -> None:
    for family in SHARDED_FAMILIES:
        decoder = build_decoder(tiny(family), device="cpu", dtype=torch.float32, num_layers=1)
        with torch.no_grad():
            hidden, _ = decoder(token_ids())
        doubled, _ = reference_forward(to_double(decoder), token_ids())
        parameters = {**dict(decoder.model.named_parameters()), f"{decoder.norm_name}.weight": decoder.norm.weight}
        if getattr(decoder.norm, "bias", None) is not None:
            parameters[f"{decoder.norm_name}.bias"] = decoder.norm.bias
        torch.save(
            {"hidden": hidden, "doubled": doubled, "parameters": parameters, "sharded": decoder.sharded},
            folder / f"{family}-{rank}.pt",
        )


@pytest.mark.full
def test_two_ranks_compute_what_one_unsharded_model_computes(gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    """A wrong slice, a missing sum or a bias added twice changes the hidden state."""
    gloo_ranks.run(_run_sharded, tmp_path)
    for family in SHARDED_FAMILIES:
        first, second = (torch.load(tmp_path / f"{family}-{rank}.pt", weights_only=False) for rank in range(2))
        model = AutoModel.from_config(truncate_layers(tiny(family), 1), dtype=torch.float32).eval()
        assert first["parameters"].keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            shards = [saved["parameters"][name] for saved in (first, second)]
            parameter.data = _unshard(name, shards, parameter.shape) if name in first["sharded"] else shards[0]
        with torch.no_grad():
            expected = model(token_ids()).last_hidden_state
        for saved in (first, second):
            torch.testing.assert_close(saved["hidden"], expected, rtol=1e-4, atol=1e-4, msg=f"{family}")
            torch.testing.assert_close(saved["doubled"].float(), expected, rtol=1e-4, atol=1e-4)


def _save_checkpoint(family: str, folder: Path) -> PreTrainedModel:
    """Save a model with every parameter off its initial value, and return it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(family), dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_checkpoint_on_one_rank(family: str, tmp_path: Path) -> None:
    expected = _save_checkpoint(family, tmp_path).base_model(token_ids()).last_hidden_state
    with fake_process_group(1), torch.no_grad():
        decoder = build_decoder(load_config(str(tmp_path)), device="cpu", dtype=torch.float32, checkpoint=tmp_path)
        hidden, _ = decoder(token_ids())
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


def _run_checkpoint(rank: int, folder: Path) -> None:
    decoder = build_decoder(load_config(str(folder)), device="cpu", dtype=torch.float32, checkpoint=folder)
    assert {f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"} <= decoder.sharded
    head, expected = torch.load(folder / "expected.pt")
    with torch.no_grad():
        hidden, _ = decoder(token_ids())
    torch.testing.assert_close(hidden @ head.T, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt_oss", "hunyuan_v1_dense", "mixtral"])
def test_checkpoint_on_two_ranks_gives_the_logits_of_the_whole_model(
    family: str, gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    """transformers 5.23 has no plan of the first two, and 5.24 has one of the embeddings alone: they must load by ours."""
    pytest.importorskip("accelerate", reason="transformers loads a sharded checkpoint only with accelerate installed")
    model = _save_checkpoint(family, tmp_path)
    torch.save((model.lm_head.weight, model(token_ids()).logits), tmp_path / "expected.pt")
    gloo_ranks.run(_run_checkpoint, tmp_path)


_PICTURES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
MULTI_MODAL = {
    "gemma3": {"vision_config": _PICTURES | {"patch_size": 14}},
    "mistral3": {"vision_config": _PICTURES | {"patch_size": 14}},
    "qwen3_vl": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 128},
    },
}
"""Families of which each has another prefix before the names of its text model, or another kind of encoder of pictures."""


def _save_multi_modal(family: str, folder: Path) -> PreTrainedModel:
    """Save a multi-modal model, and return its text part."""
    torch.manual_seed(0)
    own = dict(MULTI_MODAL[family])
    vision = own.pop("vision_config")
    text = FAMILIES["llama"] | own | {"head_dim": 16}
    text.pop("model_type")
    config = CONFIG_MAPPING[family](text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    model.save_pretrained(folder)
    return model.model.language_model


def _load(folder: Path, num_layers: int | None = None) -> Decoder:
    return build_decoder(
        load_config(str(folder)), device="cpu", dtype=torch.float32, num_layers=num_layers, checkpoint=folder
    )


@pytest.mark.parametrize("family", MULTI_MODAL)
def test_the_text_part_of_a_multi_modal_checkpoint_is_loaded(family: str, tmp_path: Path) -> None:
    text = _save_multi_modal(family, tmp_path)
    with fake_process_group(1), torch.no_grad():
        hidden, _ = _load(tmp_path)(token_ids())
    torch.testing.assert_close(hidden, text(token_ids()).last_hidden_state, rtol=1e-4, atol=1e-4)


def _run_multi_modal(rank: int, folder: Path) -> None:
    with torch.no_grad():
        hidden, _ = _load(folder)(token_ids())
    torch.testing.assert_close(hidden, torch.load(folder / "expected.pt"), rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_the_text_part_of_a_multi_modal_checkpoint_is_loaded_on_two_ranks(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    text = _save_multi_modal("gemma3", tmp_path)
    torch.save(text(token_ids()).last_hidden_state, tmp_path / "expected.pt")
    gloo_ranks.run(_run_multi_modal, tmp_path)


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file({name: weight.clone() for name, weight in change(load_file(file)).items()}, file)


def _without_norms_of_keys(folder: Path) -> None:
    _rewrite(folder, lambda weights: {name: one for name, one in weights.items() if ".k_norm." not in name})


def _below(*prefixes: str) -> Callable[[Path], None]:
    """Names of the text's weights that begin with each of ``prefixes``, one model behind the other."""
    return lambda folder: _rewrite(
        folder, lambda weights: {before + name: one for before in prefixes for name, one in weights.items()}
    )


def _with_a_scale(folder: Path) -> None:
    _rewrite(folder, lambda weights: weights | {"model.layers.1.mlp.up_proj.weight_scale_inv": torch.ones(1)})


def _without_a_shard(folder: Path) -> None:
    (folder / "model-00002-of-00004.safetensors").unlink()


def _with_half_a_shard(folder: Path) -> None:
    file = folder / "model-00002-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _with_an_index_of_another_form(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def _with_half_an_index(folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    file.write_text(file.read_text()[:-100])


OF_QWEN3 = r"of the 24 weights of Qwen3Model, the first of them is"
DAMAGED = {
    "weights": (_without_norms_of_keys, rf"it lacks 2 {OF_QWEN3} 'layers.0.self_attn.k_norm.weight'"),
    "two models alike": (_below("thinker.", "talker."), rf"it lacks 24 {OF_QWEN3} 'embed_tokens.weight'"),
    "scales": (
        _with_a_scale,
        r"Qwen3Model would leave out .* \(1, the first of them is 'layers.1.mlp.up_proj.weight_scale_inv'",
    ),
    "no shard": (_without_a_shard, r"model-00002-of-00004.safetensors can't be read \(No such file"),
    "half a shard": (_with_half_a_shard, r"model-00002-of-00004.safetensors can't be read \("),
    "no weight_map": (_with_an_index_of_another_form, r"model.safetensors.index.json can't be read \("),
    "half an index": (_with_half_an_index, r"model.safetensors.index.json can't be read \("),
}


def _save_damaged(damage: str, folder: Path) -> str:
    """Save a damaged checkpoint of two layers, and return what is said of it."""
    model = AutoModelForCausalLM.from_config(tiny("qwen3"), dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="400KB" if damage.split()[0] in ("no", "half") else "1GB")
    change, words = DAMAGED[damage]
    change(folder)
    return f"checkpoint {str(folder)!r}: {words}"


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_checkpoint_is_refused_with_which_numbers_would_be_wrong(damage: str, tmp_path: Path) -> None:
    words = _save_damaged(damage, tmp_path)
    with fake_process_group(1), pytest.raises(ValueError, match=words):
        _load(tmp_path)


def test_what_belongs_to_no_module_of_the_model_is_left_alone(tmp_path: Path) -> None:
    """A head, a second layer where one is wanted, and one more prefix before all of it."""
    model = _save_checkpoint("llama", tmp_path)
    _below("thinker.")(tmp_path)
    with fake_process_group(1):
        parameters = dict(_load(tmp_path, num_layers=1).model.named_parameters())
    expected = dict(model.base_model.named_parameters())
    assert "layers.0.mlp.up_proj.weight" in parameters
    assert all(torch.equal(parameter, expected[name]) for name, parameter in parameters.items())


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_a_folder_with_an_index_has_weights_even_if_their_files_are_lacking(index: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen3"]))
    assert checkpoint_folder(str(tmp_path)) is None
    (tmp_path / index).touch()
    assert checkpoint_folder(str(tmp_path)) == tmp_path


def _run_damaged(rank: int, folder: Path, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _load(folder)


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGED)
def test_every_rank_refuses_a_damaged_checkpoint(damage: str, gloo_ranks: GlooRanks, tmp_path: Path) -> None:
    gloo_ranks.run(_run_damaged, tmp_path, _save_damaged(damage, tmp_path))
