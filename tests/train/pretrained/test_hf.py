"""Hugging Face folders: round trip, shards, both spellings of rotary scaling, and every refusal."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.nets.decoder.config import nano
from papyrax.methods.nets.decoder.params import init
from papyrax.methods.nets.rope import RopeConfig
from papyrax.train.pretrained import hf
from papyrax.train.pretrained.errors import WeightsError

ROPES = {
    "default": RopeConfig(16, original_length=512),
    "linear": RopeConfig(16, kind="linear", factor=2.0, original_length=512),
    "dynamic": RopeConfig(16, kind="dynamic", factor=2.0, original_length=512),
    "yarn": RopeConfig(16, kind="yarn", factor=2.0, original_length=64),
    "llama3": RopeConfig(16, kind="llama3", factor=8.0, original_length=64),
    "longrope": RopeConfig(16, kind="longrope", factor=2.0, original_length=64, short=(1.0,) * 8, long=(2.0,) * 8),
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_saved_models_come_back(tmp_path, family):
    cfg = nano(family)
    cfg = dataclasses.replace(cfg, rope=dataclasses.replace(cfg.rope, original_length=cfg.context))
    params = init(jax.random.key(0), cfg, dtype=jnp.bfloat16)
    hf.save(params, cfg, tmp_path)
    got, got_cfg = hf.load(tmp_path, jnp.bfloat16)
    assert got_cfg == cfg
    jax.tree.map(np.testing.assert_array_equal, got, params)
    assert hf.load(tmp_path)[0]["layers"]["q"].dtype == jnp.float32
    whole = hf.open_safetensors(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(whole["model.layers.1.mlp.up_proj.weight"], np.asarray(params["layers"]["up"][1]).T)


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_settings_in_both_spellings(kind):
    cfg = nano(rope=ROPES[kind])
    said = hf.settings(cfg)
    assert hf.config(said) == cfg
    newer = {k: v for k, v in said.items() if k not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {"rope_theta": said["rope_theta"], **(said["rope_scaling"] or {"rope_type": "default"})}
    assert hf.config(newer) == cfg


def test_shards(tmp_path):
    cfg = nano()
    params = init(jax.random.key(0), cfg)
    hf.save(params, cfg, tmp_path)
    tensors = hf.open_safetensors(tmp_path / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for shard, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        hf._write_safetensors(tmp_path / shard, {n: np.array(tensors[n]) for n in part})
        weight_map |= dict.fromkeys(part, shard)
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path)[0], params)
    index.write_text(json.dumps({"weight_map": {**weight_map, "more": "a.safetensors"}}))
    with pytest.raises(WeightsError, match="promises a tensor more"):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gemma2"}, "has model_type 'gemma2'"),
        ({"hidden_act": "gelu"}, "sets hidden_act to 'gelu'"),
        ({"attention_bias": True}, "sets attention_bias to True"),
        ({"num_experts": 8}, "sets num_experts, which is not understood"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "has rope scaling 'mrope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "spin": 1}}, "sets spin for rope scaling 'linear'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "mixes layer types"),
        ({"num_key_value_heads": 3}, "multiple of kv_heads"),
        ({"hidden_size": 48, "head_dim": 16}, r"has shape \(257, 64\), but the model wants \(257, 48\)"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "has a tensor model.layers.1"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, changes, message):
    cfg = nano()
    hf.save(init(jax.random.key(0), cfg), cfg, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf.settings(cfg) | changes))
    with pytest.raises(WeightsError, match=message):
        hf.load(tmp_path)


def test_damaged_folders_are_told(tmp_path):
    with pytest.raises(WeightsError, match=r"config\.json does not exist"):
        hf.load(tmp_path)
    cfg = nano()
    hf.save(init(jax.random.key(0), cfg), cfg, tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for data, message in (
        (whole[:-9], "is cut off: tensor"),
        (whole[:50], "would end at byte"),
        (whole[:8] + b"x" + whole[9:], "not JSON"),
    ):
        path.write_bytes(data)
        with pytest.raises(WeightsError, match=message):
            hf.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="is not JSON"):
        hf.load(tmp_path)
