"""DARP: imitation by retrieving expert states and acting on the differences to them (ICLR 2026, arXiv 2606.09758)."""
