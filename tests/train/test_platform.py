"""Compiled programs are kept between processes, within a limit, and never against JAX's own settings."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import jax

from papyrax.train import platform

PROGRAM = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax import monitoring
from papyrax.train import platform

events = []
monitoring.register_event_listener(lambda name, **_: events.append(name))
platform.keep_compiled(Path(sys.argv[1]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: jnp.sort(x) @ x)(jnp.arange(8.0))
print(events.count("/jax/compilation_cache/cache_hits"))
"""


def hits(folder):
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], env=env, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_a_second_process_compiles_nothing_anew(tmp_path):
    assert hits(tmp_path) == 0
    assert hits(tmp_path) > 0


def test_the_oldest_go_beyond_the_limit_and_jaxs_settings_stand(tmp_path, monkeypatch):
    settings = {}
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", "", raising=False)
    platform.keep_compiled(tmp_path)
    (folder,) = (tmp_path / "compiled").iterdir()
    assert settings["jax_compilation_cache_dir"] == str(folder)
    for age, name in enumerate(("new", "middle", "old")):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (time.time() - age, time.time() - age))
    platform.keep_compiled(tmp_path, limit=250)
    assert sorted(f.name for f in folder.iterdir()) == ["middle", "new"]
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", "elsewhere", raising=False)
    settings.clear()
    platform.keep_compiled(tmp_path / "other")
    assert not settings and not (tmp_path / "other").exists()
