"""Llama, Qwen2 and Qwen3 decoders as pure functions over one parameter tree."""
